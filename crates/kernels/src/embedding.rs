//! Embedding table look-up and its gradient.

use crate::error::{bad_shape, check_len};
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
    let _ = dev;
    for (i, &id) in ids.iter().enumerate() {
        for j in 0..hidden {
            out[i * hidden + j] = table.at(id as usize * hidden + j);
        }
    }
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
    let _ = dev;
    for (i, &id) in ids.iter().enumerate() {
        for j in 0..hidden {
            dtable[id as usize * hidden + j] += dout[i * hidden + j];
        }
    }
    Ok(())
}
