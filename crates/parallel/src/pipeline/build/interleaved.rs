//! Interleaved 1F1B: several stages a rank.

use super::{ScheduleKind, check_numbers};
use crate::pipeline::{Action, Part, Placement, Schedule, ScheduleError};

/// Interleaved 1F1B, in Megatron-LM's order ("virtual pipeline"; Narayanan et al. 2021, <https://arxiv.org/abs/2104.04473>): v stages a rank
/// in a loop, so that a micro-batch passes every rank v times and the bubble is that of stages v times as short.
///
/// Bubble (p−1)(F+B)/v of a rank share, for v times the messages and, on rank 0, p(1 + (p−1)/(pv)) shares of activations instead of p.
///
/// Forward number k of a rank is on chunk (k mod pv) div p and micro-batch p (k div pv) + k mod p; backward goes through chunks the other way.
/// Rank r does 2(p−r−1) + (v−1)p forwards, then forward and backward in turn.
///
/// # Errors
/// A number of micro-batches that is no multiple of the ranks (groups of p micro-batches take turns on the chunks; a short group would leave
/// ranks waiting for each other), or fewer than 2 chunks.
pub fn interleaved(num_ranks: usize, num_micro_batches: usize, num_chunks: usize) -> Result<Schedule, ScheduleError> {
    let (p, m, v) = (num_ranks, num_micro_batches, num_chunks);
    check_numbers(ScheduleKind::Interleaved, p, m, v)?;
    let refuse = |what, mend| Err(ScheduleError::Numbers { schedule: "interleaved", what, mend });
    if v < 2 {
        return refuse("1 chunk a rank".into(), "take at least 2, or the schedule 1f1b".into());
    }
    if m % p != 0 {
        let below = m / p * p;
        let mend =
            if below == 0 { format!("take {p} micro-batches") } else { format!("take {below} or {}", below + p) };
        return refuse(
            format!("{m} micro-batches are no multiple of {p} ranks"),
            format!("{mend}, or the schedule 1f1b"),
        );
    }
    let ranks = (0..p).map(|rank| {
        let part = |k: usize, chunk: usize| Part::new(chunk * p + rank, k / (p * v) * p + k % p);
        let chunk = |k: usize| k % (p * v) / p;
        let forward = |k: usize| Action::Forward(part(k, chunk(k)));
        let backward = |k: usize| Action::Backward(part(k, v - 1 - chunk(k)));
        let total = m * v;
        let ahead = (2 * (p - rank - 1) + (v - 1) * p).min(total);
        let mut actions: Vec<_> = (0..ahead).map(forward).collect();
        for k in ahead..total {
            actions.extend([forward(k), backward(k - ahead)]);
        }
        actions.extend((total - ahead..total).map(backward));
        actions
    });
    Ok(Schedule {
        name: format!("interleaved 1F1B, {v} chunks a rank"),
        num_micro_batches,
        ranks: ranks.collect(),
        placement: Placement::looped(p, v),
    })
}
