//! Blocks of columns out of rows and into rows: splitting heads into parts and joining them.

use crate::error::{bad_shape, check_len};
use crate::par::{Parts, rows_per_task};
use crate::profile::per_element;
use crate::{Device, Result};

fn fits(at: usize, n: usize, width: usize) -> Result<()> {
    if at.checked_add(n).is_none_or(|end| end > width) {
        return bad_shape("columns", format!("{n} columns from {at} on in rows of {width}"));
    }
    Ok(())
}

/// `out` [R,n] = columns `at..at + n` of `x` [R,width].
///
/// # Errors
/// If a length does not fit.
pub fn take(dev: &Device, x: &[f32], width: usize, at: usize, out: &mut [f32], n: usize) -> Result<()> {
    fits(at, n, width)?;
    let rows = x.len() / width.max(1);
    check_len("columns", "x", x.len(), rows * width)?;
    check_len("columns", "out", out.len(), rows * n)?;
    if n == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("columns take", || per_element(out.len(), 0, 8));
    let each = rows_per_task(n);
    dev.team().for_chunks_mut(out, each * n, &|i, out| {
        for (j, out) in out.chunks_exact_mut(n).enumerate() {
            let from = (i * each + j) * width + at;
            out.copy_from_slice(&x[from..from + n]);
        }
    });
    Ok(())
}

/// Columns `at..at + n` of `out` [R,width] = `x` [R/repeat,n], each row of it `repeat` times. The other columns are left alone.
///
/// # Errors
/// If a length does not fit.
pub fn put(dev: &Device, x: &[f32], n: usize, repeat: usize, out: &mut [f32], width: usize, at: usize) -> Result<()> {
    fits(at, n, width)?;
    let rows = out.len() / width.max(1);
    check_len("columns", "out", out.len(), rows * width)?;
    check_len("columns", "x times repeat", x.len().saturating_mul(repeat), rows * n)?;
    if n == 0 || width == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("columns put", || per_element(rows * n, 0, 8));
    let each = rows_per_task(n);
    let base = Parts::new(out);
    dev.team().run(rows.div_ceil(each), &|i, _| {
        for r in i * each..rows.min((i + 1) * each) {
            let from = r / repeat * n;
            // SAFETY: tasks handle different rows.
            let to = unsafe { base.get(r * width + at..r * width + at + n) };
            to.copy_from_slice(&x[from..from + n]);
        }
    });
    Ok(())
}

/// Backward of [`put`]: `out` [R/repeat,n] = columns `at..at + n` of `g` [R,width], each `repeat` rows added up in order.
///
/// # Errors
/// If a length does not fit.
pub fn sum(dev: &Device, g: &[f32], width: usize, at: usize, repeat: usize, out: &mut [f32], n: usize) -> Result<()> {
    fits(at, n, width)?;
    let rows = g.len() / width.max(1);
    check_len("columns", "g", g.len(), rows * width)?;
    check_len("columns", "out times repeat", out.len().saturating_mul(repeat), rows * n)?;
    if n == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel("columns sum", || per_element(rows * n, 1, 4));
    let each = rows_per_task(n * repeat);
    dev.team().for_chunks_mut(out, each * n, &|i, out| {
        for (j, out) in out.chunks_exact_mut(n).enumerate() {
            out.fill(0.0);
            for r in (i * each + j) * repeat..(i * each + j + 1) * repeat {
                let row = &g[r * width + at..r * width + at + n];
                out.iter_mut().zip(row).for_each(|(o, g)| *o += g);
            }
        }
    });
    Ok(())
}
