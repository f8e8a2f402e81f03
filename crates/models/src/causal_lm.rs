//! What a language model of any family offers, and the loss and logits built on it.

use std::sync::Arc;

use phalanx_autograd::functions::LossOutput;
use phalanx_kernels::cross_entropy::LossSum;
use phalanx_kernels::gemm::{Arithmetic, Gemm, gemm};
use phalanx_nn::layers::cross_entropy;
use phalanx_nn::{Cx, Describe, Parameter, Visitor};
use phalanx_tensor::{Category, DType, Runtime, Tensor, multiply_prepared};

use crate::{ModelConfig, ModelError, Result};

/// A model that predicts the next token, in the pieces that a pipeline may cut it into.
pub trait CausalLm: Describe {
    /// ids [T] → rows of the embedding [T, H].
    ///
    /// # Errors
    /// If an id has no row, a parameter has no value, or memory runs out.
    fn embed(&self, cx: &mut Cx, ids: &Arc<[u32]>) -> phalanx_nn::Result<Tensor>;

    /// Number of blocks.
    fn num_blocks(&self) -> usize;

    /// Block `i`: [T, H] → [T, H].
    ///
    /// # Errors
    /// As [`CausalLm::embed`].
    fn block(&self, cx: &mut Cx, i: usize, h_th: Tensor) -> phalanx_nn::Result<Tensor>;

    /// What comes between the last block and the head: [T, H] → [T, H].
    ///
    /// # Errors
    /// As [`CausalLm::embed`].
    fn norm(&self, cx: &mut Cx, h_th: Tensor) -> phalanx_nn::Result<Tensor>;

    /// The output projection [V, H].
    fn head(&self) -> &Parameter;
}

/// A model with its config.
pub struct Model {
    config: ModelConfig,
    net: Box<dyn CausalLm>,
}

impl Model {
    /// The model of a config, without values.
    ///
    /// # Errors
    /// If no family builds it.
    pub fn new(config: &ModelConfig) -> Result<Model> {
        let Some(family) = crate::known::family(&config.model_type) else {
            return Err(ModelError::Config {
                place: "config".into(),
                key: "model_type".into(),
                why: format!("no model is built for \"{}\"", config.model_type),
            });
        };
        Ok(Model { config: config.clone(), net: (family.build)(config) })
    }

    /// Its config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The pieces it runs in.
    pub fn net(&self) -> &dyn CausalLm {
        self.net.as_ref()
    }

    /// Hidden rows [T, H] of ids [T], ready for the head.
    ///
    /// # Errors
    /// As [`CausalLm::embed`].
    pub fn hidden(&self, cx: &mut Cx, ids: &Arc<[u32]>) -> Result<Tensor> {
        let mut h_th = self.net.embed(cx, ids)?;
        for i in 0..self.net.num_blocks() {
            h_th = self.net.block(cx, i, h_th)?;
        }
        Ok(self.net.norm(cx, h_th)?)
    }

    /// The output projection [V, H].
    pub fn head(&self) -> &Parameter {
        self.net.head()
    }

    /// All parameters, each once, in the order of the forward.
    pub fn parameters(&self) -> Vec<Parameter> {
        phalanx_nn::parameters(self)
    }
}

impl Describe for Model {
    fn visit(&self, v: &mut Visitor<'_>) {
        self.net.visit(v);
    }
    fn kind(&self) -> &'static str {
        self.net.kind()
    }
}

/// The loss of a batch.
pub struct Loss {
    /// Recorded sum of the cross-entropy, [1]: what backward starts from.
    pub loss: Tensor,
    /// The sum of the whole loss, and the number of counted targets.
    pub sum: LossSum,
    /// The part of the sum that is the balancing loss of experts.
    pub balance: f64,
    /// Log-probability of each target [T], 0 where not counted.
    pub logp: Vec<f32>,
}

/// Summed cross-entropy of `targets` [T] (aligned with `ids`: the token that follows each; −100 not counted), and in training the balancing
/// loss of experts that the context has. The gradient of the latter enters where routers run backward, so use each loss once, with a
/// factor of 1.
///
/// # Errors
/// If a target is outside the vocabulary, or the forward fails.
pub fn loss(model: &Model, cx: &mut Cx, ids: &Arc<[u32]>, targets: &Arc<[i32]>) -> Result<Loss> {
    let balance = match cx.trains() {
        true => cx.env().routing.balance_pass(cx.env().batch(), targets),
        false => None,
    };
    cx.set_balance(balance.clone());
    let out = cx.whole(|cx| {
        let hidden = model.hidden(cx, ids)?;
        head_loss(model, cx, hidden, targets)
    })?;
    let balance = balance.map_or(0.0, |b| b.value());
    cx.env().routers.add_balance(balance);
    let sum = LossSum { sum: out.sum.sum + balance, ..out.sum };
    Ok(Loss { loss: out.loss, sum, balance, logp: out.logp })
}

/// Summed cross-entropy of `targets` [T] from the rows [T, H] that the last norm made.
///
/// # Errors
/// As [`loss`].
pub fn head_loss(model: &Model, cx: &mut Cx, hidden: Tensor, targets: &Arc<[i32]>) -> Result<LossOutput> {
    Ok(cx.sink("lm_head", hidden, |cx, hidden| cross_entropy(cx, model.head(), &hidden, targets))?)
}

/// Logits [R, V] of hidden rows [R, H], as exact as `arithmetic` has the head's product (weights that are laid out for generation have their own).
///
/// # Errors
/// If memory runs out.
pub fn logits(rt: &Runtime, model: &Model, hidden: &Tensor, arithmetic: Arithmetic) -> Result<Tensor> {
    if let Some(w) = model.head().prepared() {
        return Ok(multiply_prepared(rt, hidden, &[(&w, None)])?.remove(0));
    }
    let w = model.head().value()?;
    let (rows, v, h) = (hidden.dim(0), w.dim(0), w.dim(1));
    let mut out = rt.empty(&[rows, v], DType::F32, Category::Workspace)?;
    let call = Gemm::nt(rows, v, h, hidden.mat(), w.mat()).arithmetic(arithmetic);
    gemm(rt.device(), &call, out.f32_mut()?).map_err(phalanx_tensor::TensorError::from)?;
    Ok(out)
}
