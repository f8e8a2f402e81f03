//! Rows to the experts and back: each makes one pass over memory.

use crate::elementwise::add_piece;
use crate::error::{bad_shape, check_len};
use crate::moe::DROPPED;
use crate::par::{Parts, rows_per_task};
use crate::profile::per_element;
use crate::simd::simd_fn;
use crate::{Device, Result};

fn check_pairs(kernel: &'static str, pairs: &[u32], most: usize) -> Result<()> {
    match pairs.iter().find(|&&p| p as usize >= most) {
        Some(p) => bad_shape(kernel, format!("pair {p} of {most}")),
        None => Ok(()),
    }
}

/// Rows of the experts from rows of the tokens: `out` [R,H], row r of the token of pair `pairs[r]` of `x` [T,H].
///
/// # Errors
/// If a length does not fit or a pair is too large.
pub fn gather(dev: &Device, x: &[f32], width: usize, top_k: usize, pairs: &[u32], out: &mut [f32]) -> Result<()> {
    let tokens = x.len() / width.max(1);
    check_len("expert gather", "x", x.len(), tokens * width)?;
    check_len("expert gather", "out", out.len(), pairs.len() * width)?;
    check_pairs("expert gather", pairs, tokens * top_k)?;
    if width == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("expert gather", || per_element(out.len(), 0, 8));
    let rows = rows_per_task(width);
    dev.team().for_chunks_mut(out, rows * width, &|i, out| {
        for (out, &pair) in out.chunks_exact_mut(width).zip(&pairs[i * rows..]) {
            let token = pair as usize / top_k;
            out.copy_from_slice(&x[token * width..(token + 1) * width]);
        }
    });
    Ok(())
}

/// Rows of the tokens from rows of the experts: `out` [T,H] is the sum of the token's rows of `y` [R,H], in the order of its choices;
/// zeros where all were dropped. `places` [T·k].
///
/// # Errors
/// If a length does not fit or a place is too large.
pub fn sum(dev: &Device, y: &[f32], width: usize, top_k: usize, places: &[u32], out: &mut [f32]) -> Result<()> {
    let (rows, tokens) = (y.len() / width.max(1), places.len() / top_k.max(1));
    check_len("expert sum", "y", y.len(), rows * width)?;
    check_len("expert sum", "places", places.len(), tokens * top_k)?;
    check_len("expert sum", "out", out.len(), tokens * width)?;
    if let Some(p) = places.iter().find(|&&p| p != DROPPED && p as usize >= rows) {
        return bad_shape("expert sum", format!("row {p} of {rows}"));
    }
    if width == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("expert sum", || per_element(y.len() + out.len(), 1, 4));
    let each = rows_per_task(width * top_k);
    dev.team().for_chunks_mut(out, each * width, &|i, out| {
        for (j, out) in out.chunks_exact_mut(width).enumerate() {
            let t = i * each + j;
            let mut rows = places[t * top_k..(t + 1) * top_k]
                .iter()
                .filter(|&&p| p != DROPPED)
                .map(|&p| &y[p as usize * width..(p as usize + 1) * width]);
            match (rows.next(), rows.next()) {
                (None, _) => out.fill(0.0),
                (Some(one), None) => out.copy_from_slice(one),
                (Some(one), Some(two)) => add_piece(dev.isa(), one, two, out),
            }
            rows.for_each(|row| add_row(dev.isa(), out, row));
        }
    });
    Ok(())
}

simd_fn! {
    fn add_row(s, sum: &mut [f32], row: &[f32]) {
        let mut i = 0;
        while i < sum.len() {
            let v = s.add(s.load(sum, i), s.load(row, i));
            s.store(sum, i, v);
            i += S::LANES;
        }
    }
}

/// Each row times the weight of its pair: `out` [R,I] = `weights[pairs[r]]` · `x` [R,I].
///
/// # Errors
/// If a length does not fit or a pair is too large.
pub fn weigh(dev: &Device, x: &[f32], width: usize, weights: &[f32], pairs: &[u32], out: &mut [f32]) -> Result<()> {
    check_len("weigh", "x", x.len(), pairs.len() * width)?;
    check_len("weigh", "out", out.len(), x.len())?;
    check_pairs("weigh", pairs, weights.len())?;
    if width == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("weigh", || per_element(x.len(), 1, 8));
    let rows = rows_per_task(width);
    dev.team().for_chunks_mut(out, rows * width, &|i, out| {
        for (j, out) in out.chunks_exact_mut(width).enumerate() {
            let r = i * rows + j;
            scale_row(dev.isa(), &x[r * width..(r + 1) * width], weights[pairs[r] as usize], out);
        }
    });
    Ok(())
}

simd_fn! {
    fn scale_row(s, x: &[f32], factor: f32, out: &mut [f32]) {
        let factor = s.splat(factor);
        let mut i = 0;
        while i < out.len() {
            s.store(out, i, s.mul(s.load(x, i), factor));
            i += S::LANES;
        }
    }
}

/// Backward of [`weigh`]: overwrites `dx` [R,I] and `dweights` (as long as `weights`; 0 for pairs that were dropped).
///
/// # Errors
/// If a length does not fit or a pair is too large.
pub fn weigh_backward(
    dev: &Device,
    x: &[f32],
    width: usize,
    weights: &[f32],
    pairs: &[u32],
    dout: &[f32],
    dx: &mut [f32],
    dweights: &mut [f32],
) -> Result<()> {
    check_len("weigh backward", "x", x.len(), pairs.len() * width)?;
    check_len("weigh backward", "dout", dout.len(), x.len())?;
    check_len("weigh backward", "dx", dx.len(), x.len())?;
    check_len("weigh backward", "dweights", dweights.len(), weights.len())?;
    check_pairs("weigh backward", pairs, weights.len())?;
    dweights.fill(0.0);
    if width == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("weigh backward", || per_element(x.len(), 3, 12));
    let (rows, dweights) = (rows_per_task(width), Parts::new(dweights));
    dev.team().for_chunks_mut(dx, rows * width, &|i, dx| {
        for (j, dx) in dx.chunks_exact_mut(width).enumerate() {
            let r = i * rows + j;
            let (pair, row) = (pairs[r] as usize, r * width..(r + 1) * width);
            let dw = scale_and_dot(dev.isa(), &x[row.clone()], weights[pair], &dout[row], dx);
            // SAFETY: a pair has one row at most, so no two tasks write the same weight.
            let to = unsafe { dweights.get(pair..pair + 1) };
            to[0] = dw;
        }
    });
    Ok(())
}

simd_fn! {
    /// dx = factor·dout; gives x·dout.
    fn scale_and_dot(s, x: &[f32], factor: f32, dout: &[f32], dx: &mut [f32]) -> f32 {
        let factor = s.splat(factor);
        let mut dot = s.splat(0.0);
        let mut i = 0;
        while i < dx.len() {
            let g = s.load(dout, i);
            dot = s.fma(s.load(x, i), g, dot);
            s.store(dx, i, s.mul(g, factor));
            i += S::LANES;
        }
        s.sum(dot)
    }
}
