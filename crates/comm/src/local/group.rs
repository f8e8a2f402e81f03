//! The meeting of a group's ranks: all come, all move data, all leave.
//!
//! # Why nobody can be left behind with a dangling buffer
//! A call has two waits. In the first, a rank may give up (time-out, failure elsewhere), but only by taking back its offer under
//! the lock under which the last comer starts the round; so either all ranks are in a round or none is. Once a round has
//! started nothing can end it early: ranks compare the calls, move memory and count themselves out, and none of these waits for
//! anything. So the second wait needs no time-out, and every buffer is still there when the last peer is through with it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::mail::Inbox;
use super::shared::Lent;
use super::world::{World, lock};
use crate::call::{Call, first_mismatch};
use crate::error::{CommError, Result};

/// How often a waiting rank looks at full speed, a few µs, where every rank has a core. Not longer: two ranks may well have been
/// put on one core, and each would then spin in the other's way (measured: 104 µs a small all_reduce instead of 4).
const SPINS: usize = 300;
/// How long it then goes on looking, letting others run in between: waking a thread of a virtual machine costs 50 µs and more.
const AWAKE: Duration = Duration::from_micros(50);

/// What one rank brings to a round.
pub(super) struct Offer {
    pub(super) call: Arc<Call>,
    /// Slices that peers may touch, in an order that the collective defines.
    pub(super) lent: Vec<Lent>,
}

/// A call that all ranks of the group have come to.
pub(super) struct Round {
    pub(super) offers: Vec<Offer>,
    through: AtomicUsize,
}

struct Meeting {
    offers: Vec<Option<Offer>>,
    arrived: usize,
    /// Rounds started so far, and the last of them.
    rounds: u64,
    round: Option<Arc<Round>>,
    sleepers: usize,
}

/// What the ranks of one group share.
pub(super) struct LocalGroup {
    pub(super) world: Arc<World>,
    pub(super) id: usize,
    pub(super) name: Arc<str>,
    /// Ranks of the world.
    pub(super) members: Vec<usize>,
    meeting: Mutex<Meeting>,
    wake: Condvar,
    /// A copy of `Meeting::rounds` for those who spin.
    started: AtomicU64,
    /// Members that have dropped their handle: told to those who wait in vain. It fails nobody by itself, since a rank that ends
    /// with an error gives up its handles one by one before its error is known.
    left: Vec<AtomicBool>,
    pub(super) inboxes: Vec<Inbox>,
}

impl LocalGroup {
    pub(super) fn new(world: Arc<World>, id: usize, name: Arc<str>, members: Vec<usize>) -> LocalGroup {
        let n = members.len();
        let meeting =
            Meeting { offers: (0..n).map(|_| None).collect(), arrived: 0, rounds: 0, round: None, sleepers: 0 };
        LocalGroup {
            world,
            id,
            name,
            members,
            meeting: Mutex::new(meeting),
            wake: Condvar::new(),
            started: AtomicU64::new(0),
            left: (0..n).map(|_| AtomicBool::new(false)).collect(),
            inboxes: (0..n).map(|_| Inbox::default()).collect(),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    pub(super) fn wake_all(&self) {
        drop(lock(&self.meeting));
        self.wake.notify_all();
        self.inboxes.iter().for_each(Inbox::wake_all);
    }

    /// Books that a member has given up its handle.
    pub(super) fn leave(&self, rank: usize) {
        self.left[rank].store(true, Ordering::Release);
        self.world.let_go(self.members[rank]);
    }

    /// Whether nothing more can come from a member: it has given up its last handle of any group.
    pub(super) fn is_gone(&self, rank: usize) -> bool {
        self.world.is_gone(self.members[rank])
    }

    pub(super) fn rank_left(&self, gone: usize, waiting: usize, call: &Call) -> CommError {
        CommError::RankLeft {
            rank: self.members[gone],
            group: self.name.to_string(),
            waiting: self.members[waiting],
            call: call.to_string(),
        }
    }

    pub(super) fn timeout(&self, rank: usize, call: &Call, missing: impl Iterator<Item = usize>) -> CommError {
        let describe = |r: usize| {
            let left = self.left[r].load(Ordering::Acquire);
            let left =
                if left { format!(", which has dropped its handle of group `{}`", self.name) } else { String::new() };
            self.world.describe(self.members[r]) + &left
        };
        let missing: Vec<String> = missing.map(describe).collect();
        CommError::Timeout {
            rank: self.members[rank],
            group: self.name.to_string(),
            call: call.to_string(),
            after: self.world.options.timeout,
            missing: missing.join(" and for "),
        }
    }

    /// The failure of the world as this call returns it: as it is to those whose call it was found in, with the call around it
    /// to the others.
    pub(super) fn interrupted(&self, rank: usize, call: &Call) -> CommError {
        let cause =
            self.world.failure().unwrap_or(CommError::RankFailed { rank: self.members[rank], message: String::new() });
        CommError::Interrupted {
            rank: self.members[rank],
            group: self.name.to_string(),
            call: call.to_string(),
            cause: Box::new(cause),
        }
    }

    /// Fails the world with what this call found, and says what this call returns: the finding itself if it was the first.
    pub(super) fn found(&self, rank: usize, call: &Call, found: CommError) -> CommError {
        let text = found.to_string();
        let first = self.world.fail(found);
        if first.to_string() == text { first } else { self.interrupted(rank, call) }
    }

    /// Looks at `done` at full speed, then letting others run, for as long as that pays; says whether it came true.
    pub(super) fn look_out(&self, eager: bool, done: impl Fn() -> bool) -> bool {
        let roomy = self.world.size <= self.world.options.cores;
        let spins = if eager && roomy { SPINS } else { 20 };
        for _ in 0..spins {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        let since = Instant::now();
        while eager && since.elapsed() < AWAKE {
            if done() {
                return true;
            }
            std::thread::yield_now();
        }
        done()
    }

    /// Waits until every rank has made its offer.
    fn come(&self, rank: usize, call: &Arc<Call>, lent: Vec<Lent>) -> Result<Arc<Round>> {
        let deadline = Instant::now() + self.world.options.timeout;
        let n = self.size();
        let target = {
            let mut meeting = lock(&self.meeting);
            if self.world.failed() {
                drop(meeting);
                return Err(self.interrupted(rank, call));
            }
            meeting.offers[rank] = Some(Offer { call: Arc::clone(call), lent });
            meeting.arrived += 1;
            if meeting.arrived == n {
                meeting.arrived = 0;
                let offers = meeting.offers.iter_mut().filter_map(Option::take).collect();
                let round = Arc::new(Round { offers, through: AtomicUsize::new(0) });
                meeting.round = Some(Arc::clone(&round));
                meeting.rounds += 1;
                self.started.store(meeting.rounds, Ordering::Release);
                if meeting.sleepers > 0 {
                    self.wake.notify_all();
                }
                return Ok(round);
            }
            meeting.rounds + 1
        };
        self.look_out(call.eager, || self.started.load(Ordering::Acquire) >= target || self.world.failed());
        let mut meeting = lock(&self.meeting);
        loop {
            if meeting.rounds >= target {
                // It is this rank's round: the next cannot start without it.
                return Ok(Arc::clone(meeting.round.as_ref().expect("a started round is kept until the next")));
            }
            let now = Instant::now();
            let absent = |m: &Meeting| -> Vec<usize> { (0..n).filter(|&r| m.offers[r].is_none()).collect() };
            let trouble = if self.world.failed() {
                Some(None)
            } else if let Some(gone) = absent(&meeting).into_iter().find(|&r| self.is_gone(r)) {
                Some(Some(self.rank_left(gone, rank, call)))
            } else if now >= deadline {
                Some(Some(self.timeout(rank, call, absent(&meeting).into_iter())))
            } else {
                None
            };
            if let Some(found) = trouble {
                meeting.offers[rank] = None;
                meeting.arrived -= 1;
                drop(meeting);
                return Err(match found {
                    Some(found) => self.found(rank, call, found),
                    None => self.interrupted(rank, call),
                });
            }
            meeting.sleepers += 1;
            meeting = self.wake.wait_timeout(meeting, deadline - now).map_or_else(|e| e.into_inner().0, |(m, _)| m);
            meeting.sleepers -= 1;
        }
    }

    /// Says that this rank is through, and waits until all are.
    fn go(&self, round: &Round, eager: bool) {
        let n = self.size();
        if round.through.fetch_add(1, Ordering::AcqRel) + 1 == n {
            if lock(&self.meeting).sleepers > 0 {
                self.wake.notify_all();
            }
            return;
        }
        let all = || round.through.load(Ordering::Acquire) == n;
        if self.look_out(eager, all) {
            return;
        }
        let mut meeting = lock(&self.meeting);
        while !all() {
            meeting.sleepers += 1;
            meeting = self.wake.wait(meeting).unwrap_or_else(|e| e.into_inner());
            meeting.sleepers -= 1;
        }
    }

    /// Meets the peers, compares the calls, and runs `work` while every rank's lent slices may be used.
    pub(super) fn meet(
        &self,
        rank: usize,
        call: &Arc<Call>,
        lent: Vec<Lent>,
        work: impl FnOnce(&Round),
    ) -> Result<crate::backend::Spent> {
        /// Leaves the round on every path, a panic in `work` included: peers must not wait for ever, and this rank's slices
        /// must not go before they are through.
        struct Inside<'a>(&'a LocalGroup, &'a Round, bool);
        impl Drop for Inside<'_> {
            fn drop(&mut self) {
                self.0.go(self.1, self.2);
            }
        }
        let world = &self.world;
        let begin = Instant::now();
        world.enter(self.members[rank], &self.name, call);
        let come = self.come(rank, call, lent);
        let started = Instant::now();
        let outcome = come.map(|round| {
            let inside = Inside(self, &round, call.eager);
            let calls: Vec<&Call> = round.offers.iter().map(|o| &*o.call).collect();
            let mismatch = first_mismatch(&calls).map(|(a, b, aspect)| CommError::Mismatch {
                group: self.name.to_string(),
                aspect,
                first_rank: self.members[a],
                first: calls[a].to_string(),
                second_rank: self.members[b],
                second: calls[b].to_string(),
            });
            if mismatch.is_none() {
                work(&round);
            }
            let moved = Instant::now();
            drop(inside);
            (mismatch, moved)
        });
        world.leave(self.members[rank], call);
        let (mismatch, moved) = outcome?;
        if let Some(found) = mismatch {
            return Err(self.found(rank, call, found));
        }
        let waiting = (started - begin) + moved.elapsed();
        Ok(crate::backend::Spent { waiting, moving: moved - started })
    }
}
