//! Rows for heads: each rank gives away all heads but its own, and gets its heads of all rows (DeepSpeed Ulysses, arXiv 2309.14509).

use phalanx_comm::Communicator;
use phalanx_nn::Result;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::failed;
use super::heads::Heads;
use super::order::Order;

/// The exchange among the ranks of a group.
pub(super) struct Exchange<'a> {
    pub group: &'a Communicator,
    /// The rows of its ranks.
    pub order: &'a Order,
}

impl Exchange<'_> {
    /// This rank's rows.
    fn own(&self) -> usize {
        self.order.rows[self.group.rank()]
    }

    /// [T, heads, D] each, T this rank's rows (more at the end are left out) → [rows of all ranks in the order of the micro-batch, own heads, D]
    /// each. One call for all.
    pub fn to_heads(&self, rt: &Runtime, parts: &[(&Tensor, &Heads)], dim: usize) -> Result<Vec<Tensor>> {
        let width: usize = parts.iter().map(|(_, h)| h.each() * dim).sum();
        let (own, ranks, total) = (self.own(), self.group.size(), self.order.total());
        let mut send = rt.empty(&[ranks * own, width], DType::F32, Category::Activations)?;
        let mut at = 0;
        for (tensor, heads) in parts {
            let (x, send) = (tensor.f32()?, send.f32_mut()?);
            for (rank, list) in heads.of.iter().enumerate() {
                for row in 0..own {
                    let to = (rank * own + row) * width + at;
                    let from = &x[row * heads.total * dim..(row + 1) * heads.total * dim];
                    copy_heads(from, &mut send[to..to + list.len() * dim], list, dim);
                }
            }
            at += heads.each() * dim;
        }
        let mut recv = rt.empty(&[total, width], DType::F32, Category::Activations)?;
        let counts: Vec<usize> = self.order.rows.iter().map(|rows| rows * width).collect();
        self.group.all_to_all_v(send.f32()?, &vec![own * width; ranks], recv.f32_mut()?, &counts).map_err(failed)?;
        drop(send);
        let (recv, mut at, mut out) = (recv.f32()?, 0, vec![]);
        for (_, heads) in parts {
            let part = heads.each() * dim;
            let mut tensor = rt.empty(&[total, heads.each(), dim], DType::F32, Category::Activations)?;
            let to = tensor.f32_mut()?;
            for (row, place) in self.order.places().enumerate() {
                to[place * part..(place + 1) * part].copy_from_slice(&recv[row * width + at..row * width + at + part]);
            }
            at += part;
            out.push(tensor);
        }
        Ok(out)
    }

    /// The way back, also for gradients: [rows of all ranks, own heads, D] each → [`rows`, heads, D] each, of this rank's rows; those after them are
    /// zero. What several ranks have of one head is summed, in the order of ranks. One call for all.
    pub fn to_rows(&self, rt: &Runtime, parts: &[(&Tensor, &Heads)], dim: usize, rows: usize) -> Result<Vec<Tensor>> {
        let width: usize = parts.iter().map(|(_, h)| h.each() * dim).sum();
        let (own, ranks, total) = (self.own(), self.group.size(), self.order.total());
        let mut send = rt.empty(&[total, width], DType::F32, Category::Activations)?;
        let mut at = 0;
        for (tensor, heads) in parts {
            let (x, send, part) = (tensor.f32()?, send.f32_mut()?, heads.each() * dim);
            for (row, place) in self.order.places().enumerate() {
                send[row * width + at..row * width + at + part].copy_from_slice(&x[place * part..(place + 1) * part]);
            }
            at += part;
        }
        let mut recv = rt.empty(&[ranks * own, width], DType::F32, Category::Activations)?;
        let counts: Vec<usize> = self.order.rows.iter().map(|rows| rows * width).collect();
        self.group.all_to_all_v(send.f32()?, &counts, recv.f32_mut()?, &vec![own * width; ranks]).map_err(failed)?;
        drop(send);
        let (recv, mut at, mut out) = (recv.f32()?, 0, vec![]);
        for (_, heads) in parts {
            let mut tensor = rt.zeros(&[rows, heads.total, dim], Category::Activations)?;
            let to = tensor.f32_mut()?;
            for (rank, list) in heads.of.iter().enumerate() {
                for row in 0..own {
                    let from = (rank * own + row) * width + at;
                    let to = &mut to[row * heads.total * dim..(row + 1) * heads.total * dim];
                    add_heads(&recv[from..from + list.len() * dim], to, list, dim);
                }
            }
            at += heads.each() * dim;
            out.push(tensor);
        }
        Ok(out)
    }
}

/// Some heads of a row, one after another.
fn copy_heads(row: &[f32], to: &mut [f32], heads: &[usize], dim: usize) {
    for (to, head) in to.chunks_exact_mut(dim).zip(heads) {
        to.copy_from_slice(&row[head * dim..(head + 1) * dim]);
    }
}

/// Adds values to some heads of a row.
fn add_heads(values: &[f32], row: &mut [f32], heads: &[usize], dim: usize) {
    for (values, head) in values.chunks_exact(dim).zip(heads) {
        row[head * dim..(head + 1) * dim].iter_mut().zip(values).for_each(|(to, v)| *to += v);
    }
}
