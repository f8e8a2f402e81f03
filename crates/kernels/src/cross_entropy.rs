//! Softmax cross-entropy, per row and fused with the output projection.
//!
//! The fused form never holds the logits of all tokens: for a chunk of tokens it forms the logits, the loss, the gradient of
//! the logits in place, the gradient of the hidden rows and adds to the gradient of the weight, then forgets them. Gradients
//! are therefore ready in forward (as in Liger and MindSpeed's chunk loss); backward only multiplies by the upstream factor.

use crate::error::{bad_shape, check_len};
use crate::gemm::{Gemm, gemm};
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
    let _ = dev;
    for i in 0..c {
        let row = &logits[i * v..(i + 1) * v];
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        lse[i] = max + sum.ln() as f32;
        logp[i] = if targets[i] == IGNORE { 0.0 } else { row[targets[i] as usize] - lse[i] };
    }
    Ok(())
}

fn check_targets(targets: &[i32], v: usize) -> Result<()> {
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
    let c = targets.len();
    let v = logits.len() / c.max(1);
    check_len("cross_entropy", "logits", logits.len(), c * v)?;
    check_len("cross_entropy", "lse", lse.len(), c)?;
    check_targets(targets, v)?;
    dev.team().for_chunks_mut(logits, v.max(1), &|i, row| {
        if targets[i] == IGNORE {
            row.fill(0.0);
            return;
        }
        for x in row.iter_mut() {
            *x = (*x - lse[i]).exp() * scale;
        }
        row[targets[i] as usize] -= scale;
    });
    Ok(())
}

/// The fused head: what goes in.
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropy<'a> {
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
    check_targets(a.targets, v)?;
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
        gemm(dev, &Gemm::nt(rows, v, h, x.into(), a.weight).bias(a.bias), z)?;
        log_probs(dev, z, targets, &mut logp[start..start + rows], &mut lse[..rows])?;
        loss.count += counted;
        loss.sum -= logp[start..start + rows].iter().map(|&p| f64::from(p)).sum::<f64>();
        if d_hidden.is_none() && d_weight.is_none() && d_bias.is_none() {
            continue;
        }
        grad_in_place(dev, z, targets, &lse[..rows], a.grad_scale)?;
        if let Some(d) = d_hidden.as_deref_mut() {
            gemm(dev, &Gemm::nn(rows, h, v, Mat::F32(z), a.weight), &mut d[start * h..(start + rows) * h])?;
        }
        if let Some(d) = d_weight.as_deref_mut() {
            gemm(dev, &Gemm::tn(v, h, rows, Mat::F32(z), x.into()).accumulate(true), d)?;
        }
        if let Some(d) = d_bias.as_deref_mut() {
            for row in z.chunks_exact(v) {
                d.iter_mut().zip(row).for_each(|(d, g)| *d += g);
            }
        }
    }
    Ok(loss)
}
