//! Gated linear unit: act(gate) · up.

use phalanx_kernels::glu as kernel;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Recipe, Result, Saved, Tape};

/// gate, up [T, I] → act(gate) · up [T, I]. Leaves a recipe, so the product is rebuilt rather than kept.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn glu(rt: &Runtime, tape: Option<&mut Tape>, act: kernel::Act, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let run = move |rt: &Runtime, gate: &Tensor, up: &Tensor| -> Result<Tensor> {
        let mut out = rt.empty(gate.shape(), DType::F32, Category::Activations)?;
        kernel::forward(rt.device(), act, gate.f32()?, up.f32()?, out.f32_mut()?)?;
        Ok(out)
    };
    let out = run(rt, gate, up)?;
    let Some(tape) = tape else { return Ok(out) };
    let (g, u) = (tape.save(gate), tape.save(up));
    let recipe = Recipe::new(move |rt| run(rt, &g.get(rt)?, &u.get(rt)?));
    let f = Glu { act, gate: tape.save(gate), up: tape.save(up) };
    Ok(tape.record(&[gate, up], false, out, f, Some(recipe)))
}

struct Glu {
    act: kernel::Act,
    gate: Saved,
    up: Saved,
}

impl Function for Glu {
    fn name(&self) -> &'static str {
        "glu"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (gate, up) = (self.gate.get(rt)?, self.up.get(rt)?);
        let mut dg = rt.empty(gate.shape(), DType::F32, Category::Activations)?;
        let mut du = rt.empty(up.shape(), DType::F32, Category::Activations)?;
        kernel::backward(rt.device(), self.act, gate.f32()?, up.f32()?, grad.f32()?, dg.f32_mut()?, du.f32_mut()?)?;
        Ok(vec![Some(dg), Some(du)])
    }
}
