//! DualPipeV: forward and backward at once, each hiding the other's messages.

use super::deferred::RankList;
use super::{ScheduleKind, check_numbers};
use crate::pipeline::{Placement, Schedule, ScheduleError};

/// DualPipeV (DeepSeek-V3's DualPipe, <https://arxiv.org/abs/2412.19437>, folded into a V so that weights are held once; "cut-in-half",
/// Sea AI Lab 2025; order of <https://github.com/deepseek-ai/DualPipe>): two stages a rank in a V, and in the steady phase a forward of one
/// and a backward of the other run as an overlapped pair F⊕B.
///
/// Bubble (R−1)(FB + B − 3W) in times of a stage, FB being the time of a pair; every rank holds 2R+1 stages' activations, that is R + ½ rank
/// shares. Meant for experts in parallel, where half the time of a layer is messages.
///
/// `split_cooldown` defers weight gradients at the end; without it the bubble is (R−1)(FB + B − W).
///
/// # Errors
/// Fewer micro-batches than 2 R: the two directions would not fill.
pub fn dual_pipe_v(
    num_ranks: usize,
    num_micro_batches: usize,
    split_cooldown: bool,
) -> Result<Schedule, ScheduleError> {
    let (p, m) = (num_ranks, num_micro_batches);
    check_numbers(ScheduleKind::DualPipeV, p, m, 2)?;
    if m < 2 * p {
        return Err(ScheduleError::Numbers {
            schedule: "dualpipev",
            what: format!("{m} micro-batches do not fill {p} ranks in two directions"),
            mend: format!("take at least {}, or the schedule zb-v", 2 * p),
        });
    }
    let ranks = (0..p).map(|rank| {
        let mut list = RankList::new(&[rank, 2 * p - 1 - rank]);
        let after = p - rank - 1;
        // 1. Fill the way down.
        (0..2 * after).for_each(|_| list.f(0));
        // 2. The way down and the way up.
        for _ in 0..=rank {
            list.f(0);
            list.f(1);
        }
        // 3. The first gradients come; the rank above waits for I, so W comes after.
        for _ in 0..after {
            list.b(1, true);
            list.w();
            list.f(1);
        }
        // 4. Pairs.
        for i in 0..m - 2 * p + rank + 1 {
            if i == 0 && after == 0 {
                // At the turn of the V the backward comes straight from the forward before: as a pair, all ranks would wait for it.
                list.f(0);
                list.b(1, false);
            } else {
                list.f_and_b(0, 1);
            }
            list.f_and_b(1, 0);
        }
        // 5. No more to go down.
        for _ in 0..after {
            list.b(1, false);
            list.f_and_b(1, 0);
        }
        // 6. Only backward is left. The last rank + 1 of these keep their W back for the waits to come.
        let backwards = 2 * (rank + 1);
        for i in 0..backwards {
            list.b((i + 1) % 2, split_cooldown && i > rank);
        }
        // 7. Gradients come one by one, W between them.
        for _ in 0..after {
            list.w();
            list.b(0, split_cooldown);
        }
        // 8. What is left.
        (0..list.num_waiting()).for_each(|_| list.w());
        list.actions
    });
    let name = if split_cooldown { "DualPipeV" } else { "DualPipeV without a split cool-down" };
    Ok(Schedule { name: name.into(), num_micro_batches, ranks: ranks.collect(), placement: Placement::v_shaped(p) })
}
