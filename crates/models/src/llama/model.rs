//! The decoder. Mistral, qwen2 and qwen3 are this with switches of their configs turned.

use std::sync::Arc;

use phalanx_nn::layers::{Attention, GatedMlp, RmsNorm};
use phalanx_nn::{Cx, Describe, Module, Result, Visitor};
use phalanx_tensor::Tensor;

use crate::ModelConfig;
use crate::decoder::DecoderLm;

/// One block.
pub struct DecoderLayer {
    input_layernorm: Arc<RmsNorm>,
    self_attn: Arc<Attention>,
    post_attention_layernorm: Arc<RmsNorm>,
    mlp: Arc<GatedMlp>,
}

impl DecoderLayer {
    fn named(prefix: &str, c: &ModelConfig, window: Option<usize>) -> DecoderLayer {
        let norm = |name: &str| Arc::new(RmsNorm::named(&format!("{prefix}.{name}"), c.hidden_size, c.rms_norm_eps));
        DecoderLayer {
            input_layernorm: norm("input_layernorm"),
            self_attn: Arc::new(Attention::named(&format!("{prefix}.self_attn"), c.attention(window))),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: Arc::new(GatedMlp::named(&format!("{prefix}.mlp"), c.mlp())),
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
        let m = cx.call("mlp", &self.mlp, m)?;
        cx.add(h_th, m)
    }
}

impl Describe for DecoderLayer {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("input_layernorm", &*self.input_layernorm);
        v.child("self_attn", &*self.self_attn);
        v.child("post_attention_layernorm", &*self.post_attention_layernorm);
        v.child("mlp", &*self.mlp);
    }
    fn kind(&self) -> &'static str {
        "block"
    }
}

/// A llama-like language model.
pub type LlamaForCausalLm = DecoderLm<DecoderLayer>;

impl LlamaForCausalLm {
    /// A model of the config's shape, without values.
    pub fn new(c: &ModelConfig) -> LlamaForCausalLm {
        DecoderLm::with_blocks(c, |prefix, i| DecoderLayer::named(prefix, c, c.windows[i]))
    }
}
