//! Calls as bytes, before they reach a back end: arguments are checked, descriptors made, groups of one served, traffic booked.

use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_tensor::Tensor;

use crate::backend::{Backend, ExchangePart, GatherPart, InFlight, ReducePart, ScatterPart, Spent, slice_of};
use crate::call::{Call, Kind};
use crate::element::{ElementType, ReduceOp};
use crate::error::{CommError, Result};
use crate::traffic::Counters;

/// Where a call stands, and whether somebody waits for it.
#[derive(Clone, Copy)]
pub(crate) struct At {
    pub(crate) site: &'static Location<'static>,
    pub(crate) eager: bool,
}

impl At {
    /// The caller's line, for a call that the caller waits for.
    #[track_caller]
    pub(crate) fn here() -> At {
        At { site: Location::caller(), eager: true }
    }

    /// The caller's line, for a call that runs behind the caller's back.
    #[track_caller]
    pub(crate) fn behind() -> At {
        At { site: Location::caller(), eager: false }
    }
}

/// One rank's calls in one group.
pub(crate) struct Engine {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) name: Arc<str>,
    /// Collectives go one at a time; the number of those before.
    turn: Mutex<u64>,
    messages: AtomicU64,
    pub(crate) counters: Counters,
}

/// The element type that all parts have; `None` if they have several.
fn common(types: impl Iterator<Item = ElementType> + Clone) -> Option<ElementType> {
    let first = types.clone().next()?;
    types.clone().all(|t| t == first).then_some(first)
}

/// Bytes of `counts` elements, if an address space can hold them.
fn bytes_of(counts: &[usize], dtype: ElementType) -> Option<usize> {
    counts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n))?.checked_mul(dtype.size())
}

impl Engine {
    pub(crate) fn new(backend: Arc<dyn Backend>, name: Arc<str>) -> Engine {
        Engine { backend, name, turn: Mutex::new(0), messages: AtomicU64::new(0), counters: Counters::default() }
    }

    pub(crate) fn rank(&self) -> usize {
        self.backend.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.backend.size()
    }

    pub(crate) fn world_rank(&self) -> usize {
        self.backend.members()[self.rank()]
    }

    /// Waits for this rank's turn in the group and numbers the call.
    fn turn(&self, call: &mut Call) -> MutexGuard<'_, u64> {
        let mut turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        call.sequence = *turn;
        *turn += 1;
        turn
    }

    /// An argument that does not fit fails the world: this rank does not come to a call that the others wait in.
    pub(crate) fn argument(&self, call: &Call, what: impl Into<String>, mend: impl Into<String>) -> CommError {
        let error = CommError::Argument {
            rank: self.world_rank(),
            group: self.name.to_string(),
            call: call.to_string(),
            what: what.into(),
            mend: mend.into(),
        };
        self.backend.fail(error.clone());
        error
    }

    /// In a group of one there is nobody to meet, but a failed world is failed there too.
    fn alone(&self, call: &Call) -> Result<bool> {
        if self.size() > 1 {
            return Ok(false);
        }
        match self.backend.failure() {
            None => Ok(true),
            Some(cause) => Err(CommError::Interrupted {
                rank: self.world_rank(),
                group: self.name.to_string(),
                call: call.to_string(),
                cause: Box::new(cause),
            }),
        }
    }

    /// The checks that all_gather and reduce_scatter share: `counts` has a number for each rank, and both buffers fit it.
    fn check_shards(
        &self,
        call: &Call,
        item: usize,
        counts: &[usize],
        dtype: ElementType,
        shard: usize,
        full: usize,
    ) -> Result<()> {
        let (n, rank, size) = (self.size(), self.rank(), dtype.size());
        if counts.len() != n {
            let what = format!("item {item} has {} counts for {n} ranks", counts.len());
            return Err(self.argument(call, what, "give the number of elements of each rank's shard, zeros included"));
        }
        if shard != counts[rank].saturating_mul(size) {
            let what = format!(
                "the shard of item {item} has {} elements, yet counts[{rank}] is {}",
                shard / size,
                counts[rank]
            );
            return Err(self.argument(call, what, "make the shard of this rank as long as its count"));
        }
        if Some(full) != bytes_of(counts, dtype) {
            let sum = counts.iter().fold(0usize, |a, &b| a.saturating_add(b));
            let what =
                format!("the full buffer of item {item} has {} elements, the counts add up to {sum}", full / size);
            return Err(self.argument(call, what, "make the full buffer as long as all shards together"));
        }
        Ok(())
    }

    /// Adds to a descriptor what all ranks must agree on about an item.
    fn describe_item(call: &mut Call, dtype: ElementType, counts: &[usize]) {
        call.counts.extend_from_slice(counts);
        if call.dtype.is_none() {
            call.counts.push(dtype as usize);
        }
    }

    pub(crate) fn all_gather(&self, at: At, parts: &mut [GatherPart<'_>]) -> Result<()> {
        let mut call = Call { eager: at.eager, ..Call::new(Kind::AllGather, at.site) };
        call.dtype = common(parts.iter().map(|p| p.dtype));
        parts.iter().for_each(|p| Self::describe_item(&mut call, p.dtype, p.counts));
        for (i, p) in parts.iter().enumerate() {
            self.check_shards(&call, i, p.counts, p.dtype, p.shard.len(), p.full.len())?;
        }
        if self.alone(&call)? {
            parts.iter_mut().for_each(|p| p.full.copy_from_slice(p.shard));
            return Ok(());
        }
        let sent = parts.iter().map(|p| p.shard.len() * (self.size() - 1)).sum();
        let turn = self.turn(&mut call);
        let spent = self.backend.all_gather(call, parts)?;
        drop(turn);
        self.counters.add(Kind::AllGather, sent, spent);
        Ok(())
    }

    pub(crate) fn reduce_scatter(&self, at: At, op: ReduceOp, parts: &mut [ScatterPart<'_>]) -> Result<()> {
        let mut call = Call { eager: at.eager, op: Some(op), ..Call::new(Kind::ReduceScatter, at.site) };
        call.dtype = common(parts.iter().map(|p| p.dtype));
        parts.iter().for_each(|p| Self::describe_item(&mut call, p.dtype, p.counts));
        for (i, p) in parts.iter().enumerate() {
            self.check_shards(&call, i, p.counts, p.dtype, p.shard.len(), p.full.len())?;
        }
        if self.alone(&call)? {
            parts.iter_mut().for_each(|p| p.shard.copy_from_slice(p.full));
            return Ok(());
        }
        let sent = parts.iter().map(|p| p.full.len() - p.shard.len()).sum();
        let turn = self.turn(&mut call);
        let spent = self.backend.reduce_scatter(call, op, parts)?;
        drop(turn);
        self.counters.add(Kind::ReduceScatter, sent, spent);
        Ok(())
    }

    pub(crate) fn all_reduce(&self, at: At, op: ReduceOp, parts: &mut [ReducePart<'_>]) -> Result<()> {
        let mut call = Call { eager: at.eager, op: Some(op), ..Call::new(Kind::AllReduce, at.site) };
        call.dtype = common(parts.iter().map(|p| p.dtype));
        parts.iter().for_each(|p| Self::describe_item(&mut call, p.dtype, &[p.data.len() / p.dtype.size()]));
        if self.alone(&call)? {
            return Ok(());
        }
        let n = self.size();
        let sent = |p: &ReducePart<'_>| {
            let own = slice_of(p.data.len() / p.dtype.size(), p.dtype, self.rank(), n).len();
            p.data.len() - own + (n - 1) * own
        };
        let sent = parts.iter().map(sent).sum();
        let turn = self.turn(&mut call);
        let spent = self.backend.all_reduce(call, op, parts)?;
        drop(turn);
        self.counters.add(Kind::AllReduce, sent, spent);
        Ok(())
    }

    pub(crate) fn all_to_all(&self, at: At, part: ExchangePart<'_>) -> Result<()> {
        let mut call = Call { eager: at.eager, dtype: Some(part.dtype), ..Call::new(Kind::AllToAll, at.site) };
        call.sends = part.send_counts.to_vec();
        call.receives = part.recv_counts.to_vec();
        let n = self.size();
        let sides = [("send", part.send_counts, part.send.len()), ("recv", part.recv_counts, part.recv.len())];
        for (side, counts, len) in sides {
            if counts.len() != n {
                let what = format!("{} {side}_counts for {n} ranks", counts.len());
                return Err(self.argument(&call, what, "give a number of elements for each rank, zeros included"));
            }
            if bytes_of(counts, part.dtype) != Some(len) {
                let what =
                    format!("{side} has {} elements, not as many as {side}_counts together", len / part.dtype.size());
                return Err(self.argument(&call, what, format!("make {side} as long as its counts add up to")));
            }
        }
        if self.alone(&call)? {
            if part.send.len() != part.recv.len() {
                return Err(self.argument(
                    &call,
                    "sends and receives differ in a group of one",
                    "make the two counts equal",
                ));
            }
            part.recv.copy_from_slice(part.send);
            return Ok(());
        }
        let sent = part.send.len() - part.send_counts[self.rank()] * part.dtype.size();
        let turn = self.turn(&mut call);
        let spent = self.backend.all_to_all(call, part)?;
        drop(turn);
        self.counters.add(Kind::AllToAll, sent, spent);
        Ok(())
    }

    pub(crate) fn broadcast(&self, at: At, root: usize, dtype: ElementType, data: &mut [u8]) -> Result<()> {
        let mut call =
            Call { eager: at.eager, dtype: Some(dtype), root: Some(root), ..Call::new(Kind::Broadcast, at.site) };
        call.counts = vec![data.len() / dtype.size()];
        self.check_peer(&call, root)?;
        if self.alone(&call)? {
            return Ok(());
        }
        let sent = if root == self.rank() { (self.size() - 1) * data.len() } else { 0 };
        let turn = self.turn(&mut call);
        let spent = self.backend.broadcast(call, root, data)?;
        drop(turn);
        self.counters.add(Kind::Broadcast, sent, spent);
        Ok(())
    }

    pub(crate) fn barrier(&self, at: At) -> Result<()> {
        let mut call = Call { eager: at.eager, ..Call::new(Kind::Barrier, at.site) };
        if self.alone(&call)? {
            return Ok(());
        }
        let turn = self.turn(&mut call);
        let spent = self.backend.barrier(call)?;
        drop(turn);
        self.counters.add(Kind::Barrier, 0, spent);
        Ok(())
    }

    fn check_peer(&self, call: &Call, peer: usize) -> Result<()> {
        if peer < self.size() {
            return Ok(());
        }
        let what = format!("there is no rank {peer} in a group of {}", self.size());
        Err(self.argument(call, what, "name a rank of this group (not of the world)"))
    }

    fn message(&self, at: At, kind: Kind, peer: usize, dtype: ElementType, bytes: usize) -> Result<Call> {
        let mut call = Call { eager: at.eager, dtype: Some(dtype), root: Some(peer), ..Call::new(kind, at.site) };
        call.counts = vec![bytes / dtype.size()];
        call.sequence = self.messages.fetch_add(1, Ordering::Relaxed);
        self.check_peer(&call, peer)?;
        Ok(call)
    }

    /// A message that waits for its other side cannot go to the rank itself.
    fn check_other(&self, call: &Call, peer: usize) -> Result<()> {
        if peer != self.rank() {
            return Ok(());
        }
        Err(self.argument(call, "a rank cannot wait for itself", "use send_recv, which may go to the rank itself"))
    }

    pub(crate) fn send(&self, at: At, to: usize, dtype: ElementType, data: &[u8]) -> Result<()> {
        let call = self.message(at, Kind::Send, to, dtype, data.len())?;
        self.check_other(&call, to)?;
        let spent = self.backend.send(call, to, data)?;
        self.counters.add(Kind::Send, data.len(), spent);
        Ok(())
    }

    pub(crate) fn recv(&self, at: At, from: usize, dtype: ElementType, data: &mut [u8]) -> Result<()> {
        let call = self.message(at, Kind::Receive, from, dtype, data.len())?;
        self.check_other(&call, from)?;
        let spent = self.backend.recv(call, from, data)?;
        self.counters.add(Kind::Receive, 0, spent);
        Ok(())
    }

    pub(crate) fn send_recv(
        &self,
        at: At,
        dtype: ElementType,
        send: (usize, &[u8]),
        recv: (usize, &mut [u8]),
    ) -> Result<()> {
        let ((to, out), (from, into)) = (send, recv);
        let give = self.message(at, Kind::Send, to, dtype, out.len())?;
        let take = self.message(at, Kind::Receive, from, dtype, into.len())?;
        if to == self.rank() && from == self.rank() {
            if out.len() != into.len() {
                return Err(self.argument(&take, "the two buffers differ in length", "make them equally long"));
            }
            if self.size() == 1 {
                self.alone(&take)?;
            }
            into.copy_from_slice(out);
            return Ok(());
        }
        self.check_other(&give, to)?;
        self.check_other(&take, from)?;
        let bytes = out.len();
        let (sent, received) = self.backend.send_recv((give, to, out), (take, from, into))?;
        self.counters.add(Kind::Send, bytes, sent);
        self.counters.add(
            Kind::Receive,
            0,
            Spent { waiting: received.waiting.saturating_sub(sent.waiting), ..received },
        );
        Ok(())
    }

    /// Posts a tensor; gives its way, and the bytes that it will have sent.
    pub(crate) fn post(&self, at: At, kind: Kind, peer: usize, tensor: Tensor) -> Result<(Box<dyn InFlight>, usize)> {
        let bytes = tensor.bytes();
        let call = self.message(at, kind, peer, tensor.dtype().into(), bytes)?;
        if kind == Kind::Receive && !tensor.is_unique() {
            return Err(self.argument(&call, "the tensor's memory is shared", "give a tensor that nobody else holds"));
        }
        match kind {
            Kind::Send => Ok((self.backend.post_send(call, peer, tensor)?, bytes)),
            _ => Ok((self.backend.post_recv(call, peer, tensor)?, 0)),
        }
    }
}
