//! Qwen2: llama with biases on q, k and v.

pub(crate) mod config;
