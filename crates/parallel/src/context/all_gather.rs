//! Keys and values of all ranks, gathered before the attention; their gradients, summed and scattered after it.
//!
//! As Llama 3 was trained (arXiv 2407.21783, 3.3.2): any mask is simple, and each rank holds K and V of the whole micro-batch.

use phalanx_comm::{Communicator, Gather, ReduceOp, Scatter};
use phalanx_nn::Result;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::failed;
use super::order::Order;

/// K and V [own rows, K, D] of all ranks, in the order of the micro-batch. Rows beyond a rank's own are left out.
pub(super) fn gather(rt: &Runtime, group: &Communicator, order: &Order, kv: [&Tensor; 2]) -> Result<[Tensor; 2]> {
    let shape = [order.total(), kv[0].dim(1), kv[0].dim(2)];
    let width = shape[1] * shape[2];
    let counts: Vec<usize> = order.rows.iter().map(|rows| rows * width).collect();
    let own = counts[group.rank()];
    let mut full =
        [rt.empty(&shape, DType::F32, Category::Activations)?, rt.empty(&shape, DType::F32, Category::Activations)?];
    {
        let [k, v] = &mut full;
        let mut items = [
            Gather { shard: &kv[0].f32()?[..own], counts: &counts, full: k.f32_mut()? },
            Gather { shard: &kv[1].f32()?[..own], counts: &counts, full: v.f32_mut()? },
        ];
        group.all_gather_many(&mut items).map_err(failed)?;
    }
    if order.is_same() {
        return Ok(full);
    }
    let sort = |by_rank: Tensor| -> Result<Tensor> {
        let mut sorted = rt.empty(&shape, DType::F32, Category::Activations)?;
        order.sort(by_rank.f32()?, sorted.f32_mut()?, width);
        Ok(sorted)
    };
    let [k, v] = full;
    Ok([sort(k)?, sort(v)?])
}

/// The gradients of this rank's K and V from what every rank has for those of all; `rows` of them, zero beyond its own.
pub(super) fn reduce_scatter(
    rt: &Runtime,
    group: &Communicator,
    order: &Order,
    full: [Tensor; 2],
    rows: usize,
) -> Result<[Tensor; 2]> {
    let (heads, dim) = (full[0].dim(1), full[0].dim(2));
    let width = heads * dim;
    let counts: Vec<usize> = order.rows.iter().map(|rows| rows * width).collect();
    let own = counts[group.rank()];
    let unsort = |sorted: Tensor| -> Result<Tensor> {
        if order.is_same() {
            return Ok(sorted);
        }
        let mut by_rank = rt.empty(sorted.shape(), DType::F32, Category::Activations)?;
        order.unsort(sorted.f32()?, by_rank.f32_mut()?, width);
        Ok(by_rank)
    };
    let [dk, dv] = full;
    let (dk, dv) = (unsort(dk)?, unsort(dv)?);
    let shape = [rows, heads, dim];
    let mut own_parts = [rt.zeros(&shape, Category::Activations)?, rt.zeros(&shape, Category::Activations)?];
    {
        let [k, v] = &mut own_parts;
        let mut items = [
            Scatter { full: dk.f32()?, counts: &counts, shard: &mut k.f32_mut()?[..own] },
            Scatter { full: dv.f32()?, counts: &counts, shard: &mut v.f32_mut()?[..own] },
        ];
        group.reduce_scatter_many(ReduceOp::Sum, &mut items).map_err(failed)?;
    }
    Ok(own_parts)
}
