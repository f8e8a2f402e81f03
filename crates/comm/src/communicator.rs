//! A rank's handle of a group, and the calls that return when they are done.

use std::sync::Arc;

use crate::asynchronous::Lane;
use crate::backend::{Backend, ExchangePart, GatherPart, ReducePart, ScatterPart};
use crate::bytes;
use crate::element::{Element, Reduce, ReduceOp};
use crate::engine::{At, Engine};
use crate::error::{CommError, Result};
use crate::traffic::Traffic;

/// One rank's handle of one group of ranks. Cheap to clone; clones are the same rank.
///
/// Every rank of the group must make the same collective calls in the same order with the same sizes. The group checks that
/// (see [`CommError`]); a rank that differs, fails, or does not come within the time-out ends the call on *every* rank with an
/// error, and from then on every call of the world returns that failure.
///
/// Lengths and counts are in elements. Ranks in arguments are those of the group.
pub struct Communicator {
    core: Arc<Core>,
}

pub(crate) struct Core {
    pub(crate) engine: Arc<Engine>,
    pub(crate) lane: Lane,
}

impl Clone for Communicator {
    fn clone(&self) -> Communicator {
        Communicator { core: Arc::clone(&self.core) }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let engine = &self.core.engine;
            engine.backend.fail(CommError::RankPanicked { rank: engine.world_rank() });
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Communicator(`{}`, rank {} of {}, members {:?})",
            self.name(),
            self.rank(),
            self.size(),
            self.members()
        )
    }
}

/// One item of [`Communicator::all_gather_many`].
#[derive(Debug)]
pub struct Gather<'a, T> {
    /// This rank's elements: `counts[rank]` of them.
    pub shard: &'a [T],
    /// Elements of each rank; some may be 0.
    pub counts: &'a [usize],
    /// Receives the shards of all ranks, that of rank 0 first.
    pub full: &'a mut [T],
}

/// One item of [`Communicator::reduce_scatter_many`].
#[derive(Debug)]
pub struct Scatter<'a, T> {
    /// This rank's summands for the shards of all ranks, that of rank 0 first.
    pub full: &'a [T],
    /// Elements that each rank gets; some may be 0.
    pub counts: &'a [usize],
    /// Receives this rank's reduced shard: `counts[rank]` elements.
    pub shard: &'a mut [T],
}

impl Communicator {
    pub(crate) fn from_backend(backend: Arc<dyn Backend>, name: Arc<str>) -> Communicator {
        let engine = Arc::new(Engine::new(backend, name));
        Communicator { core: Arc::new(Core { lane: Lane::new(Arc::clone(&engine)), engine }) }
    }

    /// The engine, after all asynchronous calls issued so far have ended: calls keep the order in which they were issued.
    fn ready(&self) -> &Engine {
        self.core.lane.drain();
        &self.core.engine
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// This rank in the group, from 0.
    pub fn rank(&self) -> usize {
        self.core.engine.rank()
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.core.engine.size()
    }

    /// The group's name, as errors and reports call it.
    pub fn name(&self) -> &str {
        &self.core.engine.name
    }

    /// The group's ranks as ranks of the world.
    pub fn members(&self) -> &[usize] {
        self.core.engine.backend.members()
    }

    /// This rank in the world.
    pub fn world_rank(&self) -> usize {
        self.core.engine.world_rank()
    }

    /// The failure of the world, if it has failed.
    pub fn failure(&self) -> Option<CommError> {
        self.core.engine.backend.failure()
    }

    /// Fails the world: calls of all ranks, those in progress too, end with this rank's message. For an error outside of
    /// communication after which this rank cannot go on. ([`crate::run_ranks`] does it for a rank that returns an error.)
    pub fn abort(&self, message: impl Into<String>) -> CommError {
        self.core.engine.backend.fail(CommError::RankFailed { rank: self.world_rank(), message: message.into() })
    }

    /// What this rank sent in this group, and where its time went, since the last reset.
    pub fn traffic(&self) -> Traffic {
        self.core.engine.counters.read()
    }

    /// As [`Communicator::traffic`], and begins anew from zero.
    pub fn reset_traffic(&self) -> Traffic {
        self.core.engine.counters.take()
    }

    /// A group of some ranks of this one. Every member makes the call with the same name and list, in any order among other
    /// calls; the others do not. The order of the list is the order of ranks. Does not wait for the other members.
    ///
    /// # Errors
    /// If the list is empty, names a rank twice or one that is not there, or leaves out this rank.
    pub fn subgroup(&self, name: &str, members: &[usize]) -> Result<Communicator> {
        let engine = &self.core.engine;
        let wrong = if members.is_empty() {
            Some(("there are no members", "give at least this rank"))
        } else if members.iter().any(|&m| m >= self.size()) {
            Some(("a member is not in the parent group", "give ranks of the parent group, from 0"))
        } else if (1..members.len()).any(|i| members[..i].contains(&members[i])) {
            Some(("a rank is named twice", "name every member once"))
        } else if !members.contains(&self.rank()) {
            Some(("this rank is not a member", "make a group on its members only"))
        } else {
            None
        };
        let name: Arc<str> = Arc::from(name);
        if let Some((what, mend)) = wrong {
            let error = CommError::Members {
                rank: self.world_rank(),
                group: name.to_string(),
                members: members.to_vec(),
                size: self.size(),
                what,
                mend,
            };
            engine.backend.fail(error.clone());
            return Err(error);
        }
        Ok(Communicator::from_backend(engine.backend.subgroup(&name, members)?, name))
    }

    /// Reduces `data` of all ranks element by element; every rank gets the result in place.
    ///
    /// Every element is reduced in the order of ranks 0, 1, 2, …, so its bits are the same in every run and back end.
    ///
    /// # Errors
    /// Like all collectives: if the ranks' calls do not fit, a peer does not come in time, or the world has failed.
    #[track_caller]
    pub fn all_reduce<T: Reduce>(&self, op: ReduceOp, data: &mut [T]) -> Result<()> {
        self.all_reduce_many(op, &mut [data])
    }

    /// Reduces several buffers in one call.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn all_reduce_many<T: Reduce>(&self, op: ReduceOp, data: &mut [&mut [T]]) -> Result<()> {
        let mut parts: Vec<ReducePart<'_>> =
            data.iter_mut().map(|d| ReducePart { dtype: T::TYPE, data: bytes::of_mut(d) }).collect();
        self.ready().all_reduce(At::here(), op, &mut parts)
    }

    /// Gathers equal shards: `full` receives the `shard` of rank 0, then that of rank 1, …
    ///
    /// # Errors
    /// If `full` is not size() times as long as `shard`; and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn all_gather<T: Element>(&self, shard: &[T], full: &mut [T]) -> Result<()> {
        self.all_gather_v(shard, &vec![shard.len(); self.size()], full)
    }

    /// Gathers shards of `counts[rank]` elements each; some may be empty.
    ///
    /// # Errors
    /// If the lengths are not those of `counts`; and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn all_gather_v<T: Element>(&self, shard: &[T], counts: &[usize], full: &mut [T]) -> Result<()> {
        self.all_gather_many(&mut [Gather { shard, counts, full }])
    }

    /// Gathers many shards into many full buffers in one call, each with its own counts.
    ///
    /// # Errors
    /// As for [`Communicator::all_gather_v`].
    #[track_caller]
    pub fn all_gather_many<T: Element>(&self, items: &mut [Gather<'_, T>]) -> Result<()> {
        let part = |g| {
            let Gather { shard, counts, full }: &mut Gather<'_, T> = g;
            GatherPart { dtype: T::TYPE, shard: bytes::of(shard), counts, full: bytes::of_mut(full) }
        };
        let mut parts: Vec<GatherPart<'_>> = items.iter_mut().map(part).collect();
        self.ready().all_gather(At::here(), &mut parts)
    }

    /// Reduces `full` of all ranks; each rank gets its equal part in `shard`. The order of the sum is as in
    /// [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// If `full` is not size() times as long as `shard`; and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter<T: Reduce>(&self, op: ReduceOp, full: &[T], shard: &mut [T]) -> Result<()> {
        let counts = vec![shard.len(); self.size()];
        self.reduce_scatter_v(op, full, &counts, shard)
    }

    /// Reduces `full` of all ranks; rank r gets `counts[r]` elements of the result; some may get none.
    ///
    /// # Errors
    /// If the lengths are not those of `counts`; and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter_v<T: Reduce>(
        &self,
        op: ReduceOp,
        full: &[T],
        counts: &[usize],
        shard: &mut [T],
    ) -> Result<()> {
        self.reduce_scatter_many(op, &mut [Scatter { full, counts, shard }])
    }

    /// Reduces many full buffers into many shards in one call, each with its own counts.
    ///
    /// # Errors
    /// As for [`Communicator::reduce_scatter_v`].
    #[track_caller]
    pub fn reduce_scatter_many<T: Reduce>(&self, op: ReduceOp, items: &mut [Scatter<'_, T>]) -> Result<()> {
        let part = |s| {
            let Scatter { full, counts, shard }: &mut Scatter<'_, T> = s;
            ScatterPart { dtype: T::TYPE, full: bytes::of(full), counts, shard: bytes::of_mut(shard) }
        };
        let mut parts: Vec<ScatterPart<'_>> = items.iter_mut().map(part).collect();
        self.ready().reduce_scatter(At::here(), op, &mut parts)
    }

    /// Sends the r-th of size() equal pieces of `send` to rank r; `recv` gets a piece from rank 0, 1, …
    ///
    /// # Errors
    /// If a length is not a multiple of size(); and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, send: &[T], recv: &mut [T]) -> Result<()> {
        let counts = vec![send.len() / self.size(); self.size()];
        self.all_to_all_v(send, &counts, recv, &counts)
    }

    /// Sends `send_counts[r]` elements to each rank r, and receives `recv_counts[r]` from it; pieces lie one after another.
    /// What one rank sends must be what the other expects.
    ///
    /// # Errors
    /// If the lengths are not those of the counts; and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn all_to_all_v<T: Element>(
        &self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<()> {
        let (send, recv) = (bytes::of(send), bytes::of_mut(recv));
        self.ready().all_to_all(At::here(), ExchangePart { dtype: T::TYPE, send, send_counts, recv, recv_counts })
    }

    /// Every rank gets `data` of rank `root`.
    ///
    /// # Errors
    /// If there is no such rank; and as for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn broadcast<T: Element>(&self, root: usize, data: &mut [T]) -> Result<()> {
        self.ready().broadcast(At::here(), root, T::TYPE, bytes::of_mut(data))
    }

    /// Returns when every rank has come.
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.ready().barrier(At::here())
    }

    /// Gives `data` to rank `to`; returns when it has taken it. Messages of a pair of ranks keep their order; they are
    /// independent of collectives. Where two ranks send to each other at once, use [`Communicator::send_recv`].
    ///
    /// # Errors
    /// If the peer expects another size or type, does not come in time, or the world has failed.
    #[track_caller]
    pub fn send<T: Element>(&self, to: usize, data: &[T]) -> Result<()> {
        self.core.engine.send(At::here(), to, T::TYPE, bytes::of(data))
    }

    /// Takes `data` from rank `from`.
    ///
    /// # Errors
    /// As for [`Communicator::send`].
    #[track_caller]
    pub fn recv<T: Element>(&self, from: usize, data: &mut [T]) -> Result<()> {
        self.core.engine.recv(At::here(), from, T::TYPE, bytes::of_mut(data))
    }

    /// Sends to one rank and receives from one, neither waiting for the other: the step of a ring. In a ring of one it copies.
    ///
    /// # Errors
    /// As for [`Communicator::send`].
    #[track_caller]
    pub fn send_recv<T: Element>(&self, to: usize, send: &[T], from: usize, recv: &mut [T]) -> Result<()> {
        self.core.engine.send_recv(At::here(), T::TYPE, (to, bytes::of(send)), (from, bytes::of_mut(recv)))
    }
}
