//! The decoder. Mistral, qwen2 and qwen3 are this with switches of their configs turned.

use std::sync::Arc;

use phalanx_nn::layers::{Attention, AttentionConfig, Embedding, GatedMlp, MlpConfig, RmsNorm};
use phalanx_nn::{Cx, Describe, Module, Parameter, Result, Visitor};
use phalanx_tensor::Tensor;

use crate::{CausalLm, ModelConfig};

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
        let attention = AttentionConfig {
            hidden: c.hidden_size,
            heads: c.num_attention_heads,
            kv_heads: c.num_key_value_heads,
            head_dim: c.head_dim,
            qkv_bias: c.qkv_bias,
            o_bias: c.o_bias,
            qk_norm: c.qk_norm.then_some(c.rms_norm_eps),
            window,
            rope: Arc::clone(&c.rope),
        };
        let mlp = MlpConfig { hidden: c.hidden_size, intermediate: c.intermediate_size, bias: c.mlp_bias, act: c.act };
        DecoderLayer {
            input_layernorm: norm("input_layernorm"),
            self_attn: Arc::new(Attention::named(&format!("{prefix}.self_attn"), attention)),
            post_attention_layernorm: norm("post_attention_layernorm"),
            mlp: Arc::new(GatedMlp::named(&format!("{prefix}.mlp"), mlp)),
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

/// `model.*`: embedding, blocks, final norm.
struct Decoder {
    embed_tokens: Embedding,
    layers: Vec<(String, Arc<DecoderLayer>)>,
    norm: Arc<RmsNorm>,
}

impl Describe for Decoder {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("embed_tokens", &self.embed_tokens);
        for (name, layer) in &self.layers {
            v.child(name, &**layer);
        }
        v.child("norm", &*self.norm);
    }
    fn kind(&self) -> &'static str {
        "model"
    }
}

/// `lm_head`: its weight is the embedding's when tied.
struct Head(Parameter);

impl Describe for Head {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.0);
    }
    fn kind(&self) -> &'static str {
        "head"
    }
}

/// A llama-like language model.
pub struct LlamaForCausalLm {
    model: Decoder,
    lm_head: Head,
}

impl LlamaForCausalLm {
    /// A model of the config's shape, without values.
    pub fn new(c: &ModelConfig) -> LlamaForCausalLm {
        let embed_tokens = Embedding::named("model.embed_tokens", c.vocab_size, c.hidden_size);
        let lm_head = Head(if c.tie_word_embeddings {
            embed_tokens.weight().clone()
        } else {
            Parameter::new("lm_head.weight", &[c.vocab_size, c.hidden_size])
        });
        let layers = c.windows.iter().enumerate().map(|(i, &window)| {
            let layer = DecoderLayer::named(&format!("model.layers.{i}"), c, window);
            (format!("layers.{i}"), Arc::new(layer))
        });
        let norm = Arc::new(RmsNorm::named("model.norm", c.hidden_size, c.rms_norm_eps));
        LlamaForCausalLm { model: Decoder { embed_tokens, layers: layers.collect(), norm }, lm_head }
    }
}

impl CausalLm for LlamaForCausalLm {
    fn embed(&self, cx: &mut Cx, ids: &Arc<[u32]>) -> Result<Tensor> {
        cx.source("model.embed_tokens", |cx| self.model.embed_tokens.forward(cx, ids))
    }

    fn num_blocks(&self) -> usize {
        self.model.layers.len()
    }

    fn block(&self, cx: &mut Cx, i: usize, h_th: Tensor) -> Result<Tensor> {
        let (name, layer) = &self.model.layers[i];
        cx.call(&format!("model.{name}"), layer, h_th)
    }

    fn norm(&self, cx: &mut Cx, h_th: Tensor) -> Result<Tensor> {
        cx.call("model.norm", &self.model.norm, h_th)
    }

    fn head(&self) -> &Parameter {
        &self.lm_head.0
    }
}

impl Describe for LlamaForCausalLm {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("model", &self.model);
        v.child("lm_head", &self.lm_head);
    }
    fn kind(&self) -> &'static str {
        "causal_lm"
    }
}
