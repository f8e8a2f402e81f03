//! What a rank sent, and where its time went: per group and kind of call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::Spent;
use crate::call::Kind;

/// Totals of one kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindTraffic {
    /// Calls that ended well.
    pub calls: u64,
    /// Bytes this rank sent (see [`Traffic`] for what counts).
    pub bytes_sent: u64,
    /// Time in which the rank waited for its peers.
    pub waiting: Duration,
    /// Time in which it moved or reduced data.
    pub moving: Duration,
}

/// A reading of one rank's traffic in one group.
///
/// # What counts as sent
/// The bytes that leave a rank for others in the direct algorithm; over the ranks of a group they add up to the usual figures
/// (P ranks, N bytes the full buffer), and in even cases each rank has just its share of them:
///
/// | call | this rank sends | even shards |
/// |---|---|---|
/// | all_gather | (P − 1) · its shard | (P − 1)/P · N |
/// | reduce_scatter | N − its shard | (P − 1)/P · N |
/// | all_reduce | N − its slice, then (P − 1) · its slice | 2 (P − 1)/P · N |
/// | all_to_all | what it sends to others | (P − 1)/P · N |
/// | broadcast | the root (P − 1) · N, others 0 | |
/// | send | N; a receive sends 0 | |
///
/// So a ZeRO-3 step (two all_gathers and one reduce_scatter of the parameters) counts 3 (P − 1)/P · N. A group of one sends
/// nothing and counts no calls.
///
/// # Waiting
/// In synchronous training every rank's step takes the same time; the slow rank is the one that waits *least*. So waiting is
/// kept apart from moving.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    kinds: [KindTraffic; Kind::ALL.len()],
}

impl Traffic {
    /// Totals of one kind.
    pub fn of(&self, kind: Kind) -> KindTraffic {
        self.kinds[kind as usize]
    }

    /// Totals of all kinds that were called.
    pub fn kinds(&self) -> impl Iterator<Item = (Kind, KindTraffic)> + '_ {
        Kind::ALL.into_iter().map(|k| (k, self.of(k))).filter(|(_, t)| t.calls > 0)
    }

    /// Totals over all kinds.
    pub fn total(&self) -> KindTraffic {
        self.kinds.iter().fold(KindTraffic::default(), |a, b| KindTraffic {
            calls: a.calls + b.calls,
            bytes_sent: a.bytes_sent + b.bytes_sent,
            waiting: a.waiting + b.waiting,
            moving: a.moving + b.moving,
        })
    }
}

#[derive(Default)]
struct Counter {
    calls: AtomicU64,
    bytes: AtomicU64,
    waiting: AtomicU64,
    moving: AtomicU64,
}

/// The running counters behind [`Traffic`].
#[derive(Default)]
pub(crate) struct Counters([Counter; Kind::ALL.len()]);

impl Counters {
    pub(crate) fn add(&self, kind: Kind, bytes: usize, spent: Spent) {
        let c = &self.0[kind as usize];
        c.calls.fetch_add(1, Ordering::Relaxed);
        c.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        c.waiting.fetch_add(spent.waiting.as_nanos() as u64, Ordering::Relaxed);
        c.moving.fetch_add(spent.moving.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Traffic {
        self.map(|a| a.load(Ordering::Relaxed))
    }

    pub(crate) fn take(&self) -> Traffic {
        self.map(|a| a.swap(0, Ordering::Relaxed))
    }

    fn map(&self, read: impl Fn(&AtomicU64) -> u64) -> Traffic {
        let kinds = std::array::from_fn(|i| {
            let c = &self.0[i];
            KindTraffic {
                calls: read(&c.calls),
                bytes_sent: read(&c.bytes),
                waiting: Duration::from_nanos(read(&c.waiting)),
                moving: Duration::from_nanos(read(&c.moving)),
            }
        });
        Traffic { kinds }
    }
}
