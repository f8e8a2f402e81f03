//! What decoders of all families share around their blocks: embedding, final norm, head.

use std::sync::Arc;

use phalanx_nn::layers::{Embedding, RmsNorm};
use phalanx_nn::{Cx, Describe, Module, Parameter, Result, Visitor};
use phalanx_tensor::Tensor;

use crate::{CausalLm, ModelConfig};

/// `model.*`: embedding, blocks, final norm.
struct Decoder<B> {
    embed_tokens: Embedding,
    layers: Vec<(String, Arc<B>)>,
    norm: Arc<RmsNorm>,
}

impl<B: Module> Describe for Decoder<B> {
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

/// A language model of blocks `B`.
pub struct DecoderLm<B> {
    model: Decoder<B>,
    lm_head: Head,
}

impl<B: Module> DecoderLm<B> {
    /// A model of the config's shape, without values. `block` makes the block of a prefix and number.
    pub fn with_blocks(c: &ModelConfig, block: impl Fn(&str, usize) -> B) -> DecoderLm<B> {
        let embed_tokens = Embedding::named("model.embed_tokens", c.vocab_size, c.hidden_size);
        let lm_head = Head(if c.tie_word_embeddings {
            embed_tokens.weight().clone()
        } else {
            Parameter::new("lm_head.weight", &[c.vocab_size, c.hidden_size])
        });
        let layers = (0..c.num_hidden_layers)
            .map(|i| (format!("layers.{i}"), Arc::new(block(&format!("model.layers.{i}"), i))))
            .collect();
        let norm = Arc::new(RmsNorm::named("model.norm", c.hidden_size, c.rms_norm_eps));
        DecoderLm { model: Decoder { embed_tokens, layers, norm }, lm_head }
    }
}

impl<B: Module> CausalLm for DecoderLm<B> {
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

impl<B: Module> Describe for DecoderLm<B> {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("model", &self.model);
        v.child("lm_head", &self.lm_head);
    }
    fn kind(&self) -> &'static str {
        "causal_lm"
    }
}
