//! Qwen3-MoE: qwen3 with experts instead of the feed-forward in some or all blocks.

pub(crate) mod config;
