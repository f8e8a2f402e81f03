//! Rotary position embedding.

use phalanx_kernels::rope::{self as kernel, Form};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Tape};

/// Turns x [T, heads, head_dim] by the angles whose `cos` and `sin` [T, R/2] are given. Works in the memory of `x` when nobody else
/// holds it.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn rope(rt: &Runtime, tape: Option<&mut Tape>, x: Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope_form(rt, tape, x, cos, sin, Form::default())
}

/// As [`rope`], for a part of each head or for pairs of neighbours.
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn rope_form(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    x: Tensor,
    cos: &Tensor,
    sin: &Tensor,
    form: Form,
) -> Result<Tensor> {
    let marker = x.node();
    let y = turn(rt, x, (cos, sin), form, false)?;
    let Some(tape) = tape else { return Ok(y) };
    let input = y.clone().with_node(marker);
    let y = y.with_node(None);
    let f = Rope { cos: cos.clone(), sin: sin.clone(), form };
    Ok(tape.record(&[&input], false, y, f, None))
}

fn turn(rt: &Runtime, x: Tensor, (cos, sin): (&Tensor, &Tensor), form: Form, inverse: bool) -> Result<Tensor> {
    let mut y = if x.is_unique() { x } else { rt.cast(&x, DType::F32, Category::Activations)? };
    let (heads, dim) = (y.dim(1), y.dim(2));
    kernel::apply_form(rt.device(), y.f32_mut()?, heads, dim, form, cos.f32()?, sin.f32()?, inverse)?;
    Ok(y)
}

struct Rope {
    cos: Tensor,
    sin: Tensor,
    form: Form,
}

impl Function for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(turn(rt, grad, (&self.cos, &self.sin), self.form, true)?)])
    }
}
