//! Causal attention over packed sequences.

use std::sync::Arc;

use phalanx_kernels::attention::{self as kernel, Seq};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Saved, Tape};

/// The form of an attention.
#[derive(Clone)]
pub struct AttentionSpec {
    /// Where the sequences lie.
    pub seqs: Arc<[Seq]>,
    /// Factor of the scores.
    pub scale: f32,
    /// Sliding window.
    pub window: Option<usize>,
}

impl AttentionSpec {
    fn call(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> kernel::Attention<'_> {
        kernel::Attention {
            seqs: &self.seqs,
            heads: q.dim(1),
            kv_heads: k.dim(1),
            head_dim: q.dim(2),
            value_dim: v.dim(2),
            scale: self.scale,
            window: self.window,
        }
    }
}

/// q [T, N, D], k [T, K, D], v [T, K, Dv] → [T, N, Dv].
///
/// # Errors
/// If shapes do not fit or memory runs out.
pub fn attention(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: AttentionSpec,
) -> Result<Tensor> {
    let mut out = rt.empty(&[q.dim(0), q.dim(1), v.dim(2)], DType::F32, Category::Activations)?;
    let mut lse = rt.empty(&[q.dim(0), q.dim(1)], DType::F32, Category::Activations)?;
    kernel::forward(rt.device(), &spec.call(q, k, v), q.f32()?, k.f32()?, v.f32()?, out.f32_mut()?, lse.f32_mut()?)?;
    let Some(tape) = tape else { return Ok(out) };
    let f = Attention { q: tape.save(q), k: tape.save(k), v: tape.save(v), out: Saved::keep(&out), lse, spec };
    Ok(tape.record(&[q, k, v], false, out, f, None))
}

struct Attention {
    q: Saved,
    k: Saved,
    v: Saved,
    out: Saved,
    lse: Tensor,
    spec: AttentionSpec,
}

impl Function for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (q, k, v, out) = (self.q.get(rt)?, self.k.get(rt)?, self.v.get(rt)?, self.out.get(rt)?);
        let mut dq = rt.empty(q.shape(), DType::F32, Category::Activations)?;
        let mut dk = rt.empty(k.shape(), DType::F32, Category::Activations)?;
        let mut dv = rt.empty(v.shape(), DType::F32, Category::Activations)?;
        kernel::backward(
            rt.device(),
            &self.spec.call(&q, &k, &v),
            q.f32()?,
            k.f32()?,
            v.f32()?,
            out.f32()?,
            self.lse.f32()?,
            grad.f32()?,
            dq.f32_mut()?,
            dk.f32_mut()?,
            dv.f32_mut()?,
        )?;
        Ok(vec![Some(dq), Some(dk), Some(dv)])
    }
}
