//! Splitting heads into parts and joining them.

use phalanx_kernels::columns as kernel;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Tape};

/// Columns `range` of the last dimension: x [T, …, W] → [T, …, n].
///
/// # Errors
/// If the range leaves the dimension or memory runs out.
pub fn columns(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, range: std::ops::Range<usize>) -> Result<Tensor> {
    let (width, at, n) = (last(x), range.start, range.len());
    let mut shape = x.shape().to_vec();
    if let Some(d) = shape.last_mut() {
        *d = n;
    }
    let mut out = rt.empty(&shape, DType::F32, Category::Activations)?;
    kernel::take(rt.device(), x.f32()?, width, at, out.f32_mut()?, n)?;
    let Some(tape) = tape else { return Ok(out) };
    let f = Columns { shape: x.shape().to_vec(), at, n };
    Ok(tape.record(&[x], false, out, f, None))
}

fn last(x: &Tensor) -> usize {
    x.shape().last().copied().unwrap_or(1)
}

struct Columns {
    shape: Vec<usize>,
    at: usize,
    n: usize,
}

impl Function for Columns {
    fn name(&self) -> &'static str {
        "columns"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let mut dx = rt.zeros(&self.shape, Category::Activations)?;
        let width = last(&dx);
        kernel::put(rt.device(), grad.f32()?, self.n, 1, dx.f32_mut()?, width, self.at)?;
        Ok(vec![Some(dx)])
    }
}

/// Heads side by side: a [T, N, A] and b [T, N, B], or b [T, 1, B] for all heads alike → [T, N, A + B].
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn join_heads(rt: &Runtime, tape: Option<&mut Tape>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (t, heads, wa, wb) = (a.dim(0), a.dim(1), a.dim(2), b.dim(2));
    let repeat = heads / b.dim(1).max(1);
    let mut out = rt.empty(&[t, heads, wa + wb], DType::F32, Category::Activations)?;
    {
        let out = out.f32_mut()?;
        kernel::put(rt.device(), a.f32()?, wa, 1, out, wa + wb, 0)?;
        kernel::put(rt.device(), b.f32()?, wb, repeat, out, wa + wb, wa)?;
    }
    let Some(tape) = tape else { return Ok(out) };
    let f =
        JoinHeads { a: a.shape().to_vec(), b: b.shape().to_vec(), repeat, wanted: [tape.tracks(a), tape.tracks(b)] };
    Ok(tape.record(&[a, b], false, out, f, None))
}

struct JoinHeads {
    a: Vec<usize>,
    b: Vec<usize>,
    repeat: usize,
    wanted: [bool; 2],
}

impl Function for JoinHeads {
    fn name(&self) -> &'static str {
        "join_heads"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let width = last(&grad);
        let part = |shape: &[usize], at: usize, repeat: usize| -> Result<Tensor> {
            let mut d = rt.empty(shape, DType::F32, Category::Activations)?;
            let n = last(&d);
            kernel::sum(rt.device(), grad.f32()?, width, at, repeat, d.f32_mut()?, n)?;
            Ok(d)
        };
        let at = self.a.last().copied().unwrap_or(0);
        let da = if self.wanted[0] { Some(part(&self.a, 0, 1)?) } else { None };
        let db = if self.wanted[1] { Some(part(&self.b, at, self.repeat)?) } else { None };
        Ok(vec![da, db])
    }
}
