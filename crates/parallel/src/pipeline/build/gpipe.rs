//! GPipe: all forwards, then all backwards.

use super::deferred::RankList;
use super::{ScheduleKind, check_numbers};
use crate::pipeline::{Placement, Schedule, ScheduleError};

/// All micro-batches forward, then all backward (Huang et al. 2018, <https://arxiv.org/abs/1811.06965>; "all forward, all backward").
///
/// The simplest order, with the bubble of 1F1B, (p−1)(F+B), and the activations of all m micro-batches held at once: use it to check others
/// against. Backward goes through micro-batches from the first on, not from the last as in the paper: the same time, and gradients add up in
/// the order of all other schedules here.
///
/// # Errors
/// No ranks or no micro-batches.
pub fn gpipe(num_ranks: usize, num_micro_batches: usize) -> Result<Schedule, ScheduleError> {
    check_numbers(ScheduleKind::GPipe, num_ranks, num_micro_batches, 1)?;
    let ranks = (0..num_ranks).map(|rank| {
        let mut list = RankList::new(&[rank]);
        (0..num_micro_batches).for_each(|_| list.f(0));
        (0..num_micro_batches).for_each(|_| list.b(0, false));
        list.actions
    });
    Ok(Schedule {
        name: "GPipe".into(),
        num_micro_batches,
        ranks: ranks.collect(),
        placement: Placement::linear(num_ranks),
    })
}
