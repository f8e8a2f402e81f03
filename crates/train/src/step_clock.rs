//! How each rank spends its steps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use phalanx_comm::World;
use phalanx_parallel::Distributed;
use phalanx_report::stragglers::RankStep;

use crate::Result;

/// Measures one step of a rank.
pub struct StepClock {
    begun: Instant,
    data: Duration,
    tokens: u64,
    blocked: Duration,
    groups: BTreeMap<String, [f64; 3]>,
}

impl StepClock {
    /// A step begins.
    pub fn start(d: &Distributed) -> StepClock {
        StepClock { begun: Instant::now(), data: Duration::ZERO, tokens: 0, blocked: d.blocked(), groups: groups(d) }
    }

    /// Data were read for so long, so many tokens of this rank's own.
    pub fn data(&mut self, took: Duration, tokens: u64) {
        self.data += took;
        self.tokens += tokens;
    }

    /// The step is done. Every rank gets how all of them spent it.
    ///
    /// # Errors
    /// If a peer fails.
    pub fn finish(self, step: u64, d: &Distributed) -> Result<Vec<RankStep>> {
        let all = self.begun.elapsed().as_secs_f64();
        let since = |(name, now): (String, [f64; 3])| {
            let before = self.groups.get(&name).copied().unwrap_or_default();
            (name, [0, 1, 2].map(|i| now[i] - before[i]))
        };
        let spent: BTreeMap<String, [f64; 3]> = groups(d).into_iter().map(since).collect();
        // What the sharding group does runs beside the computing; only where that stood still for it does it count.
        let calls: f64 = spent.iter().filter(|(name, _)| *name != "fsdp").map(|(_, g)| g[0] + g[1]).sum();
        let blocked = (d.blocked() - self.blocked).as_secs_f64();
        let data = self.data.as_secs_f64();
        let compute = (all - data - calls - blocked).max(0.0);
        let mut own = vec![compute, data, self.tokens as f64];
        own.extend(spent.values().flatten());
        let world = d.mesh().group::<World>();
        let mut numbers = vec![0.0; own.len() * world.size()];
        world.all_gather(&own, &mut numbers)?;
        let rank = |(rank, n): (usize, &[f64])| {
            let at = d.mesh().shape().coordinates(rank);
            let groups = spent.keys().cloned().zip(n[3..].chunks(3).map(|g| [g[0], g[1], g[2]])).collect();
            let role = format!("stage {}, experts {}", at.pp, at.ep);
            RankStep { step, rank, role, compute: n[0], data: n[1], tokens: n[2] as u64, groups }
        };
        Ok(numbers.chunks(own.len()).enumerate().map(rank).collect())
    }
}

/// Waiting, moving and bytes of each group so far. All axes are there, so that all ranks have the same ones.
fn groups(d: &Distributed) -> BTreeMap<String, [f64; 3]> {
    let totals = d.mesh().traffic().into_iter().map(|(axis, traffic)| {
        let t = traffic.total();
        (axis.name().to_owned(), [t.waiting.as_secs_f64(), t.moving.as_secs_f64(), t.bytes_sent as f64])
    });
    totals.collect()
}
