//! ZB-H1: 1F1B whose weight gradients fill the bubble.

use super::deferred::RankList;
use super::{ScheduleKind, check_numbers};
use crate::pipeline::{Placement, Schedule, ScheduleError};

/// ZB-H1 (ZB1P; Qi et al. 2023, <https://arxiv.org/abs/2401.10241>): 1F1B with B cut into I and W, rank r keeping r weight gradients back
/// for the time when it would wait at the end.
///
/// Bubble (p−1)(F+I−W), a third of 1F1B's when the three take equally long. Rank r keeps in W what it has less in forwards, so that every rank
/// holds p micro-batches: the most that any rank of 1F1B holds.
///
/// # Errors
/// No ranks or no micro-batches.
pub fn zero_bubble_h1(num_ranks: usize, num_micro_batches: usize) -> Result<Schedule, ScheduleError> {
    check_numbers(ScheduleKind::ZeroBubbleH1, num_ranks, num_micro_batches, 1)?;
    let ranks = (0..num_ranks).map(|rank| {
        let mut list = RankList::new(&[rank]);
        let ahead = (num_ranks - rank - 1).min(num_micro_batches);
        (0..ahead).for_each(|_| list.f(0));
        for k in 0..num_micro_batches {
            if k < num_micro_batches - ahead {
                list.f(0);
            }
            list.b(0, true);
            // In the cool-down there is a wait between two I, to be filled even by a W that is not due yet.
            if list.num_waiting() > rank || k >= num_micro_batches - ahead {
                list.w();
            }
        }
        (0..list.num_waiting()).for_each(|_| list.w());
        list.actions
    });
    Ok(Schedule {
        name: "ZB-H1".into(),
        num_micro_batches,
        ranks: ranks.collect(),
        placement: Placement::linear(num_ranks),
    })
}
