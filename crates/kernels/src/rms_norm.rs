//! Root-mean-square norm: y = x / √(mean(x²) + ε) · w (Zhang & Sennrich, arXiv 1910.07467).

use crate::error::check_len;
use crate::par::{Parts, piece, rows_per_sum, rows_per_task};
use crate::profile::per_element;
use crate::simd::math::sum_over;
use crate::simd::simd_fn;
use crate::{Device, Mat, Result};

/// Forward. `x` [T,H], `w` [H] → `y` [T,H], `rstd` [T] (1/√(mean + ε), what backward needs).
///
/// # Errors
/// If a length does not fit.
pub fn forward(dev: &Device, x: &[f32], w: Mat<'_>, eps: f32, y: &mut [f32], rstd: &mut [f32]) -> Result<()> {
    let (t, h) = (rstd.len(), w.len());
    check_len("rms_norm", "x", x.len(), t * h)?;
    check_len("rms_norm", "y", y.len(), t * h)?;
    let _span = dev.profiler().kernel("rms_norm forward", || per_element(t * h, 4, 8));
    let rows = rows_per_task(h);
    let y = Parts::new(y);
    dev.team().for_chunks_mut(rstd, rows, &|i, rstd| {
        let r = i * rows * h..(i * rows + rstd.len()) * h;
        // SAFETY: tasks handle different rows.
        forward_rows(dev.isa(), &x[r.clone()], w, eps, unsafe { y.get(r) }, rstd);
    });
    Ok(())
}

/// Residual add and norm in one pass: `sum` = `x` + `add`, y = norm(`sum`); the same bits as [`add`](crate::elementwise::add)
/// followed by [`forward`]. `x`, `add`, `sum`, `y` [T,H], `w` [H], `rstd` [T].
///
/// # Errors
/// If a length does not fit.
pub fn forward_add(
    dev: &Device,
    x: &[f32],
    add: &[f32],
    w: Mat<'_>,
    eps: f32,
    sum: &mut [f32],
    y: &mut [f32],
    rstd: &mut [f32],
) -> Result<()> {
    let (t, h) = (rstd.len(), w.len());
    for (what, got) in [("x", x.len()), ("add", add.len()), ("sum", sum.len()), ("y", y.len())] {
        check_len("rms_norm with add", what, got, t * h)?;
    }
    let _span = dev.profiler().kernel("rms_norm forward_add", || per_element(t * h, 5, 16));
    let rows = rows_per_task(h);
    let (sum, y) = (Parts::new(sum), Parts::new(y));
    dev.team().for_chunks_mut(rstd, rows, &|i, rstd| {
        let r = i * rows * h..(i * rows + rstd.len()) * h;
        // SAFETY: tasks handle different rows.
        let (sum, y) = unsafe { (sum.get(r.clone()), y.get(r.clone())) };
        for (j, rstd) in rstd.chunks_mut(1).enumerate() {
            // Row by row, so that the sum is still in the nearest cache when the norm reads it.
            let (row, at) = (j * h..(j + 1) * h, r.start + j * h..r.start + (j + 1) * h);
            crate::elementwise::add_piece(dev.isa(), &x[at.clone()], &add[at], &mut sum[row.clone()]);
            forward_rows(dev.isa(), &sum[row.clone()], w, eps, &mut y[row], rstd);
        }
    });
    Ok(())
}

simd_fn! {
    fn forward_rows(s, x: &[f32], w: Mat<'_>, eps: f32, y: &mut [f32], rstd: &mut [f32]) {
        let h = w.len();
        for (i, rstd) in rstd.iter_mut().enumerate() {
            let (x, y) = (&x[i * h..(i + 1) * h], &mut y[i * h..(i + 1) * h]);
            let sum = sum_over(s, h, #[inline(always)] |j, sum| {
                let v = s.load(x, j);
                s.fma(v, v, sum)
            });
            *rstd = 1.0 / (sum / h as f32 + eps).sqrt();
            let r = s.splat(*rstd);
            let mut j = 0;
            while j < h {
                s.store(y, j, s.mul(s.mul(s.load(x, j), r), s.load_mat(w, j)));
                j += S::LANES;
            }
        }
    }
}

/// Backward. `dx` [T,H] is overwritten; `dw` [H], if asked for, is added to (zero it first). Sums over T are split at fixed
/// row counts, so any number of threads gives the same bits.
///
/// # Errors
/// If a length does not fit.
pub fn backward(
    dev: &Device,
    x: &[f32],
    w: Mat<'_>,
    rstd: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    dw: Option<&mut [f32]>,
) -> Result<()> {
    let (t, h) = (rstd.len(), w.len());
    for (what, got) in [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())] {
        check_len("rms_norm backward", what, got, t * h)?;
    }
    if let Some(dw) = dw.as_deref() {
        check_len("rms_norm backward", "dw", dw.len(), h)?;
    }
    let _span = dev.profiler().kernel("rms_norm backward", || per_element(t * h, 10, 12));
    // One partial sum of dw a piece of rows; at most 32 of them.
    let rows = rows_per_sum(t);
    let mut space = dev.scratch().sums().take(if dw.is_some() { t.div_ceil(rows) * h } else { 0 })?;
    let partial = space.as_mut_slice();
    partial.fill(0.0);
    {
        let (dx, partial) = (Parts::new(dx), Parts::new(partial));
        dev.team().run(t.div_ceil(rows), &|i, _| {
            let p = piece(i, rows, t);
            let r = p.start * h..p.end * h;
            let sums = if dw.is_some() { i * h..(i + 1) * h } else { 0..0 };
            // SAFETY: tasks handle different rows and different partial sums.
            let (dx, sums) = unsafe { (dx.get(r.clone()), partial.get(sums)) };
            backward_rows(dev.isa(), &x[r.clone()], w, &rstd[p], &dy[r], dx, sums);
        });
    }
    if let Some(dw) = dw {
        for p in partial.chunks_exact(h.max(1)) {
            crate::elementwise::add_scaled_piece(dev.isa(), dw, p, 1.0);
        }
    }
    Ok(())
}

simd_fn! {
    /// `dw` is empty where nobody asks for it.
    fn backward_rows(s, x: &[f32], w: Mat<'_>, rstd: &[f32], dy: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        let h = w.len();
        for (i, &rstd) in rstd.iter().enumerate() {
            let row = i * h..(i + 1) * h;
            let (x, dy, dx) = (&x[row.clone()], &dy[row.clone()], &mut dx[row]);
            let dot = sum_over(s, h, #[inline(always)] |j, sum| {
                s.fma(s.mul(s.load(dy, j), s.load_mat(w, j)), s.load(x, j), sum)
            });
            let (r, c) = (s.splat(rstd), s.splat(dot / h as f32 * rstd * rstd * rstd));
            let mut j = 0;
            while j < h {
                let (xv, g) = (s.load(x, j), s.load(dy, j));
                let gr = s.mul(g, r);
                s.store(dx, j, s.fnma(xv, c, s.mul(gr, s.load_mat(w, j))));
                if !dw.is_empty() {
                    s.store(dw, j, s.fma(gr, xv, s.load(dw, j)));
                }
                j += S::LANES;
            }
        }
    }
}
