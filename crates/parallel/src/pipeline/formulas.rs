//! Bubble and memory in closed form.
//!
//! The simulator knows more; these say *why* it gets what it gets, and tests hold the two against each other.

use super::{Durations, ScheduleKind};

/// What theory says of a schedule when all stages take as long and messages take no time.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicted {
    /// Time that the most idle rank is idle, in the unit of the durations; only of `dualpipev`, whose ranks run different numbers of pairs,
    /// are some less idle, when pairs gain something.
    pub idle: f64,
    /// The most activations of each rank, in stages × micro-batches.
    pub peak_stages: Vec<usize>,
}

/// Idle time and peak of activations of a schedule; F, I, W of one stage from `durations`, whose latency and scales are left aside.
///
/// | schedule | idle | peak on rank r, in stages |
/// |---|---|---|
/// | gpipe | (p−1)(F+B) | m |
/// | 1f1b | (p−1)(F+B) | min(m, p−r) |
/// | interleaved | (p−1)(F+B) | min(mv, 2(p−r−1) + (v−1)p + 1) |
/// | zb-h1 | (p−1)(F+I−W) | min(m, p) |
/// | zb-v | p−1 times F, all of it before the first or after the last action | 2p |
/// | dualpipev | (p−1)(FB+B−3W) | 2p+1 |
///
/// None where the formula does not hold: zb-h1 needs m ≥ p and W no longer than F and I; zb-v F = I = W and m ≥ 2p−1; interleaved
/// p | m; dualpipev m ≥ 2p, and F = I = W with a pair between B and F + B (otherwise waits shift; see the simulator).
pub fn predicted(
    kind: ScheduleKind,
    num_ranks: usize,
    num_micro_batches: usize,
    num_chunks: usize,
    durations: &Durations,
) -> Option<Predicted> {
    let (p, m, v) = (num_ranks, num_micro_batches, num_chunks);
    if p == 0 || m == 0 || v == 0 {
        return None;
    }
    let Durations { forward: f, input_grad: i, weight_grad: w, .. } = *durations;
    let b = i + w;
    let alike = f == i && i == w;
    let ramp = (p - 1) as f64;
    let each = |peak: &dyn Fn(usize) -> usize| (0..p).map(peak).collect();
    let (idle, peak_stages) = match kind {
        ScheduleKind::GPipe => (ramp * (f + b), each(&|_| m)),
        ScheduleKind::OneForwardOneBackward => (ramp * (f + b), each(&|r| m.min(p - r))),
        ScheduleKind::Interleaved if m % p == 0 && v > 1 => {
            (ramp * (f + b), each(&|r| (m * v).min(2 * (p - r - 1) + (v - 1) * p + 1)))
        }
        ScheduleKind::ZeroBubbleH1 if m >= p && w <= f && w <= i => (ramp * (f + i - w), each(&|_| p)),
        ScheduleKind::ZeroBubbleV if alike && m + 1 >= 2 * p => (ramp * f, each(&|_| 2 * p)),
        ScheduleKind::DualPipeV if alike && m >= 2 * p => {
            let pair = durations.overlapped.unwrap_or(f + b);
            if pair < b || pair > f + b {
                return None;
            }
            (ramp * (pair + b - 3.0 * w), each(&|_| 2 * p + 1))
        }
        _ => return None,
    };
    Some(Predicted { idle, peak_stages })
}
