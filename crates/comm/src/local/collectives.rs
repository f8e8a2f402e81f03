//! The collectives over lent slices. Each rank does an equal part of the work, and no element is moved more than once:
//!
//! * all_gather: a rank reads its shard once and writes it to everybody.
//! * all_reduce: a rank reduces its slice of everybody's buffer and writes the result to everybody. The two phases of the
//!   textbook, reduce_scatter and all_gather, become one pass, since the reducer can write where the result is wanted.
//! * reduce_scatter, all_to_all, broadcast: a rank reads what is meant for it.

use std::sync::Arc;

use phalanx_kernels::stream;
use phalanx_tensor::Tensor;

use super::LocalBackend;
use super::group::Round;
use super::shared::Lent;
use crate::backend::{Backend, ExchangePart, GatherPart, InFlight, ReducePart, ScatterPart, Spent, range_of, slice_of};
use crate::call::Call;
use crate::element::ReduceOp;
use crate::error::{CommError, Result};
use crate::reduce;

/// A shard is read in pieces that stay in the second-level cache while they are written to one peer after another.
const PIECE: usize = 128 << 10;

impl Backend for LocalBackend {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn members(&self) -> &[usize] {
        &self.group.members
    }

    fn fail(&self, failure: CommError) -> CommError {
        self.group.world.fail(failure)
    }

    fn failure(&self) -> Option<CommError> {
        self.group.world.failure()
    }

    fn subgroup(&self, name: &Arc<str>, members: &[usize]) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(self.subgroup_of(name, members)))
    }

    fn all_gather(&self, call: Call, parts: &mut [GatherPart<'_>]) -> Result<Spent> {
        let lent = parts.iter_mut().map(|p| Lent::write(p.full)).collect();
        let n = self.size();
        self.group.meet(self.rank, &Arc::new(call), lent, |round| {
            for (i, part) in parts.iter().enumerate() {
                let range = range_of(part.counts, part.dtype, self.rank);
                let large = part.counts.iter().sum::<usize>() * part.dtype.size() >= stream::LARGE;
                for (j, source) in part.shard.chunks(PIECE).enumerate() {
                    let at = range.start + j * PIECE;
                    for q in 0..n {
                        // SAFETY: only this rank writes its own range of any rank's full buffer, and nobody reads it.
                        let target = unsafe { round.offers[q].lent[i].slice_mut(at..at + source.len()) };
                        if large { stream::copy_past_cache(target, source) } else { target.copy_from_slice(source) }
                    }
                }
            }
        })
    }

    fn reduce_scatter(&self, call: Call, op: ReduceOp, parts: &mut [ScatterPart<'_>]) -> Result<Spent> {
        let lent = parts.iter().map(|p| Lent::read(p.full)).collect();
        self.group.meet(self.rank, &Arc::new(call), lent, |round| {
            for (i, part) in parts.iter_mut().enumerate() {
                let range = range_of(part.counts, part.dtype, self.rank);
                // SAFETY: nobody writes to a full buffer.
                let ranks: Vec<&[u8]> = views(round, |o| unsafe { o[i].slice(range.clone()) });
                reduce::reduce_to(part.dtype, op, &ranks, part.shard);
            }
        })
    }

    fn all_reduce(&self, call: Call, op: ReduceOp, parts: &mut [ReducePart<'_>]) -> Result<Spent> {
        let n = self.size();
        let slices: Vec<_> = parts.iter().map(|p| (p.dtype, p.data.len() / p.dtype.size())).collect();
        let lent = parts.iter_mut().map(|p| Lent::write(p.data)).collect();
        self.group.meet(self.rank, &Arc::new(call), lent, |round| {
            for (i, &(dtype, len)) in slices.iter().enumerate() {
                let range = slice_of(len, dtype, self.rank, n);
                // SAFETY: only this rank touches its slice of any rank's buffer; slices of ranks do not overlap.
                let mut ranks: Vec<&mut [u8]> = views(round, |o| unsafe { o[i].slice_mut(range.clone()) });
                reduce::reduce_in_place(dtype, op, &mut ranks);
            }
        })
    }

    fn all_to_all(&self, call: Call, part: ExchangePart<'_>) -> Result<Spent> {
        self.group.meet(self.rank, &Arc::new(call), vec![Lent::read(part.send)], |round| {
            let mut rest = part.recv;
            for (q, offer) in round.offers.iter().enumerate() {
                let range = range_of(&offer.call.sends, part.dtype, self.rank);
                let (target, after) = rest.split_at_mut(part.recv_counts[q] * part.dtype.size());
                rest = after;
                // SAFETY: nobody writes to a send buffer.
                stream::copy(target, unsafe { offer.lent[0].slice(range) });
            }
        })
    }

    fn broadcast(&self, call: Call, root: usize, data: &mut [u8]) -> Result<Spent> {
        let lent = if self.rank == root { Lent::read(data) } else { Lent::write(data) };
        self.group.meet(self.rank, &Arc::new(call), vec![lent], |round| {
            if self.rank != root {
                let all = 0..lent.len();
                // SAFETY: nobody writes to the root's buffer; only this rank touches its own, through this one slice.
                let (source, target) = unsafe {
                    (round.offers[root].lent[0].slice(all.clone()), round.offers[self.rank].lent[0].slice_mut(all))
                };
                stream::copy(target, source);
            }
        })
    }

    fn barrier(&self, call: Call) -> Result<Spent> {
        self.group.meet(self.rank, &Arc::new(call), vec![], |_| {})
    }

    fn send(&self, call: Call, to: usize, data: &[u8]) -> Result<Spent> {
        Ok(self.group.exchange(self.rank, Some((call, to, data)), None)?.0)
    }

    fn recv(&self, call: Call, from: usize, data: &mut [u8]) -> Result<Spent> {
        Ok(self.group.exchange(self.rank, None, Some((call, from, data)))?.1)
    }

    fn send_recv(&self, send: (Call, usize, &[u8]), recv: (Call, usize, &mut [u8])) -> Result<(Spent, Spent)> {
        self.group.exchange(self.rank, Some(send), Some(recv))
    }

    fn post_send(&self, call: Call, to: usize, tensor: Tensor) -> Result<Box<dyn InFlight>> {
        self.group.post_tensor(self.rank, call, to, tensor, true)
    }

    fn post_recv(&self, call: Call, from: usize, tensor: Tensor) -> Result<Box<dyn InFlight>> {
        self.group.post_tensor(self.rank, call, from, tensor, false)
    }
}

/// One view of each rank's offer, in the order of ranks.
fn views<T>(round: &Round, view: impl Fn(&[Lent]) -> T) -> Vec<T> {
    round.offers.iter().map(|o| view(&o.lent)).collect()
}
