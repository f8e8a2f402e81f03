//! ZB-V: no bubble at all, with the memory of 1F1B.

use super::deferred::RankList;
use super::{ScheduleKind, check_numbers};
use crate::pipeline::{Placement, Schedule, ScheduleError};

/// ZB-V (Qi et al. 2023, section 6, <https://arxiv.org/abs/2401.10241>): two stages a rank in a V, so that the rank with the first stage has
/// the last one too and need not wait for the first backward.
///
/// With F = I = W no rank waits between its first and its last action when m ≥ 2p−1, and none holds more than p rank shares. When the three
/// differ it waits; with fewer micro-batches than 2p−1 it waits for lack of work.
///
/// Rank r: 2(p−r)−1 × F0; r × {F1, F0}; p−r × {F1, I1, W1}; then {F0, I0, W0, F1, I1, W1}; r × {I0, I1}; p−r × {I0, W}; the W left over.
/// Deferred W run in the order in which they were put off.
///
/// # Errors
/// No ranks or no micro-batches.
pub fn zero_bubble_v(num_ranks: usize, num_micro_batches: usize) -> Result<Schedule, ScheduleError> {
    let (p, m) = (num_ranks, num_micro_batches);
    check_numbers(ScheduleKind::ZeroBubbleV, p, m, 2)?;
    // The order is that of a full pipeline; what it says about micro-batches beyond the last falls out.
    let full = m.max(2 * p - 1);
    super::check_size(2 * p, full)?;
    let ranks = (0..p).map(|rank| {
        let mut list = RankList::new(&[rank, 2 * p - 1 - rank]);
        let backward_now = |list: &mut RankList, chunk| {
            list.b(chunk, true);
            list.w();
        };
        (0..2 * (p - rank) - 1).for_each(|_| list.f(0));
        for _ in 0..rank {
            list.f(1);
            list.f(0);
        }
        for _ in 0..p - rank {
            list.f(1);
            backward_now(&mut list, 1);
        }
        while list.num_forward(1) < full {
            if list.num_forward(0) < full {
                list.f(0);
            }
            backward_now(&mut list, 0);
            list.f(1);
            backward_now(&mut list, 1);
        }
        for _ in 0..rank {
            list.b(0, true);
            list.b(1, true);
        }
        for _ in 0..p - rank {
            list.b(0, true);
            list.w();
        }
        (0..list.num_waiting()).for_each(|_| list.w());
        list.actions.retain(|a| a.parts().all(|part| part.micro_batch < m));
        list.actions
    });
    Ok(Schedule { name: "ZB-V".into(), num_micro_batches, ranks: ranks.collect(), placement: Placement::v_shaped(p) })
}
