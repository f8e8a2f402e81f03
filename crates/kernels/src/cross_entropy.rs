//! Softmax cross-entropy, per row and fused with the output projection.
//!
//! The fused form never holds the logits of all tokens: for a chunk of tokens it forms the logits, the loss, the gradient of
//! the logits in place, the gradient of the hidden rows and adds to the gradient of the weight, then forgets them. Gradients
//! are therefore ready in forward (as in Liger and MindSpeed's chunk loss), for an upstream factor that must be known there; the
//! tape fixes it at 1 and refuses any other in backward.

use crate::elementwise::sum_rows;
use crate::error::{bad_shape, check_len};
use crate::gemm::{Arithmetic, Gemm, gemm};
use crate::isa::Isa;
use crate::par::{Parts, rows_per_task};
use crate::profile::per_element;
use crate::simd::math::{exp, sum_over};
use crate::simd::simd_fn;
use crate::{Device, Mat, Result};

/// A target that is not counted.
pub const IGNORE: i32 = -100;

/// Log-probability of each row's target and the log-sum-exp; `logits` [C,V], `targets` [C] (−100: 0 is written).
///
/// Sampling and training both take log-probabilities from here, so they agree to the bit.
///
/// # Errors
/// If a length does not fit or a target is outside 0..V and not −100.
pub fn log_probs(dev: &Device, logits: &[f32], targets: &[i32], logp: &mut [f32], lse: &mut [f32]) -> Result<()> {
    let c = targets.len();
    let v = logits.len() / c.max(1);
    check_len("log_probs", "logits", logits.len(), c * v)?;
    check_len("log_probs", "logp", logp.len(), c)?;
    check_len("log_probs", "lse", lse.len(), c)?;
    check_targets(targets, v)?;
    let _span = dev.profiler().kernel("log_probs", || per_element(logits.len(), 4, 4));
    let rows = rows_per_task(v);
    let logp = Parts::new(logp);
    dev.team().for_chunks_mut(lse, rows, &|i, lse| {
        let first = i * rows;
        // SAFETY: tasks handle different rows.
        let logp = unsafe { logp.get(first..first + lse.len()) };
        for (j, (lse, logp)) in lse.iter_mut().zip(logp).enumerate() {
            let row = &logits[(first + j) * v..(first + j + 1) * v];
            *lse = log_sum_exp(dev.isa(), row);
            let target = targets[first + j];
            *logp = if target == IGNORE { 0.0 } else { row[target as usize] - *lse };
        }
    });
    Ok(())
}

/// ln Σ eˣ of each row of `logits` [C,V]. The log-probability of token t in row i is `logits[i·V + t] − lse[i]`, to the bit what
/// [`log_probs`] gives for that target.
///
/// # Errors
/// If a length does not fit.
pub fn log_sum_exps(dev: &Device, logits: &[f32], lse: &mut [f32]) -> Result<()> {
    let v = logits.len() / lse.len().max(1);
    check_len("log_sum_exps", "logits", logits.len(), lse.len() * v)?;
    let _span = dev.profiler().kernel("log_sum_exps", || per_element(logits.len(), 4, 4));
    let rows = rows_per_task(v);
    dev.team().for_chunks_mut(lse, rows, &|i, lse| {
        for (j, lse) in lse.iter_mut().enumerate() {
            *lse = log_sum_exp(dev.isa(), &logits[(i * rows + j) * v..(i * rows + j + 1) * v]);
        }
    });
    Ok(())
}

/// Exponentials added up in f32 before f64 takes over: a sum of more would lose digits.
const RUN: usize = 1 << 10;

/// ln Σ eˣ.
fn log_sum_exp(isa: Isa, row: &[f32]) -> f32 {
    let SliceSum { max, sum } = max_and_sum(isa, row);
    (f64::from(max) + sum.ln()) as f32
}

/// Softmax of a row over a slice of its logits: the greatest, and Σ e^(x − max). Slices are put together by [`SliceSum::join`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SliceSum {
    /// The greatest logit; −∞ of none.
    pub max: f32,
    /// Σ e^(x − max).
    pub sum: f64,
}

impl SliceSum {
    /// ln Σ eˣ over all slices of a row. A NaN anywhere gives NaN.
    pub fn join(slices: impl Iterator<Item = SliceSum> + Clone) -> f32 {
        let max = slices.clone().map(|s| s.max).fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            // Nothing but −∞: ∞ − ∞ below would make it NaN.
            return slices.fold(max, |a, s| a + s.sum as f32);
        }
        let sum: f64 = slices.map(|s| s.sum * (f64::from(s.max) - f64::from(max)).exp()).sum();
        (f64::from(max) + sum.ln()) as f32
    }
}

simd_fn! {
    /// The greatest value first, then the sum of the exponentials below it; its order depends on V alone.
    fn max_and_sum(s, row: &[f32]) -> SliceSum {
        let low = s.splat(f32::NEG_INFINITY);
        let mut max = [low; 4];
        let mut i = 0;
        while i < row.len() {
            for (j, max) in max.iter_mut().enumerate() {
                *max = s.max(*max, s.load_or(row, i + j * S::LANES, f32::NEG_INFINITY));
            }
            i += 4 * S::LANES;
        }
        let max = s.largest(s.max(s.max(max[0], max[1]), s.max(max[2], max[3])));
        if max == f32::NEG_INFINITY {
            // Nothing but −∞ (or NaN, which must not be lost): ∞ − ∞ below would make it NaN.
            let nan = row.iter().any(|x| x.is_nan());
            return SliceSum { max, sum: if nan { f64::NAN } else { 0.0 } };
        }
        let top = s.splat(max);
        let mut sum = 0f64;
        for run in row.chunks(RUN) {
            let part = sum_over(s, run.len(), #[inline(always)] |i, sum| {
                s.add(sum, exp(s, s.sub(s.load_or(run, i, f32::NEG_INFINITY), top)))
            });
            sum += f64::from(part);
        }
        SliceSum { max, sum }
    }
}

/// Softmax sums of each row of `logits` [C,V′], a slice of the vocabulary.
///
/// # Errors
/// If a length does not fit.
pub fn slice_sums(dev: &Device, logits: &[f32], sums: &mut [SliceSum]) -> Result<()> {
    let v = logits.len() / sums.len().max(1);
    check_len("slice_sums", "logits", logits.len(), sums.len() * v)?;
    let _span = dev.profiler().kernel("slice_sums", || per_element(logits.len(), 4, 4));
    let rows = rows_per_task(v);
    dev.team().for_chunks_mut(sums, rows, &|i, sums| {
        for (j, sum) in sums.iter_mut().enumerate() {
            *sum = max_and_sum(dev.isa(), &logits[(i * rows + j) * v..(i * rows + j + 1) * v]);
        }
    });
    Ok(())
}

/// Whether every target is a token of a vocabulary of `v`, or not counted.
///
/// # Errors
/// Names the first that is not.
pub fn check_targets(targets: &[i32], v: usize) -> Result<()> {
    match targets.iter().position(|&t| t != IGNORE && (t < 0 || t as usize >= v)) {
        Some(i) => {
            bad_shape("cross_entropy", format!("target {} of token {i} is outside a vocabulary of {v}", targets[i]))
        }
        None => Ok(()),
    }
}

/// Turns `logits` [C,V] into the gradient of Σ −logp·`scale` in place: (softmax − onehot)·scale; rows of ignored targets become 0.
///
/// # Errors
/// As [`log_probs`].
pub fn grad_in_place(dev: &Device, logits: &mut [f32], targets: &[i32], lse: &[f32], scale: f32) -> Result<()> {
    let v = logits.len() / targets.len().max(1);
    check_targets(targets, v)?;
    grad_slice_in_place(dev, logits, targets, 0, lse, scale)
}

/// As [`grad_in_place`] for a slice of the vocabulary: `logits` [C,V′] are those of tokens `first`, …; `lse` is over the whole vocabulary, in
/// which `targets` lie.
///
/// # Errors
/// If a length does not fit.
pub fn grad_slice_in_place(
    dev: &Device,
    logits: &mut [f32],
    targets: &[i32],
    first: usize,
    lse: &[f32],
    scale: f32,
) -> Result<()> {
    let c = targets.len();
    let v = logits.len() / c.max(1);
    check_len("cross_entropy", "logits", logits.len(), c * v)?;
    check_len("cross_entropy", "lse", lse.len(), c)?;
    if v == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("cross_entropy gradient", || per_element(logits.len(), 3, 8));
    let rows = rows_per_task(v);
    dev.team().for_chunks_mut(logits, rows * v, &|i, logits| {
        for (j, row) in logits.chunks_exact_mut(v).enumerate() {
            let t = i * rows + j;
            if targets[t] == IGNORE {
                row.fill(0.0);
                continue;
            }
            scaled_softmax(dev.isa(), row, lse[t], scale);
            let target = usize::try_from(targets[t]).ok().and_then(|t| t.checked_sub(first));
            if let Some(x) = target.and_then(|t| row.get_mut(t)) {
                *x -= scale;
            }
        }
    });
    Ok(())
}

simd_fn! {
    /// x ← e^(x − lse)·scale.
    fn scaled_softmax(s, row: &mut [f32], lse: f32, scale: f32) {
        let (lse, scale) = (s.splat(lse), s.splat(scale));
        let mut i = 0;
        while i < row.len() {
            let p = exp(s, s.sub(s.load(row, i), lse));
            s.store(row, i, s.mul(p, scale));
            i += S::LANES;
        }
    }
}

/// The fused head: what goes in.
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropy<'a> {
    /// How exact its three products must be.
    pub arithmetic: Arithmetic,
    /// Hidden rows [T,H].
    pub hidden: &'a [f32],
    /// Output projection [V,H].
    pub weight: Mat<'a>,
    /// Bias of the logits [V].
    pub bias: Option<&'a [f32]>,
    /// Target of each row, −100 not counted.
    pub targets: &'a [i32],
    /// H.
    pub hidden_size: usize,
    /// Rows a chunk; fixes the order of the sum over tokens, so it must come from shapes or configuration, not from threads.
    pub chunk: usize,
    /// Factor of the gradients (1 gives those of the summed loss).
    pub grad_scale: f32,
}

/// What the fused head returns beside the gradients: a sum and a count, never a mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossSum {
    /// Σ −log p(target) over counted tokens, in f64.
    pub sum: f64,
    /// Number of counted tokens.
    pub count: usize,
}

/// Loss and gradients of the summed loss. `d_hidden` [T,H] is overwritten when given; `d_weight` [V,H] and `d_bias` [V] are added
/// to when given (leave out what is frozen); `logp` [T] gets log-probabilities (0 where ignored); `logits` is workspace of at least chunk·V.
///
/// # Errors
/// If a length does not fit or a target is outside the vocabulary.
pub fn linear_cross_entropy(
    dev: &Device,
    a: &LinearCrossEntropy<'_>,
    mut d_hidden: Option<&mut [f32]>,
    mut d_weight: Option<&mut [f32]>,
    mut d_bias: Option<&mut [f32]>,
    logp: &mut [f32],
    logits: &mut [f32],
) -> Result<LossSum> {
    let (t, h) = (a.targets.len(), a.hidden_size);
    let v = a.weight.len() / h.max(1);
    check_len("linear_cross_entropy", "hidden", a.hidden.len(), t * h)?;
    check_len("linear_cross_entropy", "weight", a.weight.len(), v * h)?;
    check_len("linear_cross_entropy", "logp", logp.len(), t)?;
    if a.chunk == 0 || logits.len() < a.chunk.min(t) * v {
        return bad_shape(
            "linear_cross_entropy",
            format!("workspace of {} for chunks of {} × {v}", logits.len(), a.chunk),
        );
    }
    for (what, d, want) in [("d_hidden", &d_hidden, t * h), ("d_weight", &d_weight, v * h), ("d_bias", &d_bias, v)] {
        if let Some(d) = d {
            check_len("linear_cross_entropy", what, d.len(), want)?;
        }
    }
    check_targets(a.targets, v)?;
    // Not a kernel of its own: its products and passes are counted one by one.
    let _scope = dev.profiler().scope(|| "linear_cross_entropy".into());
    let mut lse = vec![0f32; a.chunk.min(t)];
    let mut loss = LossSum { sum: 0.0, count: 0 };
    for start in (0..t).step_by(a.chunk) {
        let rows = a.chunk.min(t - start);
        let targets = &a.targets[start..start + rows];
        let counted = targets.iter().filter(|&&t| t != IGNORE).count();
        if counted == 0 {
            logp[start..start + rows].fill(0.0);
            if let Some(d) = d_hidden.as_deref_mut() {
                d[start * h..(start + rows) * h].fill(0.0);
            }
            continue;
        }
        let x = &a.hidden[start * h..(start + rows) * h];
        let z = &mut logits[..rows * v];
        gemm(dev, &Gemm::nt(rows, v, h, x.into(), a.weight).bias(a.bias).arithmetic(a.arithmetic), z)?;
        log_probs(dev, z, targets, &mut logp[start..start + rows], &mut lse[..rows])?;
        loss.count += counted;
        loss.sum -= logp[start..start + rows].iter().map(|&p| f64::from(p)).sum::<f64>();
        if d_hidden.is_none() && d_weight.is_none() && d_bias.is_none() {
            continue;
        }
        grad_in_place(dev, z, targets, &lse[..rows], a.grad_scale)?;
        if let Some(d) = d_hidden.as_deref_mut() {
            let product = Gemm::nn(rows, h, v, Mat::F32(z), a.weight).arithmetic(a.arithmetic);
            gemm(dev, &product, &mut d[start * h..(start + rows) * h])?;
        }
        if let Some(d) = d_weight.as_deref_mut() {
            let product = Gemm::tn(v, h, rows, Mat::F32(z), x.into()).accumulate(true).arithmetic(a.arithmetic);
            gemm(dev, &product, d)?;
        }
        if let Some(d) = d_bias.as_deref_mut() {
            sum_rows(dev, z, d)?;
        }
    }
    Ok(loss)
}
