//! Dropout whose mask is a function of position, so that none is kept.

use phalanx_kernels::elementwise;
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Tape};

/// Zeroes a share `p` of the elements of x, drawn from `stream`, and scales the rest by 1/(1−p). `p` = 0 is the identity.
///
/// # Errors
/// If memory runs out.
pub fn dropout(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, p: f32, stream: Stream) -> Result<Tensor> {
    if p == 0.0 {
        return Ok(x.clone());
    }
    let y = drop_elements(rt, x, p, stream)?;
    Ok(match tape {
        None => y,
        Some(t) => t.record(&[x], false, y, Dropout { p, stream }, None),
    })
}

fn drop_elements(rt: &Runtime, x: &Tensor, p: f32, stream: Stream) -> Result<Tensor> {
    let mut y = rt.empty(x.shape(), DType::F32, Category::Activations)?;
    elementwise::dropout(rt.device(), x.f32()?, p, &|i| stream.bits(i), y.f32_mut()?)?;
    Ok(y)
}

struct Dropout {
    p: f32,
    stream: Stream,
}

impl Function for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(drop_elements(rt, &grad, self.p, self.stream)?)])
    }
}
