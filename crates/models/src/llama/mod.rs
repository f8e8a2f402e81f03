//! Llama and everything built like it: pre-norm blocks of grouped-query attention and a gated feed-forward.

pub(crate) mod config;
mod model;

pub use model::LlamaForCausalLm;
