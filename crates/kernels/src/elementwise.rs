//! Element-wise helpers: memory-bound, so each makes one pass.

use half::bf16;

use crate::error::check_len;
use crate::{Device, Result};

/// Elements a task handles.
const PIECE: usize = 1 << 15;

/// out = a + b.
///
/// # Errors
/// If a length does not fit.
pub fn add(dev: &Device, a: &[f32], b: &[f32], out: &mut [f32]) -> Result<()> {
    check_len("add", "b", b.len(), a.len())?;
    check_len("add", "out", out.len(), a.len())?;
    dev.team().for_chunks_mut(out, PIECE, &|i, o| {
        let r = i * PIECE..i * PIECE + o.len();
        for ((o, a), b) in o.iter_mut().zip(&a[r.clone()]).zip(&b[r]) {
            *o = a + b;
        }
    });
    Ok(())
}

/// a += b · scale.
///
/// # Errors
/// If a length does not fit.
pub fn add_assign(dev: &Device, a: &mut [f32], b: &[f32], scale: f32) -> Result<()> {
    check_len("add_assign", "b", b.len(), a.len())?;
    dev.team().for_chunks_mut(a, PIECE, &|i, a| {
        for (a, b) in a.iter_mut().zip(&b[i * PIECE..]) {
            *a += b * scale;
        }
    });
    Ok(())
}

/// x *= scale.
pub fn scale(dev: &Device, x: &mut [f32], scale: f32) {
    dev.team().for_chunks_mut(x, PIECE, &|_, x| x.iter_mut().for_each(|x| *x *= scale));
}

/// dbias[N] += Σ over rows of dy [T,N], rows in order within fixed pieces.
///
/// # Errors
/// If a length does not fit.
pub fn sum_rows(dev: &Device, dy: &[f32], dbias: &mut [f32]) -> Result<()> {
    let n = dbias.len();
    check_len("sum_rows", "dy", dy.len(), dy.len() / n.max(1) * n)?;
    dev.team().for_chunks_mut(dbias, 256, &|i, d| {
        for row in dy.chunks_exact(n) {
            for (d, g) in d.iter_mut().zip(&row[i * 256..]) {
                *d += g;
            }
        }
    });
    Ok(())
}

/// Rounds f32 to bf16, to nearest even; NaN stays NaN.
///
/// # Errors
/// If a length does not fit.
pub fn to_bf16(dev: &Device, x: &[f32], out: &mut [bf16]) -> Result<()> {
    check_len("to_bf16", "out", out.len(), x.len())?;
    dev.team().for_chunks_mut(out, PIECE, &|i, o| {
        for (o, &x) in o.iter_mut().zip(&x[i * PIECE..]) {
            *o = bf16::from_f32(x);
        }
    });
    Ok(())
}

/// Widens bf16 to f32, exactly.
///
/// # Errors
/// If a length does not fit.
pub fn from_bf16(dev: &Device, x: &[bf16], out: &mut [f32]) -> Result<()> {
    check_len("from_bf16", "out", out.len(), x.len())?;
    dev.team().for_chunks_mut(out, PIECE, &|i, o| {
        for (o, x) in o.iter_mut().zip(&x[i * PIECE..]) {
            *o = x.to_f32();
        }
    });
    Ok(())
}

/// Dropout: out = x·mask/(1−p), where the mask of element i is drawn from `bits(i)` (uniform u32). The same `bits` in backward
/// with the gradient as `x` give its gradient, so no mask is kept.
///
/// # Errors
/// If a length does not fit.
pub fn dropout(dev: &Device, x: &[f32], p: f32, bits: &(dyn Fn(u64) -> u32 + Sync), out: &mut [f32]) -> Result<()> {
    check_len("dropout", "out", out.len(), x.len())?;
    let threshold = (f64::from(p) * 4_294_967_296.0) as u64;
    let keep = 1.0 / (1.0 - p);
    dev.team().for_chunks_mut(out, PIECE, &|i, o| {
        for (j, o) in o.iter_mut().enumerate() {
            let e = i * PIECE + j;
            *o = if u64::from(bits(e as u64)) < threshold { 0.0 } else { x[e] * keep };
        }
    });
    Ok(())
}
