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
    gather_slice(dev, table, hidden, Rows::all(table.len() / hidden.max(1)), ids, out)
}

/// Where the rows of a table lie in a greater one, whose other rows are on other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Id of the first row that is here.
    pub first: usize,
    /// Rows of the greater table V: ids are below it.
    pub vocab: usize,
}

impl Rows {
    /// All of a table of `vocab` rows.
    pub fn all(vocab: usize) -> Rows {
        Rows { first: 0, vocab }
    }

    /// The row of `id` among the `here` that are here.
    fn of(self, id: u32, here: usize) -> Option<usize> {
        (id as usize).checked_sub(self.first).filter(|&row| row < here)
    }
}

/// As [`gather`] from a slice of the table: an id whose row is elsewhere gives zeros.
///
/// # Errors
/// As [`gather`].
pub fn gather_slice(
    dev: &Device,
    table: Mat<'_>,
    hidden: usize,
    slice: Rows,
    ids: &[u32],
    out: &mut [f32],
) -> Result<()> {
    let here = table.len() / hidden.max(1);
    check_len("embedding", "table", table.len(), here * hidden)?;
    check_len("embedding", "out", out.len(), ids.len() * hidden)?;
    check_ids("embedding", ids, slice.vocab)?;
    let stored = if matches!(table, Mat::F32(_)) { 4 } else { 2 };
    let _span = dev.profiler().kernel("embedding gather", || per_element(out.len(), 0, 4 + stored));
    let rows = rows_per_task(hidden);
    dev.team().for_chunks_mut(out, rows * hidden, &|i, out| {
        for (j, out) in out.chunks_exact_mut(hidden).enumerate() {
            let Some(row) = slice.of(ids[i * rows + j], here) else {
                out.fill(0.0);
                continue;
            };
            match table.slice(row * hidden..(row + 1) * hidden) {
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
    let slice = Rows::all(dtable.len() / hidden.max(1));
    scatter_add_slice(dev, dtable, hidden, slice, ids, dout)
}

/// As [`scatter_add`] into a slice of the table: rows of ids that are elsewhere are passed over.
///
/// # Errors
/// As [`scatter_add`].
pub fn scatter_add_slice(
    dev: &Device,
    dtable: &mut [f32],
    hidden: usize,
    slice: Rows,
    ids: &[u32],
    dout: &[f32],
) -> Result<()> {
    let here = dtable.len() / hidden.max(1);
    check_len("embedding backward", "dtable", dtable.len(), here * hidden)?;
    check_len("embedding backward", "dout", dout.len(), ids.len() * hidden)?;
    check_ids("embedding backward", ids, slice.vocab)?;
    let _span = dev.profiler().kernel("embedding scatter_add", || per_element(dout.len(), 1, 12));
    let base = Parts::new(dtable);
    dev.team().run(hidden.div_ceil(COLUMNS), &|i, _| {
        let columns = piece(i, COLUMNS, hidden);
        for (row, &id) in dout.chunks_exact(hidden).zip(ids) {
            let Some(at) = slice.of(id, here).map(|row| row * hidden) else { continue };
            // SAFETY: tasks handle different columns.
            let sum = unsafe { base.get(at + columns.start..at + columns.end) };
            add_scaled_piece(dev.isa(), sum, &row[columns.clone()], 1.0);
        }
    });
    Ok(())
}

/// Columns of the table that a task adds to: each task goes through all tokens in order, so equal ids meet in one task.
const COLUMNS: usize = 128;
