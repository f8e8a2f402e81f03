//! The fused head where every rank holds a slice of the vocabulary (Shoeybi et al., arXiv 1909.08053, §3: logits never leave their rank).
//!
//! For each chunk of tokens a rank tells the others three numbers a token: its greatest logit, Σ e^(x − max) over its slice, and the target's logit
//! if it is there. All come in one gather, from which every rank makes the same log-sum-exp, to the bit; the gradient of the logits needs nothing more.

use std::ops::Range;
use std::sync::Arc;

use phalanx_kernels::Device;
use phalanx_kernels::cross_entropy::{
    IGNORE, LinearCrossEntropy, LossSum, SliceSum, check_targets, grad_slice_in_place, slice_sums,
};
use phalanx_kernels::gemm::{Gemm, gemm};

use crate::Result;

/// The ranks that hold the other slices of a parameter.
pub trait Across: Send + Sync {
    /// How many they are, this one included.
    fn ranks(&self) -> usize;

    /// `all` gets what rank 0 gives as `mine`, then that of rank 1, …: the same number from each.
    ///
    /// # Errors
    /// If a peer failed.
    fn all_gather(&self, mine: &[f64], all: &mut [f64]) -> Result<()>;
}

/// The part of the vocabulary that a rank holds.
#[derive(Clone)]
pub struct VocabularySlice {
    /// Its tokens.
    pub tokens: Range<usize>,
    /// Size of the vocabulary V.
    pub vocab: usize,
    /// Who holds the rest.
    pub across: Arc<dyn Across>,
}

impl VocabularySlice {
    /// Rows that no rank's slice exceeds, the same on all ranks: they must cut the tokens into the same chunks.
    pub(super) fn rows_at_most(&self) -> usize {
        self.vocab.div_ceil(self.across.ranks())
    }
}

/// Numbers a token that ranks tell each other.
const NUMBERS: usize = 3;

/// As [`phalanx_kernels::cross_entropy::linear_cross_entropy`], of which `a.weight` is the slice of this rank: `d_hidden` gets this slice's part of the
/// gradient. All ranks have the same hidden rows and targets.
pub(super) fn run(
    dev: &Device,
    a: &LinearCrossEntropy<'_>,
    slice: &VocabularySlice,
    mut d_hidden: Option<&mut [f32]>,
    mut d_weight: Option<&mut [f32]>,
    logp: &mut [f32],
    logits: &mut [f32],
) -> Result<LossSum> {
    let (t, h, v) = (a.targets.len(), a.hidden_size, slice.tokens.len());
    check_targets(a.targets, slice.vocab)?;
    let _scope = dev.profiler().scope(|| "sliced_cross_entropy".into());
    let mut lse = vec![0f32; a.chunk.min(t)];
    let mut loss = LossSum { sum: 0.0, count: 0 };
    for start in (0..t).step_by(a.chunk) {
        let rows = a.chunk.min(t - start);
        let (targets, logp) = (&a.targets[start..start + rows], &mut logp[start..start + rows]);
        let counted = targets.iter().filter(|&&t| t != IGNORE).count();
        if counted == 0 {
            logp.fill(0.0);
            if let Some(d) = d_hidden.as_deref_mut() {
                d[start * h..(start + rows) * h].fill(0.0);
            }
            continue;
        }
        let x = &a.hidden[start * h..(start + rows) * h];
        let z = &mut logits[..rows * v];
        gemm(dev, &Gemm::nt(rows, v, h, x.into(), a.weight).arithmetic(a.arithmetic), z)?;
        log_probs(dev, slice, z, targets, logp, &mut lse[..rows])?;
        loss.count += counted;
        loss.sum -= logp.iter().map(|&p| f64::from(p)).sum::<f64>();
        if d_hidden.is_none() && d_weight.is_none() {
            continue;
        }
        grad_slice_in_place(dev, z, targets, slice.tokens.start, &lse[..rows], a.grad_scale)?;
        if let Some(d) = d_hidden.as_deref_mut() {
            let product = Gemm::nn(rows, h, v, (&*z).into(), a.weight).arithmetic(a.arithmetic);
            gemm(dev, &product, &mut d[start * h..(start + rows) * h])?;
        }
        if let Some(d) = d_weight.as_deref_mut() {
            let product = Gemm::tn(v, h, rows, (&*z).into(), x.into()).accumulate(true).arithmetic(a.arithmetic);
            gemm(dev, &product, d)?;
        }
    }
    Ok(loss)
}

/// Log-probability of each target and log-sum-exp over the whole vocabulary, from the logits [C,V′] of this slice.
fn log_probs(
    dev: &Device,
    slice: &VocabularySlice,
    z: &[f32],
    targets: &[i32],
    logp: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    let (rows, v, ranks) = (targets.len(), slice.tokens.len(), slice.across.ranks());
    let mut sums = vec![SliceSum { max: f32::NEG_INFINITY, sum: 0.0 }; rows];
    slice_sums(dev, z, &mut sums)?;
    let mut mine = vec![0f64; NUMBERS * rows];
    for (i, (mine, sum)) in mine.chunks_exact_mut(NUMBERS).zip(&sums).enumerate() {
        let target = usize::try_from(targets[i]).ok().filter(|t| slice.tokens.contains(t));
        let logit = target.map_or(0.0, |t| z[i * v + t - slice.tokens.start]);
        mine.copy_from_slice(&[f64::from(sum.max), sum.sum, f64::from(logit)]);
    }
    let mut all = vec![0f64; ranks * mine.len()];
    slice.across.all_gather(&mine, &mut all)?;
    for i in 0..rows {
        // One rank has the target's logit and the others 0, so that their sum is exact.
        let of = |rank: usize| &all[(rank * rows + i) * NUMBERS..(rank * rows + i + 1) * NUMBERS];
        let slices = (0..ranks).map(|r| SliceSum { max: of(r)[0] as f32, sum: of(r)[1] });
        lse[i] = SliceSum::join(slices);
        let logit = (0..ranks).map(|r| of(r)[2]).sum::<f64>() as f32;
        logp[i] = if targets[i] == IGNORE { 0.0 } else { logit - lse[i] };
    }
    Ok(())
}
