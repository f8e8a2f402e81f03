//! Qwen3: llama with norms over each query and key head.

pub(crate) mod config;
