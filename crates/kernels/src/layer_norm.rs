//! Layer norm: y = (x − mean) / √(var + ε) · w + b (Ba et al., arXiv 1607.06450).

use crate::elementwise::add_scaled_piece;
use crate::error::check_len;
use crate::par::{Parts, piece, rows_per_sum, rows_per_task};
use crate::profile::per_element;
use crate::simd::math::sum_over;
use crate::simd::simd_fn;
use crate::{Device, Mat, Result};

/// Forward. `x` [T,H], `w` [H], `b` [H] or none → `y` [T,H], `mean` [T], `rstd` [T].
///
/// # Errors
/// If a length does not fit.
pub fn forward(
    dev: &Device,
    x: &[f32],
    w: Mat<'_>,
    b: Option<Mat<'_>>,
    eps: f32,
    y: &mut [f32],
    mean: &mut [f32],
    rstd: &mut [f32],
) -> Result<()> {
    let (t, h) = (rstd.len(), w.len());
    check_len("layer_norm", "x", x.len(), t * h)?;
    check_len("layer_norm", "y", y.len(), t * h)?;
    check_len("layer_norm", "mean", mean.len(), t)?;
    if let Some(b) = b {
        check_len("layer_norm", "b", b.len(), h)?;
    }
    let _span = dev.profiler().kernel("layer_norm forward", || per_element(t * h, 8, 8));
    let rows = rows_per_task(h);
    let (y, mean) = (Parts::new(y), Parts::new(mean));
    dev.team().for_chunks_mut(rstd, rows, &|i, rstd| {
        let p = i * rows..i * rows + rstd.len();
        let r = p.start * h..p.end * h;
        // SAFETY: tasks handle different rows.
        let (y, mean) = unsafe { (y.get(r.clone()), mean.get(p)) };
        forward_rows(dev.isa(), &x[r], w, b, eps, y, mean, rstd);
    });
    Ok(())
}

simd_fn! {
    fn forward_rows(
        s,
        x: &[f32],
        w: Mat<'_>,
        b: Option<Mat<'_>>,
        eps: f32,
        y: &mut [f32],
        mean: &mut [f32],
        rstd: &mut [f32],
    ) {
        let h = w.len();
        for (i, (mean, rstd)) in mean.iter_mut().zip(rstd).enumerate() {
            let (x, y) = (&x[i * h..(i + 1) * h], &mut y[i * h..(i + 1) * h]);
            let sum = sum_over(s, h, #[inline(always)] |j, sum| s.add(sum, s.load(x, j)));
            *mean = sum / h as f32;
            let m = s.splat(*mean);
            // Past the end of the row stands the mean, which differs from itself by nothing.
            let squares = sum_over(s, h, #[inline(always)] |j, sum| {
                let v = s.sub(s.load_or(x, j, *mean), m);
                s.fma(v, v, sum)
            });
            *rstd = 1.0 / (squares / h as f32 + eps).sqrt();
            let r = s.splat(*rstd);
            let mut j = 0;
            while j < h {
                let v = s.mul(s.mul(s.sub(s.load(x, j), m), r), s.load_mat(w, j));
                s.store(y, j, match b {
                    Some(b) => s.add(v, s.load_mat(b, j)),
                    None => v,
                });
                j += S::LANES;
            }
        }
    }
}

/// Backward. `dx` is overwritten; `dw` and `db`, if asked for, are added to.
///
/// # Errors
/// If a length does not fit.
pub fn backward(
    dev: &Device,
    x: &[f32],
    w: Mat<'_>,
    mean: &[f32],
    rstd: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    dw: Option<&mut [f32]>,
    db: Option<&mut [f32]>,
) -> Result<()> {
    let (t, h) = (rstd.len(), w.len());
    check_len("layer_norm backward", "mean", mean.len(), t)?;
    for (what, got) in [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())] {
        check_len("layer_norm backward", what, got, t * h)?;
    }
    for (what, d) in [("dw", dw.as_deref()), ("db", db.as_deref())] {
        if let Some(d) = d {
            check_len("layer_norm backward", what, d.len(), h)?;
        }
    }
    let _span = dev.profiler().kernel("layer_norm backward", || per_element(t * h, 15, 12));
    // One partial sum of dw and of db a piece of rows; at most 32 of them.
    let (rows, wanted) = (rows_per_sum(t), dw.is_some() || db.is_some());
    let mut space = dev.scratch().sums().take(if wanted { t.div_ceil(rows) * 2 * h } else { 0 })?;
    let partial = space.as_mut_slice();
    partial.fill(0.0);
    {
        let (dx, partial) = (Parts::new(dx), Parts::new(partial));
        dev.team().run(t.div_ceil(rows), &|i, _| {
            let p = piece(i, rows, t);
            let r = p.start * h..p.end * h;
            let sums = if wanted { i * 2 * h..(i + 1) * 2 * h } else { 0..0 };
            // SAFETY: tasks handle different rows and different partial sums.
            let (dx, sums) = unsafe { (dx.get(r.clone()), partial.get(sums)) };
            let (dw, db) = sums.split_at_mut(sums.len() / 2);
            backward_rows(dev.isa(), &x[r.clone()], w, &mean[p.clone()], &rstd[p], &dy[r], dx, dw, db);
        });
    }
    for (out, half) in [(dw, 0), (db, 1)] {
        if let Some(out) = out {
            for p in partial.chunks_exact(h.max(1)).skip(half).step_by(2) {
                add_scaled_piece(dev.isa(), out, p, 1.0);
            }
        }
    }
    Ok(())
}

simd_fn! {
    /// `dw` and `db` are empty where nobody asks for them.
    fn backward_rows(
        s,
        x: &[f32],
        w: Mat<'_>,
        mean: &[f32],
        rstd: &[f32],
        dy: &[f32],
        dx: &mut [f32],
        dw: &mut [f32],
        db: &mut [f32],
    ) {
        let h = w.len();
        for (i, (&mean, &rstd)) in mean.iter().zip(rstd).enumerate() {
            let row = i * h..(i + 1) * h;
            let (x, dy, dx) = (&x[row.clone()], &dy[row.clone()], &mut dx[row]);
            let (m, r) = (s.splat(mean), s.splat(rstd));
            let s1 = sum_over(s, h, #[inline(always)] |j, sum| s.fma(s.load(dy, j), s.load_mat(w, j), sum));
            let s2 = sum_over(s, h, #[inline(always)] |j, sum| {
                s.fma(s.mul(s.load(dy, j), s.load_mat(w, j)), s.sub(s.load(x, j), m), sum)
            });
            let (s1, s2) = (s.splat(s1 / h as f32), s.splat(s2 * rstd / h as f32));
            let mut j = 0;
            while j < h {
                let g = s.load(dy, j);
                let xhat = s.mul(s.sub(s.load(x, j), m), r);
                let v = s.fnma(xhat, s2, s.sub(s.mul(g, s.load_mat(w, j)), s1));
                s.store(dx, j, s.mul(r, v));
                if !dw.is_empty() {
                    s.store(dw, j, s.fma(g, xhat, s.load(dw, j)));
                    s.store(db, j, s.add(s.load(db, j), g));
                }
                j += S::LANES;
            }
        }
    }
}
