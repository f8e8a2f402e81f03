//! The decoder with latent attention.

use phalanx_nn::layers::LatentAttention;

use crate::ModelConfig;
use crate::block::DecoderLayer;
use crate::decoder::DecoderLm;

/// A DeepSeek-V3 language model.
pub type DeepseekV3ForCausalLm = DecoderLm<DecoderLayer<LatentAttention>>;

impl DeepseekV3ForCausalLm {
    /// A model of the config's shape, without values.
    pub fn new(c: &ModelConfig) -> DeepseekV3ForCausalLm {
        DecoderLm::with_blocks(c, |prefix, i| {
            DecoderLayer::named(prefix, c, i, |name| LatentAttention::named(name, c.latent_attention()))
        })
    }
}
