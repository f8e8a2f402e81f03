//! Rotary position embedding, half-split form as in Hugging Face llama (Su et al., arXiv 2104.09864).
//!
//! Pair (x[i], x[i + R/2]) of each head is turned by the angle of its position and of frequency i; R is the rotary dimension.

use crate::error::{bad_shape, check_len};
use crate::par::rows_per_task;
use crate::profile::per_element;
use crate::simd::simd_fn;
use crate::{Device, Result};

/// Turns `x` [T,N,D] in place. `cos`, `sin` [T,R/2]: one row a token (already looked up by position). `inverse` turns back,
/// which is the backward of the forward. R ≤ D; elements beyond R are left alone.
///
/// # Errors
/// If a length does not fit.
pub fn apply(
    dev: &Device,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    inverse: bool,
) -> Result<()> {
    let t = x.len() / (heads * head_dim).max(1);
    check_len("rope", "x", x.len(), t * heads * head_dim)?;
    check_len("rope", "sin", sin.len(), cos.len())?;
    if t == 0 {
        return Ok(());
    }
    let half = cos.len() / t;
    check_len("rope", "cos", cos.len(), t * half)?;
    if 2 * half > head_dim {
        return bad_shape("rope", format!("{} rotary dimensions in a head of {head_dim}", 2 * half));
    }
    let _span = dev.profiler().kernel("rope", || per_element(t * heads * 2 * half, 3, 8));
    let (width, rows) = (heads * head_dim, rows_per_task(heads * head_dim));
    dev.team().for_chunks_mut(x, rows * width, &|i, x| {
        for (j, token) in x.chunks_exact_mut(width).enumerate() {
            let angle = (i * rows + j) * half..(i * rows + j + 1) * half;
            turn(dev.isa(), token, head_dim, &cos[angle.clone()], &sin[angle], inverse);
        }
    });
    Ok(())
}

simd_fn! {
    /// All heads of one token.
    fn turn(s, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], inverse: bool) {
        let sign = s.splat(if inverse { -1.0 } else { 1.0 });
        for head in x.chunks_exact_mut(head_dim) {
            let (first, second) = head[..2 * cos.len()].split_at_mut(cos.len());
            let mut i = 0;
            while i < cos.len() {
                let (c, t) = (s.load(cos, i), s.mul(s.load(sin, i), sign));
                let (a, b) = (s.load(first, i), s.load(second, i));
                s.store(first, i, s.fnma(b, t, s.mul(a, c)));
                s.store(second, i, s.fma(a, t, s.mul(b, c)));
                i += S::LANES;
            }
        }
    }
}
