//! Gated feed-forward: down(act(gate(x)) · up(x)).

use std::sync::Arc;

use phalanx_autograd::functions;
use phalanx_kernels::glu::Act;
use phalanx_tensor::Tensor;

use super::Linear;
use super::linear::together;
use crate::{Cx, Describe, Module, Result, Visitor};

/// Sizes and options of a [`GatedMlp`].
#[derive(Clone, Copy, Debug)]
pub struct MlpConfig {
    /// Hidden size H.
    pub hidden: usize,
    /// Intermediate size I.
    pub intermediate: usize,
    /// Biases on all three projections.
    pub bias: bool,
    /// Activation of the gate.
    pub act: Act,
}

/// SwiGLU or GeGLU feed-forward.
pub struct GatedMlp {
    gate_proj: Arc<Linear>,
    up_proj: Arc<Linear>,
    down_proj: Arc<Linear>,
    act: Act,
}

impl GatedMlp {
    /// `prefix.{gate,up,down}_proj`.
    pub fn named(prefix: &str, c: MlpConfig) -> GatedMlp {
        let up = |name: &str| Arc::new(Linear::named(&format!("{prefix}.{name}"), c.hidden, c.intermediate, c.bias));
        GatedMlp {
            gate_proj: up("gate_proj"),
            up_proj: up("up_proj"),
            down_proj: Arc::new(Linear::named(&format!("{prefix}.down_proj"), c.intermediate, c.hidden, c.bias)),
            act: c.act,
        }
    }
}

impl Module for GatedMlp {
    /// x [T, H] → [T, H]
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let [gate, up] = together(cx, &x, [("gate_proj", &self.gate_proj), ("up_proj", &self.up_proj)])?;
        drop(x);
        let (rt, tape) = cx.parts();
        let h = functions::glu(rt, tape, self.act, &gate, &up)?;
        cx.call("down_proj", &self.down_proj, h)
    }
}

impl Describe for GatedMlp {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("gate_proj", &*self.gate_proj);
        v.child("up_proj", &*self.up_proj);
        v.child("down_proj", &*self.down_proj);
    }
    fn kind(&self) -> &'static str {
        "mlp"
    }
}
