//! Root-mean-square norm: y = x / √(mean(x²) + ε) · w (Zhang & Sennrich, arXiv 1910.07467).

use crate::error::check_len;
use crate::{Device, Mat, Result};

/// Forward. `x` [T,H], `w` [H] → `y` [T,H], `rstd` [T] (1/√(mean + ε), what backward needs).
///
/// # Errors
/// If a length does not fit.
pub fn forward(dev: &Device, x: &[f32], w: Mat<'_>, eps: f32, y: &mut [f32], rstd: &mut [f32]) -> Result<()> {
    let (t, h) = (rstd.len(), w.len());
    check_len("rms_norm", "x", x.len(), t * h)?;
    check_len("rms_norm", "y", y.len(), t * h)?;
    let _ = dev;
    for i in 0..t {
        let row = &x[i * h..(i + 1) * h];
        let mean = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / h as f64;
        let r = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
        rstd[i] = r;
        for j in 0..h {
            y[i * h + j] = row[j] * r * w.at(j);
        }
    }
    Ok(())
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
    let _ = dev;
    let mut acc = vec![0f64; h];
    for i in 0..t {
        let r = f64::from(rstd[i]);
        let mut dot = 0f64;
        for j in 0..h {
            dot += f64::from(dy[i * h + j]) * f64::from(w.at(j)) * f64::from(x[i * h + j]);
        }
        for j in 0..h {
            let (xv, g) = (f64::from(x[i * h + j]), f64::from(dy[i * h + j]));
            dx[i * h + j] = (r * (g * f64::from(w.at(j)) - xv * r * r * dot / h as f64)) as f32;
            acc[j] += g * xv * r;
        }
    }
    if let Some(dw) = dw {
        check_len("rms_norm backward", "dw", dw.len(), h)?;
        for j in 0..h {
            dw[j] += acc[j] as f32;
        }
    }
    Ok(())
}
