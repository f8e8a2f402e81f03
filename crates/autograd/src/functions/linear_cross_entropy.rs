//! Output projection and cross-entropy in one: logits of all tokens never exist at once.

use std::sync::Arc;

use phalanx_kernels::cross_entropy::{self as kernel, LinearCrossEntropy as Call, LossSum};
use phalanx_kernels::gemm::Arithmetic;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::Param;
use super::sliced_cross_entropy::{self, VocabularySlice};
use crate::{AutogradError, Function, Result, Tape};

/// The fused head.
pub struct HeadSpec {
    /// Output projection [V, H].
    pub weight: Param,
    /// Target of each row, −100 not counted.
    pub targets: Arc<[i32]>,
    /// Bytes that the logits of one chunk may take; fixes the rows of a chunk, and so the order of sums.
    pub chunk_bytes: usize,
    /// How exact its products must be.
    pub arithmetic: Arithmetic,
    /// Where `weight` holds some rows only, and other ranks the others.
    pub slice: Option<VocabularySlice>,
}

/// Rows a chunk has, from the vocabulary alone.
fn chunk_rows(chunk_bytes: usize, vocab: usize) -> usize {
    (chunk_bytes / (4 * vocab.max(1))).clamp(16, 4096) / 16 * 16
}

/// The loss with its count, and the per-token log-probabilities.
pub struct LossOutput {
    /// Recorded sum of the losses, [1].
    pub loss: Tensor,
    /// Σ −log p and the number of counted tokens.
    pub sum: LossSum,
    /// Log-probability of each target [T], 0 where not counted.
    pub logp: Vec<f32>,
}

/// Summed cross-entropy of `hidden` [T, H] through the head.
///
/// Of a head of which every rank holds a slice ([`HeadSpec::slice`]), each rank gets the loss over the whole vocabulary, the gradient of its rows, and the
/// part of the gradient of `hidden` that comes through them: the sum over the ranks is all of it.
///
/// With a tape, gradients are computed now, for an upstream factor of 1 (backward refuses another): the head's goes straight into its
/// slot, that of `hidden` is kept for backward. So use each loss once.
///
/// # Errors
/// If shapes do not fit, a target is outside the vocabulary, or memory runs out.
pub fn linear_cross_entropy(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    hidden: &Tensor,
    spec: HeadSpec,
) -> Result<LossOutput> {
    let w = spec.weight.value()?;
    let (t, v, h) = (hidden.dim(0), w.dim(0), w.dim(1));
    let vocab = spec.slice.as_ref().map_or(v, VocabularySlice::rows_at_most);
    let chunk = chunk_rows(spec.chunk_bytes, vocab);
    let mut logits = rt.empty(&[chunk.min(t), v], DType::F32, Category::Workspace)?;
    let mut logp = vec![0f32; t];
    let call = Call {
        hidden: hidden.f32()?,
        weight: w.mat(),
        bias: None,
        targets: &spec.targets,
        hidden_size: h,
        chunk,
        grad_scale: 1.0,
        arithmetic: spec.arithmetic,
    };
    let needs_dx = tape.as_ref().is_some_and(|t| t.tracks(hidden));
    let mut d_hidden = if needs_dx { Some(rt.empty(&[t, h], DType::F32, Category::Activations)?) } else { None };
    let dh = match &mut d_hidden {
        Some(d) => Some(d.f32_mut()?),
        None => None,
    };
    let run = |dw: Option<&mut [f32]>| -> Result<LossSum> {
        let (logp, logits) = (&mut logp, logits.f32_mut()?);
        match &spec.slice {
            None => Ok(kernel::linear_cross_entropy(rt.device(), &call, dh, dw, None, logp, logits)?),
            Some(slice) => sliced_cross_entropy::run(rt.device(), &call, slice, dh, dw, logp, logits),
        }
    };
    let slot = spec.weight.grad.as_ref().filter(|_| tape.is_some());
    let sum = match slot {
        None => run(None)?,
        Some(slot) => {
            let mut sum = LossSum { sum: 0.0, count: 0 };
            slot.add(rt, &[v, h], |dw| -> Result<()> {
                sum = run(Some(dw))?;
                Ok(())
            })?;
            sum
        }
    };
    let loss = rt.from_f32(&[1], &[sum.sum as f32], Category::Activations)?;
    let loss = match tape {
        None => loss,
        Some(tape) => {
            let has_params = slot.is_some();
            tape.record(&[hidden], has_params, loss, Head { d_hidden }, None)
        }
    };
    Ok(LossOutput { loss, sum, logp })
}

struct Head {
    d_hidden: Option<Tensor>,
}

impl Function for Head {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }
    fn backward(self: Box<Self>, _rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let got = grad.f32()?.first().copied().unwrap_or(0.0);
        if got != 1.0 {
            return Err(AutogradError::Upstream { expected: 1.0, got });
        }
        Ok(vec![self.d_hidden])
    }
}
