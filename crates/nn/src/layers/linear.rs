//! y = x·Wᵀ + b, with whatever low-rank adapter the context has for it.

use phalanx_autograd::functions::{self, LinearSpec};
use phalanx_kernels::gemm::Arithmetic;
use phalanx_tensor::Tensor;

use crate::{Cx, Describe, Module, Parameter, Result, Visitor};

/// A linear layer; W is stored [out, in] as in Hugging Face files.
pub struct Linear {
    weight: Parameter,
    bias: Option<Parameter>,
}

impl Linear {
    /// From its parameters.
    pub fn new(weight: Parameter, bias: Option<Parameter>) -> Linear {
        Linear { weight, bias }
    }

    /// Makes the parameters under `prefix`: `prefix.weight` [out, in] and, if asked, `prefix.bias` [out].
    pub fn named(prefix: &str, inputs: usize, outputs: usize, bias: bool) -> Linear {
        let weight = Parameter::new(format!("{prefix}.weight"), &[outputs, inputs]);
        Linear::new(weight, bias.then(|| Parameter::new(format!("{prefix}.bias"), &[outputs])))
    }

    /// W.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }
}

impl Module for Linear {
    /// x [T, in] → [T, out]
    fn forward(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let spec = LinearSpec {
            weight: self.weight.param()?,
            bias: self.bias.as_ref().map(Parameter::param).transpose()?,
            alpha: 1.0,
            arithmetic: cx.arithmetic(),
            scales: cx.scales(),
        };
        let adapter = cx.adapter();
        let dropout = adapter.as_ref().filter(|a| cx.env().training && a.dropout > 0.0).map(|a| a.dropout);
        let stream = dropout.map(|p| (p, cx.stream("lora_dropout")));
        let (rt, mut tape) = cx.parts();
        let y = functions::linear(rt, tape.as_deref_mut(), &x, spec)?;
        let Some(lora) = adapter else { return Ok(y) };
        let x = match stream {
            Some((p, stream)) => functions::dropout(rt, tape.as_deref_mut(), &x, p, stream)?,
            None => x,
        };
        // The adapter is small and carries all that is learnt: its products stay exact.
        let arithmetic = Arithmetic::F32;
        let a = LinearSpec { weight: lora.a.param()?, bias: None, alpha: 1.0, arithmetic, scales: None };
        let low = functions::linear(rt, tape.as_deref_mut(), &x, a)?;
        let b = LinearSpec { weight: lora.b.param()?, bias: None, alpha: lora.scale, arithmetic, scales: None };
        let delta = functions::linear(rt, tape.as_deref_mut(), &low, b)?;
        Ok(functions::add(rt, tape, &y, &delta)?)
    }
}

impl Describe for Linear {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.weight);
        if let Some(b) = &self.bias {
            v.parameter(b);
        }
    }

    fn kind(&self) -> &'static str {
        "linear"
    }
}
