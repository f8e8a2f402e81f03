//! Attention over keys that are here: calls of the kernel.

use phalanx_autograd::AutogradError;
use phalanx_kernels::KernelError;
use phalanx_kernels::attention::{self as kernel, Seq};
use phalanx_nn::{NnError, Result};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

/// Sizes and options that every call of one attention has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub scale: f32,
    pub window: Option<usize>,
}

impl Form {
    pub fn new(q: &Tensor, k: &Tensor, scale: f32, window: Option<usize>) -> Form {
        Form { heads: q.dim(1), kv_heads: k.dim(1), dim: q.dim(2), scale, window }
    }

    /// The call over some sequences.
    pub fn over<'a>(&self, seqs: &'a [Seq]) -> kernel::Attention<'a> {
        let Form { heads, kv_heads, dim, scale, window } = *self;
        kernel::Attention { seqs, heads, kv_heads, head_dim: dim, value_dim: dim, scale, window }
    }

    /// Values of a row of K.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.dim
    }
}

/// What a forward leaves: output [T,N,D] and log-sum-exp [T,N]. A row that sees nothing has zeros.
pub(super) struct Output {
    pub out: Tensor,
    pub lse: Tensor,
}

/// Forward over all keys at once: the bits are those of one rank.
pub(super) fn forward(rt: &Runtime, form: Form, seqs: &[Seq], qkv: [&Tensor; 3]) -> Result<Output> {
    let [q, k, v] = qkv;
    let mut out = rt.empty(q.shape(), DType::F32, Category::Activations)?;
    let mut lse = rt.empty(&[q.dim(0), q.dim(1)], DType::F32, Category::Activations)?;
    if seqs.iter().map(|s| s.q_len).sum::<usize>() < q.dim(0) {
        out.f32_mut()?.fill(0.0);
        lse.f32_mut()?.fill(0.0);
    }
    let (to, stats) = (out.f32_mut()?, lse.f32_mut()?);
    kernel::forward(rt.device(), &form.over(seqs), q.f32()?, k.f32()?, v.f32()?, to, stats).map_err(refused)?;
    Ok(Output { out, lse })
}

/// Gradients of q, k and v. What nobody sees has zeros.
pub(super) fn backward(
    rt: &Runtime,
    form: Form,
    seqs: &[Seq],
    qkv: [&Tensor; 3],
    forward: &Output,
    grad: &Tensor,
) -> Result<[Tensor; 3]> {
    let [q, k, v] = qkv;
    let mut dq = rt.zeros(q.shape(), Category::Activations)?;
    let mut dk = rt.zeros(k.shape(), Category::Activations)?;
    let mut dv = rt.zeros(v.shape(), Category::Activations)?;
    kernel::backward_onto(
        rt.device(),
        &form.over(seqs),
        q.f32()?,
        k.f32()?,
        v.f32()?,
        forward.out.f32()?,
        forward.lse.f32()?,
        grad.f32()?,
        dq.f32_mut()?,
        dk.f32_mut()?,
        dv.f32_mut()?,
    )
    .map_err(refused)?;
    Ok([dq, dk, dv])
}

pub(super) fn refused(e: KernelError) -> NnError {
    NnError::Autograd(AutogradError::Kernel(e))
}
