//! Element-wise helpers: memory-bound, so each makes one pass.

use half::bf16;

use crate::error::{bad_shape, check_len};
use crate::par::PIECE;
use crate::profile::per_element;
use crate::simd::simd_fn;
use crate::{Device, Result};

/// out = a + b.
///
/// # Errors
/// If a length does not fit.
pub fn add(dev: &Device, a: &[f32], b: &[f32], out: &mut [f32]) -> Result<()> {
    check_len("add", "b", b.len(), a.len())?;
    check_len("add", "out", out.len(), a.len())?;
    let _span = dev.profiler().kernel("add", || per_element(a.len(), 1, 12));
    dev.team().for_chunks_mut(out, PIECE, &|i, out| {
        let r = i * PIECE..i * PIECE + out.len();
        add_piece(dev.isa(), &a[r.clone()], &b[r], out);
    });
    Ok(())
}

simd_fn! {
    /// The task of [`add`].
    pub(crate) fn add_piece(s, a: &[f32], b: &[f32], out: &mut [f32]) {
        let mut i = 0;
        while i < out.len() {
            s.store(out, i, s.add(s.load(a, i), s.load(b, i)));
            i += S::LANES;
        }
    }
}

/// a += b · scale.
///
/// # Errors
/// If a length does not fit.
pub fn add_assign(dev: &Device, a: &mut [f32], b: &[f32], scale: f32) -> Result<()> {
    check_len("add_assign", "b", b.len(), a.len())?;
    let _span = dev.profiler().kernel("add_assign", || per_element(a.len(), 2, 12));
    dev.team().for_chunks_mut(a, PIECE, &|i, a| {
        add_scaled_piece(dev.isa(), a, &b[i * PIECE..i * PIECE + a.len()], scale);
    });
    Ok(())
}

simd_fn! {
    /// The task of [`add_assign`].
    pub(crate) fn add_scaled_piece(s, a: &mut [f32], b: &[f32], scale: f32) {
        let scale = s.splat(scale);
        let mut i = 0;
        while i < a.len() {
            let sum = s.fma(s.load(b, i), scale, s.load(a, i));
            s.store(a, i, sum);
            i += S::LANES;
        }
    }
}

/// x *= scale.
pub fn scale(dev: &Device, x: &mut [f32], scale: f32) {
    let _span = dev.profiler().kernel("scale", || per_element(x.len(), 1, 8));
    dev.team().for_chunks_mut(x, PIECE, &|_, x| scale_piece(dev.isa(), x, scale));
}

simd_fn! {
    fn scale_piece(s, x: &mut [f32], scale: f32) {
        let scale = s.splat(scale);
        let mut i = 0;
        while i < x.len() {
            let v = s.mul(s.load(x, i), scale);
            s.store(x, i, v);
            i += S::LANES;
        }
    }
}

/// Columns of [`sum_rows`] that a task handles: whole cache lines, few enough to share out.
const COLUMNS: usize = 256;

/// dbias[N] += Σ over rows of dy [T,N], each column in runs of 64 rows, added in order.
///
/// # Errors
/// If a length does not fit.
pub fn sum_rows(dev: &Device, dy: &[f32], dbias: &mut [f32]) -> Result<()> {
    let n = dbias.len();
    check_len("sum_rows", "dy", dy.len(), dy.len() / n.max(1) * n)?;
    let _span = dev.profiler().kernel("sum_rows", || per_element(dy.len(), 1, 4));
    dev.team().for_chunks_mut(dbias, COLUMNS, &|i, d| sum_columns(dev.isa(), dy, n, i * COLUMNS, d));
    Ok(())
}

/// Rows that [`sum_rows`] adds up before it adds to the total: shorter chains lose less.
const ROWS: usize = 64;

simd_fn! {
    /// `out` += the columns of `x` [T,`width`] from `first` on; at most [`COLUMNS`] of them.
    fn sum_columns(s, x: &[f32], width: usize, first: usize, out: &mut [f32]) {
        let n = out.len();
        let mut part = [0f32; COLUMNS];
        let part = &mut part[..n];
        for rows in x.chunks(ROWS * width) {
            part.fill(0.0);
            for row in rows.chunks_exact(width) {
                let row = &row[first..first + n];
                let mut i = 0;
                while i < n {
                    let sum = s.add(s.load(part, i), s.load(row, i));
                    s.store(part, i, sum);
                    i += S::LANES;
                }
            }
            let mut i = 0;
            while i < n {
                let sum = s.add(s.load(out, i), s.load(part, i));
                s.store(out, i, sum);
                i += S::LANES;
            }
        }
    }
}

/// Rounds f32 to bf16, to nearest even; NaN stays NaN.
///
/// # Errors
/// If a length does not fit.
pub fn to_bf16(dev: &Device, x: &[f32], out: &mut [bf16]) -> Result<()> {
    check_len("to_bf16", "out", out.len(), x.len())?;
    let _span = dev.profiler().kernel("to_bf16", || per_element(x.len(), 0, 6));
    dev.team().for_chunks_mut(out, PIECE, &|i, out| {
        round_piece(dev.isa(), &x[i * PIECE..i * PIECE + out.len()], out);
    });
    Ok(())
}

simd_fn! {
    fn round_piece(s, x: &[f32], out: &mut [bf16]) {
        let mut i = 0;
        while i < out.len() {
            s.store_bf16(out, i, s.load(x, i));
            i += S::LANES;
        }
    }
}

/// Widens bf16 to f32, exactly.
///
/// # Errors
/// If a length does not fit.
pub fn from_bf16(dev: &Device, x: &[bf16], out: &mut [f32]) -> Result<()> {
    check_len("from_bf16", "out", out.len(), x.len())?;
    let _span = dev.profiler().kernel("from_bf16", || per_element(x.len(), 0, 6));
    dev.team().for_chunks_mut(out, PIECE, &|i, out| {
        widen_piece(dev.isa(), &x[i * PIECE..i * PIECE + out.len()], out);
    });
    Ok(())
}

simd_fn! {
    pub(crate) fn widen_piece(s, x: &[bf16], out: &mut [f32]) {
        let mut i = 0;
        while i < out.len() {
            s.store(out, i, s.load_bf16(x, i));
            i += S::LANES;
        }
    }
}

/// Dropout: out = x·mask/(1−p), where the mask of element i is drawn from `bits(i)` (uniform u32). The same `bits` in backward
/// with the gradient as `x` give its gradient, so no mask is kept. A dropped element becomes 0 whatever it was.
///
/// # Errors
/// If a length does not fit or p is not in 0..1.
pub fn dropout(dev: &Device, x: &[f32], p: f32, bits: &(dyn Fn(u64) -> u32 + Sync), out: &mut [f32]) -> Result<()> {
    check_len("dropout", "out", out.len(), x.len())?;
    if !(0.0..1.0).contains(&p) {
        return bad_shape("dropout", format!("a probability of {p} is not in 0 ≤ p < 1"));
    }
    let _span = dev.profiler().kernel("dropout", || per_element(x.len(), 1, 8));
    let threshold = (f64::from(p) * 4_294_967_296.0) as u64;
    let keep = 1.0 / (1.0 - p);
    dev.team().for_chunks_mut(out, PIECE, &|i, out| {
        let start = i * PIECE;
        for ((j, out), &x) in out.iter_mut().enumerate().zip(&x[start..]) {
            *out = if u64::from(bits((start + j) as u64)) < threshold { 0.0 } else { x * keep };
        }
    });
    Ok(())
}
