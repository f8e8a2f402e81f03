//! Which rank keeps the others waiting, and why.
//!
//! In synchronous training every rank's step takes the same time, so the time of a step says nothing. What differs is how it is spent: the
//! slow rank computes long and waits little, the others wait for it. So ranks of the same role (the same pipeline stage) are compared in what
//! they compute, by a z-score that outliers cannot move: z = (x − median) / (1.4826 · MAD), the median absolute deviation being taken as at least
//! [`FLOOR`] of the median. A rank is named when it is beyond [`LIMIT`] in most of the last steps.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// z beyond which a rank stands out.
pub const LIMIT: f64 = 4.0;
/// Least deviation that counts, as a part of the median: what every machine does.
pub const FLOOR: f64 = 0.03;
/// Part of the steps in which a rank must stand out to be named.
pub const MOST: f64 = 0.6;

/// How one rank spent one step; seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStep {
    /// Step.
    pub step: u64,
    /// Rank.
    pub rank: usize,
    /// Ranks of one role do the same work.
    pub role: String,
    /// Computing.
    pub compute: f64,
    /// Reading data.
    pub data: f64,
    /// Tokens of its own.
    pub tokens: u64,
    /// By group of ranks: waiting for peers, moving data, and bytes sent.
    pub groups: BTreeMap<String, [f64; 3]>,
}

impl RankStep {
    /// One line of `ranks.jsonl`.
    pub fn to_json(&self) -> Value {
        let group =
            |[waiting, moving, bytes]: &[f64; 3]| json!({"wait": waiting, "move": moving, "bytes": *bytes as u64});
        let groups: Map<String, Value> = self.groups.iter().map(|(name, g)| (name.clone(), group(g))).collect();
        json!({"step": self.step, "rank": self.rank, "role": self.role, "compute": self.compute, "data": self.data,
            "tokens": self.tokens, "groups": groups})
    }

    /// Reads such a line; `None` if it is none.
    pub fn from_json(v: &Value) -> Option<RankStep> {
        let group = |g: &Value| Some([g["wait"].as_f64()?, g["move"].as_f64()?, g["bytes"].as_f64()?]);
        let groups = v["groups"].as_object()?.iter().map(|(name, g)| Some((name.clone(), group(g)?)));
        Some(RankStep {
            step: v["step"].as_u64()?,
            rank: v["rank"].as_u64()? as usize,
            role: v["role"].as_str()?.to_owned(),
            compute: v["compute"].as_f64()?,
            data: v["data"].as_f64()?,
            tokens: v["tokens"].as_u64()?,
            groups: groups.collect::<Option<_>>()?,
        })
    }
}

/// Why a rank is slow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It has more tokens than the others: no fault of the machine.
    Load,
    /// It waits for its data.
    Data,
    /// It computes the same work more slowly.
    SlowRank,
    /// It moves the same bytes more slowly in this group.
    SlowLink(String),
}

impl Cause {
    /// What it is, and what to look at.
    pub fn advice(&self) -> String {
        match self {
            Cause::Load => "more tokens than its peers: balance the batches (packing, shorter cutoff_len)".into(),
            Cause::Data => "slow data: look at the disk and at what else reads from it".into(),
            Cause::SlowRank => {
                "a slow rank: the same work takes it longer; look at its cores, clock and other load".into()
            }
            Cause::SlowLink(group) => format!("a slow link: the same bytes take it longer in group {group}"),
        }
    }
}

/// A rank that stands out.
#[derive(Clone, Debug, PartialEq)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// Why.
    pub cause: Cause,
    /// Steps in which it stood out, of those looked at.
    pub steps: (usize, usize),
    /// Median of its time over the median of its role's: how much it costs.
    pub times: f64,
}

/// The ranks that stand out in `steps`.
pub fn stragglers(steps: &[RankStep]) -> Vec<Straggler> {
    let mut out = vec![];
    let mut by_role: BTreeMap<&str, BTreeMap<u64, Vec<&RankStep>>> = BTreeMap::new();
    for s in steps {
        by_role.entry(&s.role).or_default().entry(s.step).or_default().push(s);
    }
    for of_role in by_role.values() {
        let windows: Vec<&Vec<&RankStep>> = of_role.values().filter(|w| w.len() > 1).collect();
        let mut ranks: Vec<usize> = windows.iter().flat_map(|w| w.iter().map(|s| s.rank)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let names: Vec<String> = {
            let all = windows.iter().flat_map(|w| w.iter().flat_map(|s| s.groups.keys().cloned()));
            all.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
        };
        for rank in ranks {
            // Data first: what waits for data does not compute. A short reading is no reading.
            if let Some((steps, times)) = stands_out(&windows, rank, &|s| s.data, 1e-3) {
                out.push(Straggler { rank, cause: Cause::Data, steps, times });
            }
            if let Some((steps, times)) = stands_out(&windows, rank, &|s| s.compute, 1e-4) {
                let loaded = stands_out(&windows, rank, &|s| s.tokens as f64, 0.0).is_some();
                let cause = if loaded { Cause::Load } else { Cause::SlowRank };
                out.push(Straggler { rank, cause, steps, times });
            }
            for name in &names {
                let seconds_a_byte =
                    |s: &RankStep| s.groups.get(name).map_or(0.0, |[_, moving, bytes]| moving / bytes.max(1.0));
                let moved = |s: &RankStep| s.groups.get(name).map_or(0.0, |g| g[1]);
                if stands_out(&windows, rank, &moved, 1e-3).is_some()
                    && let Some((steps, times)) = stands_out(&windows, rank, &seconds_a_byte, 0.0)
                {
                    out.push(Straggler { rank, cause: Cause::SlowLink(name.clone()), steps, times });
                }
            }
        }
    }
    out
}

/// Whether a rank is beyond the limit in most steps: in how many, and by which factor. A difference below `least` never counts.
fn stands_out(
    windows: &[&Vec<&RankStep>],
    rank: usize,
    of: &dyn Fn(&RankStep) -> f64,
    least: f64,
) -> Option<((usize, usize), f64)> {
    let (mut beyond, mut seen, mut factors) = (0, 0, vec![]);
    for window in windows {
        let Some(own) = window.iter().find(|s| s.rank == rank).map(|s| of(s)) else { continue };
        seen += 1;
        // The rank itself is left out: of two ranks the slow one would be half of the median.
        let mut others: Vec<f64> = window.iter().filter(|s| s.rank != rank).map(|s| of(s)).collect();
        let middle = median(&mut others);
        let mut deviations: Vec<f64> = others.iter().map(|x| (x - middle).abs()).collect();
        let deviation = (1.4826 * median(&mut deviations)).max(FLOOR * middle).max(f64::MIN_POSITIVE);
        if (own - middle) / deviation > LIMIT && own - middle > least {
            beyond += 1;
        }
        if middle > 0.0 {
            factors.push(own / middle);
        }
    }
    let most = seen >= 3 && beyond as f64 >= MOST * seen as f64;
    most.then(|| ((beyond, seen), if factors.is_empty() { f64::INFINITY } else { median(&mut factors) }))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four ranks of two stages, ten steps, with the jitter of a busy machine.
    fn run(change: impl Fn(&mut RankStep)) -> Vec<Straggler> {
        let mut steps = vec![];
        for step in 0..10u64 {
            for rank in 0..8 {
                let jitter = 1.0 + 0.02 * (((step * 7 + rank as u64 * 5) % 11) as f64 - 5.0) / 5.0;
                let role = format!("stage {}", rank / 4);
                // The second stage has the head: twice the work, and no fault.
                let compute = jitter * if rank < 4 { 1.0 } else { 2.0 };
                let groups = [("fsdp".to_owned(), [0.2, 0.1 * jitter, 1e6])].into();
                let mut s = RankStep { step, rank, role, compute, data: 0.001, tokens: 512, groups };
                change(&mut s);
                steps.push(s);
            }
        }
        let lines: Vec<RankStep> = steps.iter().map(|s| RankStep::from_json(&s.to_json()).unwrap()).collect();
        assert_eq!(lines, steps);
        stragglers(&lines)
    }

    #[test]
    fn each_cause_is_told_from_the_others() {
        assert_eq!(run(|_| {}), []);
        let named = |change: &dyn Fn(&mut RankStep)| {
            let found = run(|s| {
                if s.rank == 2 {
                    change(s);
                }
            });
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].rank, 2);
            found[0].cause.clone()
        };
        assert_eq!(named(&|s| s.compute *= 1.5), Cause::SlowRank);
        assert_eq!(named(&|s| (s.compute, s.tokens) = (1.5 * s.compute, 768)), Cause::Load);
        assert_eq!(named(&|s| s.data = 0.4), Cause::Data);
        assert_eq!(named(&|s| s.groups.get_mut("fsdp").unwrap()[1] *= 3.0), Cause::SlowLink("fsdp".into()));
        // Twice as many bytes in twice the time are no slow link; one slow step is no slow rank.
        assert_eq!(
            run(|s| if s.rank == 2 {
                *s.groups.get_mut("fsdp").unwrap() = [0.1, 0.2, 2e6]
            }),
            []
        );
        assert_eq!(
            run(|s| if (s.rank, s.step) == (2, 5) {
                s.compute = 9.0
            }),
            []
        );
    }
}
