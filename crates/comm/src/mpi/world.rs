//! What the groups of one process share: the wire, the failure, and what is still on its way.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::wire::{Cargo, Parcel, Wire};
use crate::CommOptions;
use crate::error::CommError;

/// The tag of messages that say that a rank has failed.
const FAILURE: i32 = 1;
/// The tag of messages that say that a rank knows of the failure and has nothing more to do.
const LEAVING: i32 = 2;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Why a wait ended without what it waited for.
pub(super) enum Stop {
    /// The world has failed.
    Failed,
    /// The time is over.
    Timeout,
    /// MPI reports an error.
    Mpi(String),
}

pub(super) struct World {
    pub(super) wire: Wire,
    pub(super) options: CommOptions,
    pub(super) rank: usize,
    pub(super) size: usize,
    failure: OnceLock<CommError>,
    /// Messages that nobody waits for any more.
    orphans: Mutex<Vec<Parcel>>,
    /// How many other ranks have said that they leave.
    leaving: AtomicUsize,
    /// Which group has which tags.
    tags: Mutex<BTreeMap<i32, u64>>,
}

impl World {
    pub(super) fn new(wire: Wire, options: CommOptions, rank: usize, size: usize) -> World {
        World {
            wire,
            options,
            rank,
            size,
            failure: OnceLock::new(),
            orphans: Mutex::default(),
            leaving: AtomicUsize::new(0),
            tags: Mutex::default(),
        }
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// Records the first failure, and tells the other processes of it.
    pub(super) fn fail(&self, failure: CommError) -> CommError {
        let mut first_here = false;
        let first = self.failure.get_or_init(|| {
            first_here = true;
            failure.root_cause().clone()
        });
        if first_here {
            let mut text = vec![u8::from(matches!(first, CommError::RankPanicked { .. }))];
            text.push(u8::from(matches!(first, CommError::RankFailed { .. })));
            text.extend((first.culprit().unwrap_or(self.rank) as u64).to_le_bytes());
            match first {
                CommError::RankFailed { message, .. } => text.extend(message.as_bytes()),
                other => text.extend(other.to_string().as_bytes()),
            }
            text.truncate(16 << 10);
            for to in (0..self.size).filter(|&to| to != self.rank) {
                if let Ok(parcel) = self.wire.send(to, FAILURE, Cargo::Bytes(text.clone())) {
                    self.keep(parcel);
                }
            }
        }
        first.clone()
    }

    /// Hears of failures of other processes, and forgets what has arrived. Lets MPI work, too.
    pub(super) fn listen(&self) {
        if let Some((from, bytes)) = self.wire.unasked(FAILURE)
            && bytes.len() >= 10
        {
            let rank = u64::from_le_bytes(std::array::from_fn(|i| bytes[2 + i])) as usize;
            let message = String::from_utf8_lossy(&bytes[10..]).into_owned();
            self.failure.get_or_init(|| match (bytes[0], bytes[1]) {
                (1, _) => CommError::RankPanicked { rank },
                (_, 1) => CommError::RankFailed { rank, message },
                _ => CommError::Reported { rank: from, message },
            });
        }
        while self.wire.unasked(LEAVING).is_some() {
            self.leaving.fetch_add(1, Ordering::Relaxed);
        }
        lock(&self.orphans).retain_mut(|parcel| matches!(parcel.poll(), Ok(false)));
    }

    /// After a failure: waits until all ranks know of it, for no longer than `grace`. The first process that exits takes the others
    /// with it, so that they could not say why.
    pub(super) fn leave(&self, grace: Duration) {
        let since = Instant::now();
        for to in (0..self.size).filter(|&to| to != self.rank) {
            if let Ok(parcel) = self.wire.send(to, LEAVING, Cargo::Bytes(vec![])) {
                self.keep(parcel);
            }
        }
        while since.elapsed() < grace && self.leaving.load(Ordering::Relaxed) + 1 < self.size {
            self.listen();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Takes over a message that its owner does not wait for.
    pub(super) fn keep(&self, parcel: Parcel) {
        lock(&self.orphans).push(parcel);
    }

    /// Waits until `done`: at full speed for some microseconds, then letting others run, then sleeping between looks, since
    /// MPI itself only ever spins.
    pub(super) fn wait(&self, mut done: impl FnMut() -> Result<bool, String>) -> Result<(), Stop> {
        let begin = Instant::now();
        let mut looks = 0u32;
        loop {
            if done().map_err(Stop::Mpi)? {
                return Ok(());
            }
            looks += 1;
            if looks.is_multiple_of(64) || looks > 400 {
                self.listen();
                if self.failure.get().is_some() {
                    return Err(Stop::Failed);
                }
                if begin.elapsed() > self.options.timeout {
                    return Err(Stop::Timeout);
                }
            }
            match looks {
                0..=200 => std::hint::spin_loop(),
                201..=400 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(u64::from(looks.min(1000) - 400) / 4 + 20)),
            }
        }
    }

    /// The first of four tags for a group; two groups of this process never share them.
    pub(super) fn tags(&self, group: u64) -> Result<i32, u64> {
        // Below 2^22, which every MPI that this is likely to meet allows; 0 to 3 are taken.
        let tag = 4 + (group % ((1 << 20) - 1)) as i32 * 4;
        match *lock(&self.tags).entry(tag).or_insert(group) {
            there if there == group => Ok(tag),
            other => Err(other),
        }
    }
}
