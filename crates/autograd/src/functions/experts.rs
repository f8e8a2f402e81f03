//! Rows to the experts, through them, and back.
//!
//! Weights are applied before the last product, not after it: then the experts' outputs need not be kept for the gradient of the weights
//! (what is kept is narrower, and made again from its recipe), and bringing rows home is a plain sum.

use std::sync::Arc;

use phalanx_kernels::gemm::{Arithmetic, Gemm, Grouped, gemm, grouped};
use phalanx_kernels::moe::{self as kernel, Capacity};
use phalanx_kernels::{KernelError, Mat};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::Param;
use crate::{Deferred, Function, Recipe, Result, Saved, Tape};

/// Where the rows of the experts lie; see [`phalanx_kernels::moe`].
#[derive(Clone, Debug)]
pub struct Places {
    /// Experts of a token, k.
    pub top_k: usize,
    /// Where the rows of each expert start, and the end R [E+1].
    pub offsets: Arc<[usize]>,
    /// The (token, choice) pair of each row [R].
    pub pairs: Arc<[u32]>,
    /// The row of each pair [T·k], or [`kernel::DROPPED`].
    pub places: Arc<[u32]>,
}

impl Places {
    /// Sorts the pairs of `chosen` [T·k] by expert.
    ///
    /// # Errors
    /// If an expert is not below `experts`.
    pub fn new(
        chosen: &[u32],
        top_k: usize,
        experts: usize,
        capacity: Option<Capacity<'_>>,
    ) -> Result<Places, KernelError> {
        let (mut offsets, mut pairs, mut places) = (vec![0; experts + 1], vec![0; chosen.len()], vec![0; chosen.len()]);
        let rows = kernel::place(chosen, capacity, &mut offsets, &mut pairs, &mut places)?;
        pairs.truncate(rows);
        Ok(Places { top_k, offsets: offsets.into(), pairs: pairs.into(), places: places.into() })
    }

    /// Rows R.
    pub fn rows(&self) -> usize {
        self.pairs.len()
    }

    /// Tokens T.
    pub fn tokens(&self) -> usize {
        self.places.len() / self.top_k.max(1)
    }
}

fn gather(rt: &Runtime, x: &Tensor, at: &Places) -> Result<Tensor> {
    let mut out = rt.empty(&[at.rows(), x.dim(1)], DType::F32, Category::Activations)?;
    kernel::gather(rt.device(), x.f32()?, x.dim(1), at.top_k, &at.pairs, out.f32_mut()?)?;
    Ok(out)
}

fn sum(rt: &Runtime, y: &Tensor, at: &Places) -> Result<Tensor> {
    let mut out = rt.empty(&[at.tokens(), y.dim(1)], DType::F32, Category::Activations)?;
    kernel::sum(rt.device(), y.f32()?, y.dim(1), at.top_k, &at.places, out.f32_mut()?)?;
    Ok(out)
}

/// x [T, H] → rows of the experts [R, H]. Leaves a recipe: whoever saves them keeps x.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn to_experts(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, at: &Places) -> Result<Tensor> {
    let y = gather(rt, x, at)?;
    let Some(tape) = tape else { return Ok(y) };
    let (again, places) = (tape.save(x), at.clone());
    let recipe = Recipe::new(move |rt| gather(rt, &again.get(rt)?, &places));
    Ok(tape.record(&[x], false, y, ToExperts(at.clone()), Some(recipe)))
}

struct ToExperts(Places);

impl Function for ToExperts {
    fn name(&self) -> &'static str {
        "to_experts"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(sum(rt, &grad, &self.0)?)])
    }
}

/// Rows of the experts [R, H] → the sum of each token's [T, H], in the order of its choices. A token without rows gets zeros.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn from_experts(rt: &Runtime, tape: Option<&mut Tape>, y: &Tensor, at: &Places) -> Result<Tensor> {
    let out = sum(rt, y, at)?;
    Ok(match tape {
        None => out,
        Some(tape) => tape.record(&[y], false, out, FromExperts(at.clone()), None),
    })
}

struct FromExperts(Places);

impl Function for FromExperts {
    fn name(&self) -> &'static str {
        "from_experts"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gather(rt, &grad, &self.0)?)])
    }
}

/// Each row of h [R, I] times its weight among `weights` [T, k]. Leaves a recipe.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn weigh(rt: &Runtime, tape: Option<&mut Tape>, h: &Tensor, weights: &Tensor, at: &Places) -> Result<Tensor> {
    let pairs = Arc::clone(&at.pairs);
    let run = move |rt: &Runtime, h: &Tensor, w: &Tensor| -> Result<Tensor> {
        let mut y = rt.empty(h.shape(), DType::F32, Category::Activations)?;
        kernel::weigh(rt.device(), h.f32()?, h.dim(1), w.f32()?, &pairs, y.f32_mut()?)?;
        Ok(y)
    };
    let y = run(rt, h, weights)?;
    let Some(tape) = tape else { return Ok(y) };
    let (h_again, w_again) = (tape.save(h), tape.save(weights));
    let recipe = Recipe::new(move |rt| run(rt, &h_again.get(rt)?, &w_again.get(rt)?));
    let f = Weigh { h: tape.save(h), weights: tape.save(weights), pairs: Arc::clone(&at.pairs) };
    Ok(tape.record(&[h, weights], false, y, f, Some(recipe)))
}

struct Weigh {
    h: Saved,
    weights: Saved,
    pairs: Arc<[u32]>,
}

impl Function for Weigh {
    fn name(&self) -> &'static str {
        "weigh"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (h, w) = (self.h.get(rt)?, self.weights.get(rt)?);
        let mut dh = rt.empty(h.shape(), DType::F32, Category::Activations)?;
        let mut dw = rt.empty(w.shape(), DType::F32, Category::Activations)?;
        let (g, width) = (grad.f32()?, h.dim(1));
        kernel::weigh_backward(rt.device(), h.f32()?, width, w.f32()?, &self.pairs, g, dh.f32_mut()?, dw.f32_mut()?)?;
        Ok(vec![Some(dh), Some(dw)])
    }
}

/// The same projection of every expert, as a function takes it.
#[derive(Clone)]
pub struct GroupedSpec {
    /// W [out, in] of each expert.
    pub weights: Arc<[Param]>,
    /// Where the rows of each start, and the end [E+1].
    pub offsets: Arc<[usize]>,
    /// How exact the products must be.
    pub arithmetic: Arithmetic,
    /// Seed for rounding gradients at random, where a block recipe does so.
    pub gradient_noise: Option<u64>,
}

/// x [R, in] → [R, out], each row through the weight of its expert. An expert without rows has a gradient, of zeros.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn grouped_linear(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, spec: GroupedSpec) -> Result<Tensor> {
    let held = spec.values()?;
    let (out, inputs) = held.first().map_or((0, 0), |w| (w.dim(0), w.dim(1)));
    let mut y = rt.empty(&[x.dim(0), out], DType::F32, Category::Activations)?;
    let w: Vec<Mat<'_>> = held.iter().map(Tensor::mat).collect();
    let call = Grouped::nt(out, inputs, x.mat(), &spec.offsets, &w).arithmetic(spec.arithmetic);
    grouped(rt.device(), &call, y.f32_mut()?)?;
    let Some(tape) = tape else { return Ok(y) };
    let trained = spec.weights.iter().any(|w| w.grad.is_some());
    let f = GroupedLinear { x: trained.then(|| tape.save(x)), needs_dx: tape.tracks(x), out, inputs, spec };
    Ok(tape.record(&[x], trained, y, f, None))
}

impl GroupedSpec {
    fn values(&self) -> Result<Vec<Tensor>> {
        self.weights.iter().map(Param::value).collect()
    }
}

struct GroupedLinear {
    x: Option<Saved>,
    needs_dx: bool,
    out: usize,
    inputs: usize,
    spec: GroupedSpec,
}

impl GroupedLinear {
    fn weights(&self, rt: &Runtime, grad: &Tensor) -> Result<()> {
        let Some(x) = &self.x else { return Ok(()) };
        let (x, spec, out, inputs) = (x.get(rt)?, &self.spec, self.out, self.inputs);
        for (w, rows) in spec.weights.iter().zip(spec.offsets.windows(2)) {
            let Some(slot) = &w.grad else { continue };
            let (from, to) = (rows[0], rows[1]);
            let dy = grad.mat().slice(from * out..to * out);
            let x = x.mat().slice(from * inputs..to * inputs);
            slot.accumulate(rt, &[out, inputs], |dw, fresh| {
                let product = Gemm::tn(out, inputs, to - from, dy, x).arithmetic(spec.arithmetic);
                let product = product.gradient_noise(spec.gradient_noise.map(|seed| !seed));
                gemm(rt.device(), &product.accumulate(!fresh), dw)
            })?;
        }
        Ok(())
    }

    fn input(&self, rt: &Runtime, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if !self.needs_dx {
            return Ok(vec![None]);
        }
        let mut dx = rt.empty(&[grad.dim(0), self.inputs], DType::F32, Category::Activations)?;
        let held = self.spec.values()?;
        let w: Vec<Mat<'_>> = held.iter().map(Tensor::mat).collect();
        let call = Grouped::nn(self.inputs, self.out, grad.mat(), &self.spec.offsets, &w);
        let call = call.arithmetic(self.spec.arithmetic).gradient_noise(self.spec.gradient_noise);
        grouped(rt.device(), &call, dx.f32_mut()?)?;
        Ok(vec![Some(dx)])
    }
}

impl Function for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        self.weights(rt, &grad)?;
        self.input(rt, &grad)
    }
    fn backward_inputs(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<(Vec<Option<Tensor>>, Option<Deferred>)> {
        let inputs = self.input(rt, &grad)?;
        Ok((inputs, Some(Box::new(move |rt| self.weights(rt, &grad)))))
    }
}
