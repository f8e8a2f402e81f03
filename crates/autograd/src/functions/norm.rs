//! RMSNorm and LayerNorm.

use std::sync::Arc;

use phalanx_kernels::{layer_norm as ln, rms_norm as rms};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::Param;
use crate::{Function, Recipe, Result, Saved, Tape};

fn rows(x: &Tensor, w: &Tensor) -> usize {
    x.len() / w.len().max(1)
}

/// RMS norm over the last `weight.len()` elements: x [T, …, H] → the same shape.
///
/// Leaves a recipe, so that consumers keep x (which the residual path keeps anyhow) instead of the normed copy.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn rms_norm(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, weight: Param, eps: f32) -> Result<Tensor> {
    let w = weight.value()?;
    let t = rows(x, &w);
    let run = move |rt: &Runtime, x: &Tensor, w: &Tensor| -> Result<(Tensor, Tensor)> {
        let mut y = rt.empty(x.shape(), DType::F32, Category::Activations)?;
        let mut rstd = rt.empty(&[t], DType::F32, Category::Activations)?;
        rms::forward(rt.device(), x.f32()?, w.mat(), eps, y.f32_mut()?, rstd.f32_mut()?)?;
        Ok((y, rstd))
    };
    let (y, rstd) = run(rt, x, &w)?;
    let Some(tape) = tape else { return Ok(y) };
    let (x_again, w_again) = (tape.save(x), weight.clone());
    let recipe = Recipe::new(move |rt| Ok(run(rt, &x_again.get(rt)?, &w_again.value()?)?.0));
    let f = RmsNorm { x: tape.save(x), needs_dx: tape.tracks(x), rstd, weight: weight.clone() };
    Ok(tape.record(&[x], weight.grad.is_some(), y, f, Some(recipe)))
}

struct RmsNorm {
    x: Saved,
    needs_dx: bool,
    rstd: Tensor,
    weight: Param,
}

impl Function for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let x = self.x.get(rt)?;
        let w = self.weight.value()?;
        let mut dx = rt.empty(x.shape(), DType::F32, Category::Activations)?;
        let run = |dx: &mut Tensor, dw: Option<&mut [f32]>| -> Result<()> {
            let dx = dx.f32_mut()?;
            Ok(rms::backward(rt.device(), x.f32()?, w.mat(), self.rstd.f32()?, grad.f32()?, dx, dw)?)
        };
        match &self.weight.grad {
            None => run(&mut dx, None)?,
            Some(slot) => slot.add(rt, w.shape(), |dw| run(&mut dx, Some(dw)))?,
        }
        Ok(vec![self.needs_dx.then_some(dx)])
    }
}

/// Layer norm over the last `weight.len()` elements, with an optional bias.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn layer_norm(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    x: &Tensor,
    weight: Param,
    bias: Option<Param>,
    eps: f32,
) -> Result<Tensor> {
    let (w, b) = (weight.value()?, bias.as_ref().map(Param::value).transpose()?);
    let t = rows(x, &w);
    let run = move |rt: &Runtime, x: &Tensor, w: &Tensor, b: Option<&Tensor>| -> Result<[Tensor; 3]> {
        let mut y = rt.empty(x.shape(), DType::F32, Category::Activations)?;
        let mut mean = rt.empty(&[t], DType::F32, Category::Activations)?;
        let mut rstd = rt.empty(&[t], DType::F32, Category::Activations)?;
        let b = b.map(Tensor::mat);
        ln::forward(rt.device(), x.f32()?, w.mat(), b, eps, y.f32_mut()?, mean.f32_mut()?, rstd.f32_mut()?)?;
        Ok([y, mean, rstd])
    };
    let [y, mean, rstd] = run(rt, x, &w, b.as_ref())?;
    let Some(tape) = tape else { return Ok(y) };
    let (x_again, w_again, b_again) = (tape.save(x), weight.clone(), bias.clone());
    let recipe: Arc<Recipe> = Recipe::new(move |rt| {
        let b = b_again.as_ref().map(Param::value).transpose()?;
        let [y, ..] = run(rt, &x_again.get(rt)?, &w_again.value()?, b.as_ref())?;
        Ok(y)
    });
    let has_params = weight.grad.is_some() || bias.as_ref().is_some_and(|b| b.grad.is_some());
    let f = LayerNorm { x: tape.save(x), needs_dx: tape.tracks(x), mean, rstd, weight, bias };
    Ok(tape.record(&[x], has_params, y, f, Some(recipe)))
}

struct LayerNorm {
    x: Saved,
    needs_dx: bool,
    mean: Tensor,
    rstd: Tensor,
    weight: Param,
    bias: Option<Param>,
}

impl Function for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let x = self.x.get(rt)?;
        let w = self.weight.value()?;
        let h = w.len();
        let mut dx = rt.empty(x.shape(), DType::F32, Category::Activations)?;
        let mut dw = rt.zeros(&[h], Category::Workspace)?;
        let mut db = rt.zeros(&[h], Category::Workspace)?;
        ln::backward(
            rt.device(),
            x.f32()?,
            w.mat(),
            self.mean.f32()?,
            self.rstd.f32()?,
            grad.f32()?,
            dx.f32_mut()?,
            Some(dw.f32_mut()?),
            Some(db.f32_mut()?),
        )?;
        for (param, d) in [(Some(&self.weight), &dw), (self.bias.as_ref(), &db)] {
            if let Some(Param { grad: Some(slot), .. }) = param {
                let d = d.f32()?;
                slot.add(rt, &[h], |g| phalanx_kernels::elementwise::add_assign(rt.device(), g, d, 1.0))?;
            }
        }
        Ok(vec![self.needs_dx.then_some(dx)])
    }
}
