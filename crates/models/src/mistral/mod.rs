//! Mistral: llama with a sliding window on every block.

pub(crate) mod config;
