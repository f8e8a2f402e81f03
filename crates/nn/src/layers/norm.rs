//! Norms over the last dimension.

use phalanx_autograd::functions;
use phalanx_tensor::Tensor;

use crate::{Cx, Describe, Module, Parameter, Result, Visitor};

/// Root-mean-square norm with a weight.
pub struct RmsNorm {
    weight: Parameter,
    eps: f32,
}

impl RmsNorm {
    /// `prefix.weight` [dim].
    pub fn named(prefix: &str, dim: usize, eps: f32) -> RmsNorm {
        RmsNorm { weight: Parameter::new(format!("{prefix}.weight"), &[dim]), eps }
    }
}

impl Module for RmsNorm {
    /// x [T, …, dim] → the same shape
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let (rt, tape) = cx.parts();
        Ok(functions::rms_norm(rt, tape, &x, self.weight.param()?, self.eps)?)
    }
}

impl Describe for RmsNorm {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.weight);
    }
    fn kind(&self) -> &'static str {
        "norm"
    }
}

/// Layer norm with a weight and an optional bias.
pub struct LayerNorm {
    weight: Parameter,
    bias: Option<Parameter>,
    eps: f32,
}

impl LayerNorm {
    /// `prefix.weight` [dim] and, if asked, `prefix.bias` [dim].
    pub fn named(prefix: &str, dim: usize, bias: bool, eps: f32) -> LayerNorm {
        LayerNorm {
            weight: Parameter::new(format!("{prefix}.weight"), &[dim]),
            bias: bias.then(|| Parameter::new(format!("{prefix}.bias"), &[dim])),
            eps,
        }
    }
}

impl Module for LayerNorm {
    /// x [T, …, dim] → the same shape
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Parameter::param).transpose()?;
        let (rt, tape) = cx.parts();
        Ok(functions::layer_norm(rt, tape, &x, self.weight.param()?, bias, self.eps)?)
    }
}

impl Describe for LayerNorm {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.weight);
        if let Some(b) = &self.bias {
            v.parameter(b);
        }
    }
    fn kind(&self) -> &'static str {
        "norm"
    }
}
