//! The collectives over messages. Data goes straight from one rank's slice into another's, each piece once to each rank that wants
//! it; reductions are ours, in the order of ranks, so that the bits are those of the other back end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_tensor::Tensor;

use super::header::{self, Remote};
use super::room::{Room, cut};
use super::wire::{Cargo, Lent, Parcel};
use super::world::{Stop, World, lock};
use crate::backend::{Backend, ExchangePart, GatherPart, InFlight, ReducePart, ScatterPart, Spent, range_of, slice_of};
use crate::call::{Aspect, Call, first_mismatch};
use crate::element::ReduceOp;
use crate::error::{CommError, Result};
use crate::reduce;

/// The four tags of a group, from its first on.
const HEADER: i32 = 0;
const DATA: i32 = 1;
const MAIL_HEADER: i32 = 2;
const MAIL: i32 = 3;

/// Broadcasts of more bytes are cut up: the root sends every rank a slice, and the ranks send each other theirs.
const CUT: usize = 64 << 10;

/// One rank's handle of one group.
pub(super) struct MpiBackend {
    shared: Arc<Shared>,
    /// As in the local back end: how many groups of each name and members this rank has made.
    made: Mutex<Made>,
    /// Where peers' summands arrive, kept from call to call: fresh memory costs more than the message.
    room: Mutex<Vec<u64>>,
}

/// Counts by name and members.
type Made = BTreeMap<(Arc<str>, Vec<usize>), u64>;

struct Shared {
    world: Arc<World>,
    name: Arc<str>,
    /// Ranks of the world, and this rank's place among them.
    members: Vec<usize>,
    rank: usize,
    /// The same on every member, and another for every group.
    id: u64,
    tag: i32,
}

impl MpiBackend {
    pub(super) fn new(
        world: Arc<World>,
        name: Arc<str>,
        members: Vec<usize>,
        parent: u64,
        nth: u64,
    ) -> Result<MpiBackend> {
        let words = [parent, nth].into_iter().chain(members.iter().map(|&m| m as u64));
        let id = header::hash(words.chain(name.bytes().map(u64::from)));
        let tag = world.tags(id).map_err(|_| CommError::Backend {
            rank: world.rank,
            what: format!("the message tags of group `{name}` are those of another group"),
            mend: "give the group another name".into(),
        })?;
        let rank = members.iter().position(|&m| m == world.rank).expect("checked: a member makes its own groups");
        let shared = Shared { world, name, members, rank, id, tag };
        Ok(MpiBackend { shared: Arc::new(shared), made: Mutex::default(), room: Mutex::default() })
    }
}

impl Shared {
    fn size(&self) -> usize {
        self.members.len()
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        // Each rank begins with its neighbour, so that not all send to the same one.
        (1..self.size()).map(|i| (self.rank + i) % self.size())
    }

    fn interrupted(&self, call: &Call) -> CommError {
        let rank = self.members[self.rank];
        let cause = self.world.failure().unwrap_or(CommError::RankFailed { rank, message: String::new() });
        CommError::Interrupted { rank, group: self.name.to_string(), call: call.to_string(), cause: Box::new(cause) }
    }

    /// Fails the world with what this call found; what the call returns.
    fn found(&self, call: &Call, found: CommError) -> CommError {
        let text = found.to_string();
        let first = self.world.fail(found);
        if first.to_string() == text { first } else { self.interrupted(call) }
    }

    fn stopped(&self, call: &Call, stop: Stop, missing: impl Fn() -> Vec<usize>) -> CommError {
        let rank = self.members[self.rank];
        match stop {
            Stop::Failed => self.interrupted(call),
            Stop::Timeout => {
                let missing =
                    missing().iter().map(|&q| format!("rank {}", self.members[q])).collect::<Vec<_>>().join(", ");
                let error = CommError::Timeout {
                    rank,
                    group: self.name.to_string(),
                    call: call.to_string(),
                    after: self.world.options.timeout,
                    missing: format!("{missing} (nothing has come from there for this call)"),
                };
                self.found(call, error)
            }
            Stop::Mpi(what) => self.found(
                call,
                CommError::Backend {
                    rank,
                    what: format!("{call}: MPI says: {what}"),
                    mend: "see the output of mpirun".into(),
                },
            ),
        }
    }

    fn mpi<T>(&self, call: &Call, outcome: Result<T, String>) -> Result<T> {
        outcome.map_err(|what| self.stopped(call, Stop::Mpi(what), Vec::new))
    }

    fn mismatch(&self, aspect: Aspect, first: (usize, &str), second: (usize, &str)) -> CommError {
        CommError::Mismatch {
            group: self.name.to_string(),
            aspect,
            first_rank: self.members[first.0],
            first: first.1.to_owned(),
            second_rank: self.members[second.0],
            second: second.1.to_owned(),
        }
    }

    /// Exchanges descriptors; returns when all ranks have come and their calls fit.
    fn meet(&self, call: &Call) -> Result<Duration> {
        let begin = Instant::now();
        self.world.listen();
        if self.world.failure().is_some() {
            return Err(self.interrupted(call));
        }
        let (n, wire) = (self.size(), &self.world.wire);
        let own = header::encode(call, self.id, n);
        let mut coming: Vec<Option<Parcel>> = (0..n).map(|_| None).collect();
        for q in self.others() {
            let empty = Cargo::Bytes(vec![0; own.len()]);
            coming[q] = Some(self.mpi(call, wire.receive(self.members[q], self.tag + HEADER, empty))?);
        }
        for q in self.others() {
            let sent = self.mpi(call, wire.send(self.members[q], self.tag + HEADER, Cargo::Bytes(own.clone())))?;
            self.world.keep(sent);
        }
        let mut here: Vec<Option<Remote>> = (0..n).map(|_| None).collect();
        here[self.rank] = Some(header::decode(&own, n, call));
        let waited = self.world.wait(|| {
            for q in 0..n {
                if coming[q].as_mut().map_or(Ok(false), Parcel::poll)?
                    && let Some(Cargo::Bytes(bytes)) = coming[q].take().and_then(Parcel::open)
                {
                    here[q] = Some(header::decode(&bytes, n, call));
                }
            }
            Ok(here.iter().all(Option::is_some))
        });
        if let Err(stop) = waited {
            return Err(self.stopped(call, stop, || (0..n).filter(|&q| here[q].is_none()).collect()));
        }
        let remotes: Vec<Remote> = here.into_iter().flatten().collect();
        let calls: Vec<&Call> = remotes.iter().map(|r| &r.call).collect();
        let group = remotes.iter().position(|r| r.group != self.id).map(|q| (self.rank, q, Aspect::Kind));
        if let Some((a, b, aspect)) = first_mismatch(&calls).or(group) {
            let found = self.mismatch(aspect, (a, &remotes[a].text), (b, &remotes[b].text));
            return Err(self.found(call, found));
        }
        Ok(begin.elapsed())
    }

    /// Moves data after the ranks have met.
    fn exchange(&self, call: &Call, sends: &[(usize, &[u8])], recvs: Vec<(usize, &mut [u8])>) -> Result<()> {
        let mut lent = Lent::new(&self.world.wire);
        for (from, bytes) in recvs.into_iter().filter(|(_, b)| !b.is_empty()) {
            self.mpi(call, lent.receive(self.members[from], self.tag + DATA, bytes))?;
        }
        for (to, bytes) in sends.iter().filter(|(_, b)| !b.is_empty()) {
            self.mpi(call, lent.send(self.members[*to], self.tag + DATA, bytes))?;
        }
        self.world.wait(|| lent.poll()).map_err(|stop| {
            let error = self.stopped(call, stop, Vec::new);
            eprintln!("phalanx: {error}");
            error
        })
    }

    /// Meets, works, and tells the two times apart.
    fn run(&self, call: &Call, work: impl FnOnce() -> Result<()>) -> Result<Spent> {
        let waiting = self.meet(call)?;
        let begin = Instant::now();
        work()?;
        Ok(Spent { waiting, moving: begin.elapsed() })
    }

    fn post_send(&self, call: &Call, to: usize, cargo: Cargo) -> Result<Parcel> {
        self.world.listen();
        if self.world.failure().is_some() {
            return Err(self.interrupted(call));
        }
        let header = Cargo::Bytes(header::encode(call, self.id, 0));
        let wire = &self.world.wire;
        self.world.keep(self.mpi(call, wire.send(self.members[to], self.tag + MAIL_HEADER, header))?);
        self.mpi(call, wire.send(self.members[to], self.tag + MAIL, cargo))
    }

    fn post_header(&self, call: &Call, from: usize) -> Result<Parcel> {
        self.world.listen();
        if self.world.failure().is_some() {
            return Err(self.interrupted(call));
        }
        let header = Cargo::Bytes(vec![0; header::len(0)]);
        self.mpi(call, self.world.wire.receive(self.members[from], self.tag + MAIL_HEADER, header))
    }

    /// Waits for the header of a message that `call` receives, and compares.
    fn await_header(&self, call: &Call, from: usize, header: &mut Option<Parcel>) -> Result<()> {
        let waited = self.world.wait(|| header.as_mut().map_or(Ok(true), Parcel::poll));
        waited.map_err(|stop| self.stopped(call, stop, || vec![from]))?;
        let Some(Cargo::Bytes(bytes)) = header.take().and_then(Parcel::open) else { return Ok(()) };
        let sent = header::decode(&bytes, 0, call);
        let own = header::decode(&header::encode(call, self.id, 0), 0, call);
        let aspect = if sent.call.dtype != own.call.dtype {
            Aspect::ElementType
        } else if sent.call.counts != own.call.counts {
            Aspect::Counts
        } else {
            return Ok(());
        };
        Err(self.found(call, self.mismatch(aspect, (from, &sent.text), (self.rank, &own.text))))
    }

    /// Receives into a slice: the header first, so that no message of another size is let in.
    fn recv(&self, call: &Call, from: usize, data: &mut [u8]) -> Result<Spent> {
        let begin = Instant::now();
        let mut header = Some(self.post_header(call, from)?);
        self.await_header(call, from, &mut header)?;
        let started = Instant::now();
        let mut lent = Lent::new(&self.world.wire);
        self.mpi(call, lent.receive(self.members[from], self.tag + MAIL, data))?;
        self.world.wait(|| lent.poll()).map_err(|stop| self.stopped(call, stop, || vec![from]))?;
        Ok(Spent { waiting: started - begin, moving: started.elapsed() })
    }

    /// Waits until a message has left.
    fn await_sent(&self, call: &Call, to: usize, mut sent: Parcel) -> Result<Parcel> {
        match self.world.wait(|| sent.poll()) {
            Ok(()) => Ok(sent),
            Err(stop) => {
                self.world.keep(sent);
                Err(self.stopped(call, stop, || vec![to]))
            }
        }
    }
}

impl Backend for MpiBackend {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.size()
    }

    fn members(&self) -> &[usize] {
        &self.shared.members
    }

    fn fail(&self, failure: CommError) -> CommError {
        self.shared.world.fail(failure)
    }

    fn failure(&self) -> Option<CommError> {
        self.shared.world.listen();
        self.shared.world.failure()
    }

    fn subgroup(&self, name: &Arc<str>, members: &[usize]) -> Result<Arc<dyn Backend>> {
        let nth = {
            let mut made = lock(&self.made);
            let count = made.entry((Arc::clone(name), members.to_vec())).or_default();
            *count += 1;
            *count
        };
        let s = &self.shared;
        let global = members.iter().map(|&m| s.members[m]).collect();
        Ok(Arc::new(MpiBackend::new(Arc::clone(&s.world), Arc::clone(name), global, s.id, nth)?))
    }

    fn all_gather(&self, call: Call, parts: &mut [GatherPart<'_>]) -> Result<Spent> {
        let s = &self.shared;
        s.run(&call, || {
            let mut sends = vec![];
            let mut recvs = vec![];
            for part in parts.iter_mut() {
                let ranges = (0..s.size()).map(|q| range_of(part.counts, part.dtype, q));
                for (q, piece) in cut(part.full, ranges).into_iter().enumerate() {
                    if q == s.rank { piece.copy_from_slice(part.shard) } else { recvs.push((q, piece)) }
                }
                sends.extend(s.others().map(|q| (q, part.shard)));
            }
            s.exchange(&call, &sends, recvs)
        })
    }

    fn reduce_scatter(&self, call: Call, op: ReduceOp, parts: &mut [ScatterPart<'_>]) -> Result<Spent> {
        let s = &self.shared;
        s.run(&call, || {
            let lens = parts.iter().map(|p| p.shard.len()).collect();
            let mut room = Room::new(std::mem::take(&mut lock(&self.room)), s.size(), lens);
            let (mut sends, mut recvs) = (vec![], vec![]);
            for (part, pieces) in parts.iter().zip(room.parts()) {
                sends.extend(s.others().map(|q| (q, &part.full[range_of(part.counts, part.dtype, q)])));
                recvs.extend(pieces.into_iter().enumerate().filter(|(q, _)| *q != s.rank));
            }
            s.exchange(&call, &sends, recvs)?;
            for (part, pieces) in parts.iter_mut().zip(room.parts()) {
                let own = &part.full[range_of(part.counts, part.dtype, s.rank)];
                let ranks: Vec<&[u8]> =
                    pieces.iter().enumerate().map(|(q, p)| if q == s.rank { own } else { &**p }).collect();
                reduce::reduce_to(part.dtype, op, &ranks, part.shard);
            }
            *lock(&self.room) = room.words;
            Ok(())
        })
    }

    fn all_reduce(&self, call: Call, op: ReduceOp, parts: &mut [ReducePart<'_>]) -> Result<Spent> {
        let s = &self.shared;
        let slice = |p: &ReducePart<'_>, q: usize| slice_of(p.data.len() / p.dtype.size(), p.dtype, q, s.size());
        s.run(&call, || {
            let lens = parts.iter().map(|p| slice(p, s.rank).len()).collect();
            let mut room = Room::new(std::mem::take(&mut lock(&self.room)), s.size(), lens);
            let (mut sends, mut recvs) = (vec![], vec![]);
            for (part, pieces) in parts.iter().zip(room.parts()) {
                sends.extend(s.others().map(|q| (q, &part.data[slice(part, q)])));
                for (q, piece) in pieces.into_iter().enumerate() {
                    if q == s.rank {
                        piece.copy_from_slice(&part.data[slice(part, q)]);
                    } else {
                        recvs.push((q, piece));
                    }
                }
            }
            s.exchange(&call, &sends, recvs)?;
            for (part, pieces) in parts.iter_mut().zip(room.parts()) {
                let ranks: Vec<&[u8]> = pieces.into_iter().map(|p| &*p).collect();
                let own = slice(part, s.rank);
                reduce::reduce_to(part.dtype, op, &ranks, &mut part.data[own]);
            }
            *lock(&self.room) = room.words;
            let (mut sends, mut recvs) = (vec![], vec![]);
            for part in parts.iter_mut() {
                let ranges: Vec<_> = (0..s.size()).map(|q| slice(part, q)).collect();
                let mut pieces: Vec<(usize, &mut [u8])> =
                    cut(part.data, ranges.into_iter()).into_iter().enumerate().collect();
                let own: &[u8] = pieces.remove(s.rank).1;
                sends.extend(s.others().map(|q| (q, own)));
                recvs.extend(pieces);
            }
            s.exchange(&call, &sends, recvs)
        })
    }

    fn all_to_all(&self, call: Call, part: ExchangePart<'_>) -> Result<Spent> {
        let s = &self.shared;
        s.run(&call, || {
            let piece = |q: usize| &part.send[range_of(part.send_counts, part.dtype, q)];
            let sends: Vec<_> = s.others().map(|q| (q, piece(q))).collect();
            let ranges = (0..s.size()).map(|q| range_of(part.recv_counts, part.dtype, q));
            let mut recvs: Vec<_> = cut(part.recv, ranges).into_iter().enumerate().collect();
            recvs.remove(s.rank).1.copy_from_slice(piece(s.rank));
            s.exchange(&call, &sends, recvs)
        })
    }

    fn broadcast(&self, call: Call, root: usize, data: &mut [u8]) -> Result<Spent> {
        let s = &self.shared;
        s.run(&call, || {
            if data.len() <= CUT || s.size() == 2 {
                return if s.rank == root {
                    s.exchange(&call, &s.others().map(|q| (q, &*data)).collect::<Vec<_>>(), vec![])
                } else {
                    s.exchange(&call, &[], vec![(root, data)])
                };
            }
            let slice = |q: usize| slice_of(data.len(), crate::ElementType::U8, q, s.size());
            let ranges: Vec<_> = (0..s.size()).map(slice).collect();
            let mut pieces: Vec<(usize, &mut [u8])> = cut(data, ranges.into_iter()).into_iter().enumerate().collect();
            if s.rank == root {
                let sends: Vec<(usize, &[u8])> =
                    pieces.iter().filter(|(q, _)| *q != root).map(|(q, p)| (*q, &**p)).collect();
                s.exchange(&call, &sends, vec![])?;
                // Its own slice, which it alone can pass on.
                let own: &[u8] = pieces.remove(root).1;
                return s.exchange(&call, &s.others().map(|q| (q, own)).collect::<Vec<_>>(), vec![]);
            }
            let own = pieces.remove(s.rank).1;
            s.exchange(&call, &[], vec![(root, &mut *own)])?;
            let sends: Vec<(usize, &[u8])> = s.others().filter(|q| *q != root).map(|q| (q, &*own)).collect();
            s.exchange(&call, &sends, pieces)
        })
    }

    fn barrier(&self, call: Call) -> Result<Spent> {
        self.shared.run(&call, || Ok(()))
    }

    fn send(&self, call: Call, to: usize, data: &[u8]) -> Result<Spent> {
        let begin = Instant::now();
        // A send cannot be taken back, so it must own what it sends to be able to end within the time-out.
        let sent = self.shared.post_send(&call, to, Cargo::Bytes(data.into()))?;
        let started = Instant::now();
        self.shared.await_sent(&call, to, sent)?;
        Ok(Spent { waiting: started.elapsed(), moving: started - begin })
    }

    fn recv(&self, call: Call, from: usize, data: &mut [u8]) -> Result<Spent> {
        self.shared.recv(&call, from, data)
    }

    fn send_recv(&self, send: (Call, usize, &[u8]), recv: (Call, usize, &mut [u8])) -> Result<(Spent, Spent)> {
        let ((give, to, out), (take, from, into)) = (send, recv);
        let begin = Instant::now();
        let sent = self.shared.post_send(&give, to, Cargo::Bytes(out.into()))?;
        let moving = begin.elapsed();
        let received = match self.shared.recv(&take, from, into) {
            Ok(received) => received,
            Err(error) => {
                self.shared.world.keep(sent);
                return Err(error);
            }
        };
        let waited = Instant::now();
        self.shared.await_sent(&give, to, sent)?;
        Ok((Spent { waiting: waited.elapsed(), moving }, received))
    }

    fn post_send(&self, call: Call, to: usize, tensor: Tensor) -> Result<Box<dyn InFlight>> {
        let data = Some(self.shared.post_send(&call, to, Cargo::Tensor(tensor))?);
        Ok(Box::new(Flight { shared: Arc::clone(&self.shared), call, peer: to, header: None, data: Mutex::new(data) }))
    }

    fn post_recv(&self, call: Call, from: usize, tensor: Tensor) -> Result<Box<dyn InFlight>> {
        let s = &self.shared;
        let header = Some(s.post_header(&call, from)?);
        let data = s.world.wire.receive(s.members[from], s.tag + MAIL, Cargo::Tensor(tensor));
        let data = Mutex::new(Some(s.mpi(&call, data)?));
        Ok(Box::new(Flight { shared: Arc::clone(s), call, peer: from, header, data }))
    }
}

/// A tensor on its way; dropped, it goes on.
struct Flight {
    shared: Arc<Shared>,
    call: Call,
    peer: usize,
    header: Option<Parcel>,
    data: Mutex<Option<Parcel>>,
}

impl InFlight for Flight {
    fn is_done(&self) -> bool {
        self.shared.world.listen();
        self.shared.world.failure().is_some()
            || lock(&self.data).as_mut().is_none_or(|data| !matches!(data.poll(), Ok(false)))
    }

    fn wait(mut self: Box<Self>) -> Result<(Tensor, Spent)> {
        let begin = Instant::now();
        let mut header = self.header.take();
        self.shared.await_header(&self.call, self.peer, &mut header)?;
        let started = Instant::now();
        let data = lock(&self.data).take().expect("taken once, here");
        let mut data = self.shared.await_sent(&self.call, self.peer, data)?;
        self.shared.mpi(&self.call, data.poll())?;
        match data.open() {
            Some(Cargo::Tensor(tensor)) => Ok((tensor, Spent { waiting: started - begin, moving: started.elapsed() })),
            _ => Err(self.shared.interrupted(&self.call)),
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let rest = self.header.take().into_iter().chain(lock(&self.data).take());
        rest.for_each(|parcel| self.shared.world.keep(parcel));
    }
}
