//! The block that all decoders here are made of.

use std::sync::Arc;

use phalanx_nn::layers::{FeedForward, RmsNorm};
use phalanx_nn::{Cx, Describe, Module, Result, Visitor};
use phalanx_tensor::Tensor;

use crate::ModelConfig;

/// A pre-norm block of some attention `A` and a feed-forward, with experts or without.
pub struct DecoderLayer<A> {
    input_layernorm: Arc<RmsNorm>,
    self_attn: Arc<A>,
    post_attention_layernorm: Arc<RmsNorm>,
    mlp: FeedForward,
}

impl<A> DecoderLayer<A> {
    /// Block number `block`, whose parameters are named `prefix.…`. `attention` makes its attention of that one's prefix.
    pub(crate) fn named(prefix: &str, c: &ModelConfig, block: usize, attention: impl FnOnce(&str) -> A) -> Self {
        let norm = |name: &str| Arc::new(RmsNorm::named(&format!("{prefix}.{name}"), c.hidden_size, c.rms_norm_eps));
        DecoderLayer {
            input_layernorm: norm("input_layernorm"),
            self_attn: Arc::new(attention(&format!("{prefix}.self_attn"))),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: c.feed_forward(&format!("{prefix}.mlp"), block),
        }
    }
}

impl<A: Module> Module for DecoderLayer<A> {
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

impl<A: Module> Describe for DecoderLayer<A> {
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
