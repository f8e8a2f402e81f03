//! Residual addition.

use phalanx_kernels::elementwise;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Tape};

/// a + b, any shape.
///
/// # Errors
/// If the lengths differ or memory runs out.
pub fn add(rt: &Runtime, tape: Option<&mut Tape>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    scale_add(rt, tape, a, b, 1.0)
}

/// a + scale · b, any shape.
///
/// # Errors
/// If the lengths differ or memory runs out.
pub fn scale_add(rt: &Runtime, tape: Option<&mut Tape>, a: &Tensor, b: &Tensor, scale: f32) -> Result<Tensor> {
    let mut out = rt.empty(a.shape(), DType::F32, Category::Activations)?;
    if scale == 1.0 {
        elementwise::add(rt.device(), a.f32()?, b.f32()?, out.f32_mut()?)?;
    } else {
        out.f32_mut()?.copy_from_slice(a.f32()?);
        elementwise::add_assign(rt.device(), out.f32_mut()?, b.f32()?, scale)?;
    }
    Ok(match tape {
        None => out,
        Some(t) => t.record(&[a, b], false, out, Add { scale }, None),
    })
}

struct Add {
    scale: f32,
}

impl Function for Add {
    fn name(&self) -> &'static str {
        "add"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if self.scale == 1.0 {
            return Ok(vec![Some(grad.clone()), Some(grad)]);
        }
        let mut b = rt.cast(&grad, DType::F32, Category::Activations)?;
        elementwise::scale(rt.device(), b.f32_mut()?, self.scale);
        Ok(vec![Some(grad), Some(b)])
    }
}
