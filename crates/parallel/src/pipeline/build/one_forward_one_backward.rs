//! 1F1B: backward as soon as possible.

use super::deferred::RankList;
use super::{ScheduleKind, check_numbers};
use crate::pipeline::{Placement, Schedule, ScheduleError};

/// 1F1B (PipeDream-Flush; Narayanan et al. 2020, <https://arxiv.org/abs/2006.09503>): rank r goes p−r−1 micro-batches ahead, then one
/// forward and one backward in turn, then the backwards left over.
///
/// Bubble (p−1)(F+B) as GPipe, but rank r holds min(m, p−r) micro-batches, however long the step.
///
/// # Errors
/// No ranks or no micro-batches.
pub fn one_forward_one_backward(num_ranks: usize, num_micro_batches: usize) -> Result<Schedule, ScheduleError> {
    check_numbers(ScheduleKind::OneForwardOneBackward, num_ranks, num_micro_batches, 1)?;
    let ranks = (0..num_ranks).map(|rank| {
        let mut list = RankList::new(&[rank]);
        let ahead = (num_ranks - rank - 1).min(num_micro_batches);
        (0..ahead).for_each(|_| list.f(0));
        for _ in ahead..num_micro_batches {
            list.f(0);
            list.b(0, false);
        }
        (0..ahead).for_each(|_| list.b(0, false));
        list.actions
    });
    Ok(Schedule {
        name: "1F1B".into(),
        num_micro_batches,
        ranks: ranks.collect(),
        placement: Placement::linear(num_ranks),
    })
}
