//! Calls that go on while the rank computes.
//!
//! They take tensors and give them back when they are done, so nobody can touch a buffer that is on its way. A group's
//! collectives run in the order of issue on one communication thread per rank and group (started by the first of them);
//! messages between two ranks need no thread, since the side that comes second copies.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use phalanx_tensor::{Tensor, TensorError};

use crate::backend::{ExchangePart, GatherPart, InFlight, ReducePart, ScatterPart};
use crate::bytes;
use crate::call::{Call, Kind};
use crate::communicator::Communicator;
use crate::element::ReduceOp;
use crate::engine::{At, Engine};
use crate::error::{CommError, Result};

type Job = Box<dyn FnOnce(&Engine) + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: bool,
    /// Whether there is a thread, and whether it may end when the queue is empty.
    started: bool,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(|e| e.into_inner())
    }
}

/// The communication thread of one rank and group, and what it has yet to do.
pub(crate) struct Lane {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
}

impl Lane {
    pub(crate) fn new(engine: Arc<Engine>) -> Lane {
        Lane { engine, shared: Arc::default() }
    }

    /// Waits until everything issued so far has ended; each call ends within the time-out.
    pub(crate) fn drain(&self) {
        let mut queue = self.shared.lock();
        while queue.running || !queue.jobs.is_empty() {
            queue = self.shared.wait(queue);
        }
    }

    fn push(&self, job: Job) -> Result<()> {
        let mut queue = self.shared.lock();
        if !queue.started {
            let (engine, shared) = (Arc::clone(&self.engine), Arc::clone(&self.shared));
            let name = format!("comm-{}-{}", engine.name, engine.world_rank());
            let spawned = std::thread::Builder::new().name(name).spawn(move || work(&engine, &shared));
            if let Err(e) = spawned {
                let (rank, group) = (self.engine.world_rank(), self.engine.name.to_string());
                let error = CommError::Thread { rank, group, why: e.to_string() };
                self.engine.backend.fail(error.clone());
                return Err(error);
            }
            queue.started = true;
        }
        queue.jobs.push_back(job);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Drop for Lane {
    /// The thread does what it has left, then ends by itself: a rank that ends must not wait here for peers.
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

fn work(engine: &Engine, shared: &Shared) {
    let mut queue = shared.lock();
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            queue.running = true;
            drop(queue);
            if catch_unwind(AssertUnwindSafe(|| job(engine))).is_err() {
                engine.backend.fail(CommError::RankPanicked { rank: engine.world_rank() });
            }
            queue = shared.lock();
            queue.running = false;
            shared.changed.notify_all();
        } else if queue.closed {
            return;
        } else {
            queue = shared.wait(queue);
        }
    }
}

/// Where a job leaves its result.
type Place<T> = Arc<(Mutex<Option<Result<T>>>, Condvar)>;

/// Fills a [`Place`]: with a failure if the job is dropped before it has a result.
struct Promise<T>(Place<T>, usize);

impl<T> Promise<T> {
    fn set(&self, result: Result<T>) {
        let mut place = self.0.0.lock().unwrap_or_else(|e| e.into_inner());
        if place.is_none() {
            *place = Some(result);
            self.0.1.notify_all();
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.set(Err(CommError::RankPanicked { rank: self.1 }));
    }
}

enum State<T> {
    Ready(Result<T>),
    Queued(Place<T>),
    Flying { flight: Box<dyn InFlight>, engine: Arc<Engine>, kind: Kind, bytes: usize, give: fn(Tensor) -> T },
}

/// A call that was issued and goes on by itself; [`Pending::wait`] gives its tensors back. Dropped, it goes on all the same.
#[must_use = "the result of a call that goes on is got by wait()"]
pub struct Pending<T>(State<T>);

impl<T> Pending<T> {
    /// Waits until the call is done.
    ///
    /// # Errors
    /// As for the call that waits. The tensors are lost then, and so is the world.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            State::Ready(result) => result,
            State::Queued(place) => {
                let mut result = place.0.lock().unwrap_or_else(|e| e.into_inner());
                loop {
                    match result.take() {
                        Some(result) => return result,
                        None => result = place.1.wait(result).unwrap_or_else(|e| e.into_inner()),
                    }
                }
            }
            State::Flying { flight, engine, kind, bytes, give } => {
                let (tensor, spent) = flight.wait()?;
                engine.counters.add(kind, bytes, spent);
                Ok(give(tensor))
            }
        }
    }

    /// Whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            State::Ready(_) => true,
            State::Queued(place) => place.0.lock().unwrap_or_else(|e| e.into_inner()).is_some(),
            State::Flying { flight, .. } => flight.is_done(),
        }
    }
}

/// One item of [`Communicator::all_gather_async`].
#[derive(Debug)]
pub struct GatherTensors {
    /// This rank's elements: `counts[rank]` of them. It may be shared.
    pub shard: Tensor,
    /// Elements of each rank; some may be 0.
    pub counts: Vec<usize>,
    /// Receives all shards. Nobody else holds its memory; of the same element type as `shard`.
    pub full: Tensor,
}

/// One item of [`Communicator::reduce_scatter_async`].
#[derive(Debug)]
pub struct ScatterTensors {
    /// This rank's summands for all shards. It may be shared.
    pub full: Tensor,
    /// Elements that each rank gets; some may be 0.
    pub counts: Vec<usize>,
    /// Receives this rank's reduced shard. Nobody else holds its memory; of the same element type as `full`.
    pub shard: Tensor,
}

/// The buffers of [`Communicator::all_to_all_async`].
#[derive(Debug)]
pub struct ExchangeTensors {
    /// Pieces for ranks 0, 1, …, one after another. It may be shared.
    pub send: Tensor,
    /// Elements for each rank.
    pub send_counts: Vec<usize>,
    /// Receives the pieces of ranks 0, 1, … Nobody else holds its memory; of the same element type as `send`.
    pub recv: Tensor,
    /// Elements from each rank.
    pub recv_counts: Vec<usize>,
}

fn refuse(engine: &Engine, kind: Kind, at: At, error: &TensorError) -> CommError {
    engine.argument(&Call::new(kind, at.site), error.to_string(), "give receiving tensors that nobody else holds")
}

fn same_type(engine: &Engine, kind: Kind, at: At, from: &Tensor, to: &Tensor) -> Result<()> {
    if from.dtype() == to.dtype() {
        return Ok(());
    }
    let what = format!("the elements given are {}, those received {}", from.dtype(), to.dtype());
    Err(engine.argument(&Call::new(kind, at.site), what, "cast one of the tensors before"))
}

impl Communicator {
    /// Runs a call on the communication thread; in a group of one at once.
    fn issue<T: Send + 'static>(&self, job: impl FnOnce(&Engine) -> Result<T> + Send + 'static) -> Pending<T> {
        let core = self.core();
        if core.engine.size() == 1 {
            return Pending(State::Ready(job(&core.engine)));
        }
        let place: Place<T> = Arc::default();
        let promise = Promise(Arc::clone(&place), core.engine.world_rank());
        match core.lane.push(Box::new(move |engine| promise.set(job(engine)))) {
            Ok(()) => Pending(State::Queued(place)),
            Err(e) => Pending(State::Ready(Err(e))),
        }
    }

    /// As [`Communicator::all_reduce`], going on by itself: gives the tensor back with the result in place.
    #[track_caller]
    pub fn all_reduce_async(&self, op: ReduceOp, tensor: Tensor) -> Pending<Tensor> {
        let at = At::behind();
        self.issue(move |engine| {
            let mut tensor = tensor;
            let dtype = tensor.dtype().into();
            let data = bytes::of_tensor_mut(&mut tensor).map_err(|e| refuse(engine, Kind::AllReduce, at, &e))?;
            engine.all_reduce(at, op, &mut [ReducePart { dtype, data }])?;
            Ok(tensor)
        })
    }

    /// As [`Communicator::all_gather_many`], going on by itself: one call for all items, whose element types may differ.
    #[track_caller]
    pub fn all_gather_async(&self, items: Vec<GatherTensors>) -> Pending<Vec<GatherTensors>> {
        let at = At::behind();
        self.issue(move |engine| {
            let mut items = items;
            let mut parts = Vec::with_capacity(items.len());
            for GatherTensors { shard, counts, full } in &mut items {
                same_type(engine, Kind::AllGather, at, shard, full)?;
                let refuse = |e| refuse(engine, Kind::AllGather, at, &e);
                let dtype = shard.dtype().into();
                let shard = bytes::of_tensor(shard).map_err(refuse)?;
                parts.push(GatherPart { dtype, shard, counts, full: bytes::of_tensor_mut(full).map_err(refuse)? });
            }
            engine.all_gather(at, &mut parts)?;
            drop(parts);
            Ok(items)
        })
    }

    /// As [`Communicator::reduce_scatter_many`], going on by itself: one call for all items, whose element types may differ.
    #[track_caller]
    pub fn reduce_scatter_async(&self, op: ReduceOp, items: Vec<ScatterTensors>) -> Pending<Vec<ScatterTensors>> {
        let at = At::behind();
        self.issue(move |engine| {
            let mut items = items;
            let mut parts = Vec::with_capacity(items.len());
            for ScatterTensors { full, counts, shard } in &mut items {
                same_type(engine, Kind::ReduceScatter, at, full, shard)?;
                let refuse = |e| refuse(engine, Kind::ReduceScatter, at, &e);
                let dtype = full.dtype().into();
                let full = bytes::of_tensor(full).map_err(refuse)?;
                parts.push(ScatterPart { dtype, full, counts, shard: bytes::of_tensor_mut(shard).map_err(refuse)? });
            }
            engine.reduce_scatter(at, op, &mut parts)?;
            drop(parts);
            Ok(items)
        })
    }

    /// As [`Communicator::all_to_all_v`], going on by itself.
    #[track_caller]
    pub fn all_to_all_async(&self, tensors: ExchangeTensors) -> Pending<ExchangeTensors> {
        let at = At::behind();
        self.issue(move |engine| {
            let mut tensors = tensors;
            let ExchangeTensors { send, send_counts, recv, recv_counts } = &mut tensors;
            same_type(engine, Kind::AllToAll, at, send, recv)?;
            let refuse = |e| refuse(engine, Kind::AllToAll, at, &e);
            let dtype = send.dtype().into();
            let send = bytes::of_tensor(send).map_err(refuse)?;
            let recv = bytes::of_tensor_mut(recv).map_err(refuse)?;
            engine.all_to_all(at, ExchangePart { dtype, send, send_counts, recv, recv_counts })?;
            Ok(tensors)
        })
    }

    /// As [`Communicator::broadcast`], going on by itself.
    #[track_caller]
    pub fn broadcast_async(&self, root: usize, tensor: Tensor) -> Pending<Tensor> {
        let at = At::behind();
        self.issue(move |engine| {
            let mut tensor = tensor;
            let dtype = tensor.dtype().into();
            let data = bytes::of_tensor_mut(&mut tensor).map_err(|e| refuse(engine, Kind::Broadcast, at, &e))?;
            engine.broadcast(at, root, dtype, data)?;
            Ok(tensor)
        })
    }

    /// Hands a tensor over to be sent; any number may be on their way, and a rank may send to itself. The time-out begins
    /// with [`Pending::wait`].
    #[track_caller]
    pub fn send_async(&self, to: usize, tensor: Tensor) -> Pending<Tensor> {
        self.fly(At::here(), Kind::Send, to, tensor)
    }

    /// Hands a tensor over to be filled; nobody else holds its memory. Any number may be on their way; those of a pair of ranks
    /// are filled in the order of issue. The time-out begins with [`Pending::wait`].
    #[track_caller]
    pub fn recv_async(&self, from: usize, tensor: Tensor) -> Pending<Tensor> {
        self.fly(At::here(), Kind::Receive, from, tensor)
    }

    fn fly(&self, at: At, kind: Kind, peer: usize, tensor: Tensor) -> Pending<Tensor> {
        let engine = Arc::clone(&self.core().engine);
        Pending(match engine.post(at, kind, peer, tensor) {
            Ok((flight, bytes)) => State::Flying { flight, engine, kind, bytes, give: |tensor| tensor },
            Err(e) => State::Ready(Err(e)),
        })
    }
}
