//! y = α·x·Wᵀ + b.

use std::sync::Arc;

use phalanx_kernels::elementwise;
use phalanx_kernels::gemm::{Arithmetic, Gemm, Role, gemm};
use phalanx_kernels::lowp::amax_of;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::Param;
use crate::{Deferred, Function, LayerScales, Result, Saved, Tape};

/// The parameters of a linear map.
pub struct LinearSpec {
    /// W [out, in].
    pub weight: Param,
    /// b [out].
    pub bias: Option<Param>,
    /// Factor of the product (1, or the scale of a low-rank adapter).
    pub alpha: f32,
    /// How exact its products must be, in forward and backward.
    pub arithmetic: Arithmetic,
    /// Seed for rounding gradients at random, where a block recipe does so.
    pub gradient_noise: Option<u64>,
    /// Scales from earlier steps, where the arithmetic goes by them.
    pub scales: Option<PassScales>,
}

impl LinearSpec {
    /// Products as in f32.
    pub fn exact(weight: Param, bias: Option<Param>, alpha: f32) -> LinearSpec {
        LinearSpec { weight, bias, alpha, arithmetic: Arithmetic::F32, gradient_noise: None, scales: None }
    }
}

/// A layer's delayed scales, as one pass uses them.
pub struct PassScales {
    /// The scales.
    pub layer: Arc<LayerScales>,
    /// Whether the pass is part of a training step, so that magnitudes are noted. A forward without a tape may be one (recompute).
    pub observe: bool,
}

/// x [T, in] → [T, out], f32.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn linear(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, spec: LinearSpec) -> Result<Tensor> {
    let w = spec.weight.value()?;
    let (t, n, k) = (x.dim(0), w.dim(0), w.dim(1));
    let mut y = rt.empty(&[t, n], DType::F32, Category::Activations)?;
    // A bias is f32 when the kernel sees it; a bf16 one is widened here, it is short.
    let bias = match &spec.bias {
        None => None,
        Some(b) => Some(rt.to_vec(&b.value()?)?),
    };
    let call = Gemm::nt(t, n, k, x.mat(), w.mat()).alpha(spec.alpha).bias(bias.as_deref());
    if let Some(PassScales { layer, observe: true }) = &spec.scales {
        layer.see(Role::Activation, amax_of(rt.device(), &x.mat()));
        layer.see(Role::Weight, amax_of(rt.device(), &w.mat()));
    }
    let scales = spec.scales.map(|s| s.layer);
    let call = rounded(call, spec.arithmetic, scales.as_deref());
    gemm(rt.device(), &call, y.f32_mut()?)?;
    let Some(tape) = tape else { return Ok(y) };
    let trained = spec.weight.grad.is_some();
    let has_params = trained || spec.bias.as_ref().is_some_and(|b| b.grad.is_some());
    let f = Linear {
        x: trained.then(|| tape.save(x)),
        input_shape: x.shape().to_vec(),
        outputs: n,
        needs_dx: tape.tracks(x),
        weight: spec.weight,
        bias: spec.bias,
        alpha: spec.alpha,
        arithmetic: spec.arithmetic,
        gradient_noise: spec.gradient_noise,
        scales,
    };
    Ok(tape.record(&[x], has_params, y, f, None))
}

/// The product as exact as `arithmetic` has it, with the scales that its operands have in this step.
fn rounded<'a>(product: Gemm<'a>, arithmetic: Arithmetic, scales: Option<&LayerScales>) -> Gemm<'a> {
    let product = product.arithmetic(arithmetic);
    match scales {
        Some(layer) => product.scales(product.roles.map(|role| layer.scale(role))),
        None => product,
    }
}

struct Linear {
    /// Only the weight's gradient needs the input.
    x: Option<Saved>,
    input_shape: Vec<usize>,
    outputs: usize,
    needs_dx: bool,
    weight: Param,
    bias: Option<Param>,
    alpha: f32,
    arithmetic: Arithmetic,
    gradient_noise: Option<u64>,
    scales: Option<Arc<LayerScales>>,
}

impl Linear {
    fn inputs(&self) -> usize {
        self.input_shape[1..].iter().product()
    }

    fn rounded<'a>(&self, product: Gemm<'a>) -> Gemm<'a> {
        rounded(product, self.arithmetic, self.scales.as_deref())
    }

    /// Notes the magnitude of the gradient, where scales go by it.
    fn see(&self, rt: &Runtime, grad: &Tensor) {
        if let Some(layer) = &self.scales {
            layer.see(Role::Gradient, amax_of(rt.device(), &grad.mat()));
        }
    }

    /// Gradients of weight and bias.
    fn weights(&self, rt: &Runtime, grad: &Tensor) -> Result<()> {
        let dev = rt.device();
        let (t, n, k) = (grad.dim(0), self.outputs, self.inputs());
        if let (Some(slot), Some(x)) = (&self.weight.grad, &self.x) {
            let x = x.get(rt)?;
            slot.accumulate(rt, &[n, k], |dw, fresh| {
                let product = self.rounded(Gemm::tn(n, k, t, grad.mat(), x.mat()));
                // Other numbers than in the product for the input: two independent roundings of one gradient.
                let product = product.gradient_noise(self.gradient_noise.map(|seed| !seed));
                gemm(dev, &product.alpha(self.alpha).accumulate(!fresh), dw)
            })?;
        }
        if let Some(Param { grad: Some(slot), .. }) = &self.bias {
            let dy = grad.f32()?;
            slot.add(rt, &[n], |db| elementwise::sum_rows(dev, dy, db))?;
        }
        Ok(())
    }

    /// Gradient of the input, if it is wanted.
    fn input(&self, rt: &Runtime, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if !self.needs_dx {
            return Ok(vec![None]);
        }
        let (t, n, k) = (grad.dim(0), self.outputs, self.inputs());
        let w = self.weight.value()?;
        let mut dx = rt.empty(&self.input_shape, DType::F32, Category::Activations)?;
        let product = self.rounded(Gemm::nn(t, k, n, grad.mat(), w.mat())).alpha(self.alpha);
        let product = product.gradient_noise(self.gradient_noise);
        gemm(rt.device(), &product, dx.f32_mut()?)?;
        Ok(vec![Some(dx)])
    }
}

impl Function for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        self.see(rt, &grad);
        self.weights(rt, &grad)?;
        self.input(rt, &grad)
    }
    fn backward_inputs(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<(Vec<Option<Tensor>>, Option<Deferred>)> {
        self.see(rt, &grad);
        let inputs = self.input(rt, &grad)?;
        Ok((inputs, Some(Box::new(move |rt| self.weights(rt, &grad)))))
    }
}
