//! Mixture of experts: each token goes through k of E feed-forwards, and through one that all share where the model has it.

use std::sync::Arc;

use phalanx_autograd::functions;
use phalanx_kernels::glu::Act;
use phalanx_kernels::moe::Route;
use phalanx_tensor::Tensor;

use super::{Experts, GatedMlp, MlpConfig, Router};
use crate::{Cx, Describe, Module, Result, Visitor};

/// Sizes and options of a [`MoeMlp`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Hidden size H.
    pub hidden: usize,
    /// Intermediate size I of an expert.
    pub intermediate: usize,
    /// Intermediate size of the shared expert, if there is one.
    pub shared: Option<usize>,
    /// Activation of the gates.
    pub act: Act,
    /// How experts are chosen, and how many there are.
    pub route: Route,
    /// Whether choices are corrected by a bias that no gradient trains.
    pub corrected: bool,
}

/// A feed-forward of experts. Its three steps — choose, go through the experts, come home — are separate, so that experts may lie elsewhere.
pub struct MoeMlp {
    gate: Router,
    experts: Experts,
    shared_experts: Option<Arc<GatedMlp>>,
}

impl MoeMlp {
    /// `prefix.gate`, `prefix.experts.{i}` and, if there is one, `prefix.shared_experts`.
    pub fn named(prefix: &str, c: MoeConfig) -> MoeMlp {
        let shared = |intermediate: usize| {
            let c = MlpConfig { hidden: c.hidden, intermediate, bias: false, act: c.act };
            Arc::new(GatedMlp::named(&format!("{prefix}.shared_experts"), c))
        };
        let experts = format!("{prefix}.experts");
        MoeMlp {
            gate: Router::named(&format!("{prefix}.gate"), c.hidden, c.route, c.corrected),
            experts: Experts::named(&experts, c.route.experts, c.hidden, c.intermediate, c.act),
            shared_experts: c.shared.map(shared),
        }
    }
}

impl Module for MoeMlp {
    /// x [T, H] → [T, H]
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let choice = cx.within("gate", |cx| self.gate.choose(cx, &x))?;
        let (rt, tape) = cx.parts();
        let rows = functions::to_experts(rt, tape, &x, &choice.places)?;
        let rows = cx.within("experts", |cx| self.experts.forward(cx, rows, &choice))?;
        let (rt, tape) = cx.parts();
        let y = functions::from_experts(rt, tape, &rows, &choice.places)?;
        drop(rows);
        match &self.shared_experts {
            None => Ok(y),
            Some(shared) => {
                let s = cx.call("shared_experts", shared, x)?;
                cx.add(y, s)
            }
        }
    }
}

impl Describe for MoeMlp {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("gate", &self.gate);
        v.child("experts", &self.experts);
        if let Some(shared) = &self.shared_experts {
            v.child("shared_experts", &**shared);
        }
    }
    fn kind(&self) -> &'static str {
        "mlp"
    }
}

/// The feed-forward of a block in models that have experts in some blocks only.
pub enum FeedForward {
    /// The same for every token.
    Dense(Arc<GatedMlp>),
    /// Experts.
    Experts(Arc<MoeMlp>),
}

impl FeedForward {
    /// Runs it as child `name`.
    ///
    /// # Errors
    /// As [`Cx::call`].
    pub fn call(&self, cx: &mut Cx, name: &str, x: Tensor) -> Result<Tensor> {
        match self {
            FeedForward::Dense(mlp) => cx.call(name, mlp, x),
            FeedForward::Experts(mlp) => cx.call(name, mlp, x),
        }
    }

    /// What a visitor sees.
    pub fn describe(&self) -> &dyn Describe {
        match self {
            FeedForward::Dense(mlp) => &**mlp,
            FeedForward::Experts(mlp) => &**mlp,
        }
    }
}
