//! y = x·Wᵀ + b, with whatever low-rank adapter the context has for it.

use std::sync::Arc;

use phalanx_autograd::functions::{self, LinearSpec, Part};
use phalanx_tensor::{Category, DType, PreparedMatrix, Tensor, multiply_prepared};

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
        if let Some(w) = self.prepared(cx) {
            let bias = self.wide_bias(cx)?;
            let mut ys = multiply_prepared(cx.rt(), &x, &[(&w, bias.as_ref())])?;
            return self.adapt(cx, &x, ys.remove(0));
        }
        let spec = LinearSpec {
            weight: self.weight.param()?,
            bias: self.bias.as_ref().filter(|_| self.first_input() == 0).map(Parameter::param).transpose()?,
            alpha: 1.0,
            arithmetic: cx.arithmetic(),
            gradient_noise: cx.gradient_noise(),
            scales: cx.scales(),
        };
        let (rt, tape) = cx.parts();
        let y = functions::linear(rt, tape, &x, spec)?;
        self.adapt(cx, &x, y)
    }
}

impl Linear {
    /// W laid out for inference, where it is and nothing is recorded for backward.
    fn prepared(&self, cx: &Cx) -> Option<PreparedMatrix> {
        if cx.tape.is_some() { None } else { self.weight.prepared() }
    }

    /// The first input that the weights here take. Outputs of ranks that hold different inputs are summed, so only the rank with the first ones
    /// adds the bias.
    fn first_input(&self) -> usize {
        self.weight.placement().working[1].start
    }

    fn wide_bias(&self, cx: &Cx) -> Result<Option<Tensor>> {
        let Some(b) = &self.bias else { return Ok(None) };
        let b = b.value()?;
        Ok(Some(if b.dtype() == DType::F32 { b } else { cx.rt().cast(&b, DType::F32, Category::Activations)? }))
    }

    /// Adds to y what the adapter of the scope makes of x.
    fn adapt(&self, cx: &mut Cx, x: &Tensor, y: Tensor) -> Result<Tensor> {
        let adapter = cx.adapter();
        let dropout = adapter.as_ref().filter(|a| cx.env().training && a.dropout > 0.0).map(|a| a.dropout);
        let stream = dropout.map(|p| (p, cx.stream("lora_dropout")));
        // Rows or inputs that are here, of those that all ranks have: each draws its part of one mask.
        let part = Part {
            row: cx.first_row(x.dim(0)),
            rows: cx.env().batch().rows.clone(),
            column: Some((self.first_input(), self.weight.shape()[1])),
        };
        let (rt, mut tape) = cx.parts();
        let Some(lora) = adapter else { return Ok(y) };
        let x = match stream {
            Some((p, stream)) => functions::dropout_part(rt, tape.as_deref_mut(), x, p, stream, part)?,
            None => x.clone(),
        };
        // The adapter is small and carries all that is learnt: its products stay exact.
        let a = LinearSpec::exact(lora.a.param()?, None, 1.0);
        let low = functions::linear(rt, tape.as_deref_mut(), &x, a)?;
        let b = LinearSpec::exact(lora.b.param()?, None, lora.scale);
        let delta = functions::linear(rt, tape.as_deref_mut(), &low, b)?;
        Ok(functions::add(rt, tape, &y, &delta)?)
    }
}

/// Runs layers that share x, each as child of its name. Where all are laid out for inference, their products are one: a token that is
/// being generated pays for the start of the threads once.
///
/// # Errors
/// As [`Module::forward`].
pub(super) fn together<const N: usize>(
    cx: &mut Cx,
    x: &Tensor,
    layers: [(&str, &Arc<Linear>); N],
) -> Result<[Tensor; N]> {
    let weights: Vec<PreparedMatrix> = layers.iter().filter_map(|(_, l)| l.prepared(cx)).collect();
    let mut ys = Vec::with_capacity(N);
    if weights.len() == N {
        let biases = layers.iter().map(|(_, l)| l.wide_bias(cx)).collect::<Result<Vec<_>>>()?;
        let pairs: Vec<_> = weights.iter().zip(&biases).map(|(w, b)| (w, b.as_ref())).collect();
        let products = multiply_prepared(cx.rt(), x, &pairs)?;
        for ((name, layer), y) in layers.iter().zip(products) {
            ys.push(cx.within(name, |cx| layer.adapt(cx, x, y))?);
        }
    } else {
        for (name, layer) in layers {
            ys.push(cx.call(name, layer, x.clone())?);
        }
    }
    Ok(ys.try_into().unwrap_or_else(|_| unreachable!("one product a layer")))
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
