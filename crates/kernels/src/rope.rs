//! Rotary position embedding (Su et al., arXiv 2104.09864).
//!
//! R values of each head are turned in pairs, pair i by the angle of its position and of frequency i: (x[i], x[i + R/2]) as in Hugging
//! Face llama, or neighbours (x[2i], x[2i + 1]) as in the paper and in DeepSeek-V3.

use crate::error::{bad_shape, check_len};
use crate::par::rows_per_task;
use crate::profile::per_element;
use crate::simd::simd_fn;
use crate::{Device, Result};

/// Which values of a head are turned, and in which pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Form {
    /// The first of the R values.
    pub at: usize,
    /// Pairs are neighbours, not halves.
    pub interleaved: bool,
}

/// [`apply_form`] of the first R values, in halves.
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
    apply_form(dev, x, heads, head_dim, Form::default(), cos, sin, inverse)
}

/// Turns `x` [T,N,D] in place. `cos`, `sin` [T,R/2]: one row a token (already looked up by position). `inverse` turns back,
/// which is the backward of the forward. What is not turned is left alone.
///
/// # Errors
/// If a length does not fit.
pub fn apply_form(
    dev: &Device,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    form: Form,
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
    if form.at > head_dim || 2 * half > head_dim - form.at {
        return bad_shape(
            "rope",
            format!("{} rotary dimensions from {} on in a head of {head_dim}", 2 * half, form.at),
        );
    }
    let _span = dev.profiler().kernel("rope", || per_element(t * heads * 2 * half, 3, 8));
    let (width, rows) = (heads * head_dim, rows_per_task(heads * head_dim));
    dev.team().for_chunks_mut(x, rows * width, &|i, x| {
        for (j, token) in x.chunks_exact_mut(width).enumerate() {
            let angle = (i * rows + j) * half..(i * rows + j + 1) * half;
            let (cos, sin) = (&cos[angle.clone()], &sin[angle]);
            if form.interleaved {
                turn_neighbours(token, head_dim, form.at, cos, sin, inverse);
            } else {
                turn(dev.isa(), token, head_dim, form.at, cos, sin, inverse);
            }
        }
    });
    Ok(())
}

simd_fn! {
    /// All heads of one token.
    fn turn(s, x: &mut [f32], head_dim: usize, at: usize, cos: &[f32], sin: &[f32], inverse: bool) {
        let sign = s.splat(if inverse { -1.0 } else { 1.0 });
        for head in x.chunks_exact_mut(head_dim) {
            let (first, second) = head[at..at + 2 * cos.len()].split_at_mut(cos.len());
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

/// As [`turn`], for pairs of neighbours. The compiler makes vectors of it; no instruction set is asked for, so the bits are the same on all.
fn turn_neighbours(x: &mut [f32], head_dim: usize, at: usize, cos: &[f32], sin: &[f32], inverse: bool) {
    let sign = if inverse { -1.0 } else { 1.0 };
    for head in x.chunks_exact_mut(head_dim) {
        let pairs = head[at..].as_chunks_mut::<2>().0;
        for ([a, b], (&c, &s)) in pairs.iter_mut().zip(cos.iter().zip(sin)) {
            let s = s * sign;
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}
