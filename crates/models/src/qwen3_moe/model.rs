//! The decoder.

use std::sync::Arc;

use phalanx_nn::layers::{Attention, FeedForward, RmsNorm};
use phalanx_nn::{Cx, Describe, Module, Result, Visitor};
use phalanx_tensor::Tensor;

use crate::ModelConfig;
use crate::decoder::DecoderLm;

/// One block.
pub struct DecoderLayer {
    input_layernorm: Arc<RmsNorm>,
    self_attn: Arc<Attention>,
    post_attention_layernorm: Arc<RmsNorm>,
    mlp: FeedForward,
}

impl DecoderLayer {
    fn named(prefix: &str, c: &ModelConfig, block: usize) -> DecoderLayer {
        let norm = |name: &str| Arc::new(RmsNorm::named(&format!("{prefix}.{name}"), c.hidden_size, c.rms_norm_eps));
        DecoderLayer {
            input_layernorm: norm("input_layernorm"),
            self_attn: Arc::new(Attention::named(&format!("{prefix}.self_attn"), c.attention(c.windows[block]))),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: c.feed_forward(&format!("{prefix}.mlp"), block),
        }
    }
}

impl Module for DecoderLayer {
    /// h_th: [T, H] -> [T, H]
    fn forward(&self, cx: &mut Cx, h_th: Tensor) -> Result<Tensor> {
        let a = cx.call("input_layernorm", &self.input_layernorm, h_th.clone())?;
        let a = cx.call("self_attn", &self.self_attn, a)?;
        let h_th = cx.add(h_th, a)?;
        let m = cx.call("post_attention_layernorm", &self.post_attention_layernorm, h_th.clone())?;
        let m = self.mlp.call(cx, "mlp", m)?;
        cx.add(h_th, m)
    }
}

impl Describe for DecoderLayer {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("input_layernorm", &*self.input_layernorm);
        v.child("self_attn", &*self.self_attn);
        v.child("post_attention_layernorm", &*self.post_attention_layernorm);
        v.child("mlp", self.mlp.describe());
    }
    fn kind(&self) -> &'static str {
        "block"
    }
}

/// A qwen3 language model with experts.
pub type Qwen3MoeForCausalLm = DecoderLm<DecoderLayer>;

impl Qwen3MoeForCausalLm {
    /// A model of the config's shape, without values.
    pub fn new(c: &ModelConfig) -> Qwen3MoeForCausalLm {
        DecoderLm::with_blocks(c, |prefix, i| DecoderLayer::named(prefix, c, i))
    }
}
