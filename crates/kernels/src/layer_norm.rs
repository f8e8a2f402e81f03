//! Layer norm: y = (x − mean) / √(var + ε) · w + b (Ba et al., arXiv 1607.06450).

use crate::error::check_len;
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
    let _ = dev;
    for i in 0..t {
        let row = &x[i * h..(i + 1) * h];
        let m = row.iter().map(|&v| f64::from(v)).sum::<f64>() / h as f64;
        let var = row.iter().map(|&v| (f64::from(v) - m).powi(2)).sum::<f64>() / h as f64;
        let r = 1.0 / (var + f64::from(eps)).sqrt();
        (mean[i], rstd[i]) = (m as f32, r as f32);
        for j in 0..h {
            y[i * h + j] =
                ((f64::from(row[j]) - m) * r * f64::from(w.at(j)) + b.map_or(0.0, |b| f64::from(b.at(j)))) as f32;
        }
    }
    Ok(())
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
    for (what, got) in [("x", x.len()), ("dy", dy.len()), ("dx", dx.len())] {
        check_len("layer_norm backward", what, got, t * h)?;
    }
    let _ = dev;
    let (mut aw, mut ab) = (vec![0f64; h], vec![0f64; h]);
    for i in 0..t {
        let (m, r) = (f64::from(mean[i]), f64::from(rstd[i]));
        let (mut s1, mut s2) = (0f64, 0f64);
        for j in 0..h {
            let g = f64::from(dy[i * h + j]) * f64::from(w.at(j));
            s1 += g;
            s2 += g * (f64::from(x[i * h + j]) - m) * r;
        }
        for j in 0..h {
            let xhat = (f64::from(x[i * h + j]) - m) * r;
            let g = f64::from(dy[i * h + j]);
            dx[i * h + j] = (r * (g * f64::from(w.at(j)) - s1 / h as f64 - xhat * s2 / h as f64)) as f32;
            aw[j] += g * xhat;
            ab[j] += g;
        }
    }
    for (out, acc) in [(dw, aw), (db, ab)] {
        if let Some(out) = out {
            check_len("layer_norm backward", "dw/db", out.len(), h)?;
            out.iter_mut().zip(acc).for_each(|(o, a)| *o += a as f32);
        }
    }
    Ok(())
}
