//! The decoder with grouped-query attention. Mistral, qwen2, qwen3 and qwen3_moe are this with switches of their configs turned.

use phalanx_nn::layers::Attention;

use crate::ModelConfig;
use crate::block::DecoderLayer;
use crate::decoder::DecoderLm;

/// A llama-like language model.
pub type LlamaForCausalLm = DecoderLm<DecoderLayer<Attention>>;

impl LlamaForCausalLm {
    /// A model of the config's shape, without values.
    pub fn new(c: &ModelConfig) -> LlamaForCausalLm {
        DecoderLm::with_blocks(c, |prefix, i| {
            DecoderLayer::named(prefix, c, i, |name| Attention::named(name, c.attention(c.windows[i])))
        })
    }
}
