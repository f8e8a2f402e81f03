//! Token embedding.

use std::sync::Arc;

use phalanx_kernels::embedding::{self as kernel, Rows};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::Param;
use crate::{Function, Result, Tape};

/// ids [T] → rows of `table` [V, H] as f32 [T, H].
///
/// # Errors
/// If an id is not below V, or memory runs out.
pub fn embedding(rt: &Runtime, tape: Option<&mut Tape>, ids: &Arc<[u32]>, table: Param) -> Result<Tensor> {
    let rows = Rows::all(table.value()?.dim(0));
    embedding_slice(rt, tape, ids, table, rows)
}

/// As [`embedding`] from a slice of the rows of a table: ids whose row is elsewhere give zeros, so that the sum over all slices is what the whole
/// table gives (Shoeybi et al., arXiv 1909.08053, §3).
///
/// # Errors
/// As [`embedding`].
pub fn embedding_slice(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    ids: &Arc<[u32]>,
    table: Param,
    slice: Rows,
) -> Result<Tensor> {
    let rows = table.value()?;
    let h = rows.dim(1);
    let mut out = rt.empty(&[ids.len(), h], DType::F32, Category::Activations)?;
    kernel::gather_slice(rt.device(), rows.mat(), h, slice, ids, out.f32_mut()?)?;
    let Some(tape) = tape else { return Ok(out) };
    let trained = table.grad.is_some();
    let f = Embedding { ids: Arc::clone(ids), shape: [rows.dim(0), h], slice, table };
    Ok(tape.record(&[], trained, out, f, None))
}

struct Embedding {
    ids: Arc<[u32]>,
    /// Of the table.
    shape: [usize; 2],
    slice: Rows,
    table: Param,
}

impl Function for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if let Some(slot) = &self.table.grad {
            let g = grad.f32()?;
            let h = self.shape[1];
            slot.add(rt, &self.shape, |d| kernel::scatter_add_slice(rt.device(), d, h, self.slice, &self.ids, g))?;
        }
        Ok(vec![])
    }
}
