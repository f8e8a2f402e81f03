//! Embedding table look-up and its gradient.

use crate::elementwise::{add_scaled_piece, widen_piece};
use crate::error::{bad_shape, check_len};
use crate::par::{Parts, piece, rows_per_task};
use crate::profile::per_element;
use crate::{Device, Mat, Result};

fn check_ids(kernel: &'static str, ids: &[u32], vocab: usize) -> Result<()> {
    match ids.iter().position(|&i| i as usize >= vocab) {
        Some(at) => bad_shape(kernel, format!("token id {} at position {at}, the table has {vocab} rows", ids[at])),
        None => Ok(()),
    }
}

/// `out` [T,H] = rows `ids` [T] of `table` [V,H].
///
/// # Errors
/// If a length does not fit or an id is not below V.
pub fn gather(dev: &Device, table: Mat<'_>, hidden: usize, ids: &[u32], out: &mut [f32]) -> Result<()> {
    let vocab = table.len() / hidden.max(1);
    check_len("embedding", "table", table.len(), vocab * hidden)?;
    check_len("embedding", "out", out.len(), ids.len() * hidden)?;
    check_ids("embedding", ids, vocab)?;
    let stored = if matches!(table, Mat::F32(_)) { 4 } else { 2 };
    let _span = dev.profiler().kernel("embedding gather", || per_element(out.len(), 0, 4 + stored));
    let rows = rows_per_task(hidden);
    dev.team().for_chunks_mut(out, rows * hidden, &|i, out| {
        for (j, out) in out.chunks_exact_mut(hidden).enumerate() {
            let at = ids[i * rows + j] as usize * hidden;
            match table.slice(at..at + hidden) {
                Mat::F32(row) => out.copy_from_slice(row),
                Mat::Bf16(row) => widen_piece(dev.isa(), row, out),
            }
        }
    });
    Ok(())
}

/// `dtable` [V,H] += rows of `dout` [T,H] at `ids`, tokens in order (the same bits for any number of threads).
///
/// # Errors
/// If a length does not fit or an id is not below V.
pub fn scatter_add(dev: &Device, dtable: &mut [f32], hidden: usize, ids: &[u32], dout: &[f32]) -> Result<()> {
    let vocab = dtable.len() / hidden.max(1);
    check_len("embedding backward", "dtable", dtable.len(), vocab * hidden)?;
    check_len("embedding backward", "dout", dout.len(), ids.len() * hidden)?;
    check_ids("embedding backward", ids, vocab)?;
    let _span = dev.profiler().kernel("embedding scatter_add", || per_element(dout.len(), 1, 12));
    let base = Parts::new(dtable);
    dev.team().run(hidden.div_ceil(COLUMNS), &|i, _| {
        let columns = piece(i, COLUMNS, hidden);
        for (row, &id) in dout.chunks_exact(hidden).zip(ids) {
            let at = id as usize * hidden;
            // SAFETY: tasks handle different columns.
            let sum = unsafe { base.get(at + columns.start..at + columns.end) };
            add_scaled_piece(dev.isa(), sum, &row[columns.clone()], 1.0);
        }
    });
    Ok(())
}

/// Columns of the table that a task adds to: each task goes through all tokens in order, so equal ids meet in one task.
const COLUMNS: usize = 128;
