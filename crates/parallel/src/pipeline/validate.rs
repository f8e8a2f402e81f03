//! Whether a schedule computes everything, once, in an order that ends.

use std::collections::VecDeque;

use super::execution::walk;
use super::{Part, Schedule, ScheduleError};

/// What a sound schedule is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validated {
    /// For each rank the most weight gradients that wait at once: the length its queue needs.
    pub deferred: Vec<usize>,
    /// Whether every rank takes deferred weight gradients in the order in which they were put off, so that a plain queue does.
    pub fifo: bool,
    /// Whether each stage adds up its weight gradients in the order of micro-batches, so that the sum has the bits of any other such
    /// schedule.
    pub in_micro_batch_order: bool,
}

/// Checks that every stage sees every micro-batch in exactly one F, one I and one W (B is I and W), each on the rank that holds the stage;
/// that doing the lists in order ends; that W comes after I and I after F. Messages are not looked at
/// (see [`check_communication`](super::check_communication)).
///
/// # Errors
/// The first thing that is wrong.
pub fn validate(schedule: &Schedule) -> Result<Validated, ScheduleError> {
    schedule.check_shape()?;
    let (stages, m) = (schedule.num_stages(), schedule.num_micro_batches);
    let mut seen = [vec![false; stages * m], vec![false; stages * m], vec![false; stages * m]];
    const KINDS: [char; 3] = ['F', 'I', 'W'];
    for action in schedule.ranks.iter().flatten() {
        for (k, part) in [action.forward(), action.input_grad(), action.weight_grad()].into_iter().enumerate() {
            let Some(Part { stage, micro_batch }) = part else { continue };
            if std::mem::replace(&mut seen[k][stage * m + micro_batch], true) {
                return Err(ScheduleError::Count { kind: KINDS[k], stage, micro_batch, twice: true });
            }
        }
    }
    for (k, seen) in seen.iter().enumerate() {
        if let Some(i) = seen.iter().position(|s| !s) {
            return Err(ScheduleError::Count { kind: KINDS[k], stage: i / m, micro_batch: i % m, twice: false });
        }
    }
    walk(schedule, |_, _, _| {})?;
    Ok(describe(schedule))
}

fn describe(schedule: &Schedule) -> Validated {
    let mut next_weight_grad = vec![0; schedule.num_stages()];
    let mut found = Validated { deferred: vec![], fifo: true, in_micro_batch_order: true };
    for actions in &schedule.ranks {
        let mut queue = VecDeque::new();
        let mut most = 0;
        for action in actions {
            match (action.input_grad(), action.weight_grad()) {
                (Some(p), None) => {
                    queue.push_back(p);
                    most = most.max(queue.len());
                }
                (None, Some(p)) => {
                    if let Some(at) = queue.iter().position(|q| *q == p) {
                        found.fifo &= at == 0;
                        queue.remove(at);
                    }
                }
                _ => {}
            }
            if let Some(p) = action.weight_grad() {
                found.in_micro_batch_order &= next_weight_grad[p.stage] == p.micro_batch;
                next_weight_grad[p.stage] += 1;
            }
        }
        found.deferred.push(most);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::Placement;
    use super::*;

    fn schedule(num_micro_batches: usize, ranks: &[&str]) -> Schedule {
        Schedule {
            name: "by hand".into(),
            num_micro_batches,
            placement: Placement::linear(ranks.len()),
            ranks: ranks.iter().map(|l| l.split_whitespace().map(|a| a.parse().unwrap()).collect()).collect(),
        }
    }

    fn fault(num_micro_batches: usize, ranks: &[&str]) -> String {
        validate(&schedule(num_micro_batches, ranks)).unwrap_err().to_string()
    }

    #[test]
    fn a_sound_one_is_described() {
        let v = validate(&schedule(2, &["F0.0 F0.1 I0.0 I0.1 W0.1 W0.0", "F1.0 B1.0 F1.1 I1.1 W1.1"])).unwrap();
        assert_eq!(v, Validated { deferred: vec![2, 1], fifo: false, in_micro_batch_order: false });
    }

    #[test]
    fn faults_are_named() {
        assert!(fault(1, &["F0.0 B0.0", "B1.0"]).contains("stage 1 has no F of micro-batch 0"));
        assert!(fault(1, &["F0.0 B0.0 W0.0", "F1.0 B1.0"]).contains("stage 0 has more than one W"));
        assert!(fault(1, &["F0.0 I0.0", "F1.0 B1.0"]).contains("no W of micro-batch 0"));
        assert!(fault(1, &["W0.0 F0.0 I0.0"]).contains("rank 0 waits at W0.0 for I0.0"));
        assert!(fault(1, &["F0.0 B0.0 F1.0", "F1.0 B1.0"]).contains("stage 1 is placed on rank 1"));
        assert!(fault(1, &["F0.1 B0.0"]).contains("count from 0"));
        // Each waits for the other.
        let text = fault(2, &["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"]);
        assert!(text.contains("deadlock") && text.contains("rank 0 waits at B0.0 for I1.0"), "{text}");
        assert!(text.contains("rank 1 waits at F1.1 for F0.1"), "{text}");
    }

    #[test]
    fn sizes_that_do_not_fit_are_no_panic() {
        let mut s = schedule(1, &["F0.0 B0.0"]);
        s.num_micro_batches = usize::MAX;
        assert!(validate(&s).unwrap_err().to_string().contains("too large"));
        s.num_micro_batches = 0;
        assert!(validate(&s).unwrap_err().to_string().contains("at least one of each"));
        s.num_micro_batches = 1;
        s.placement.rank_of_stage = vec![3];
        assert!(validate(&s).unwrap_err().to_string().contains("placed on rank 3 of 1"));
        s.placement.num_ranks = 5;
        assert!(validate(&s).unwrap_err().to_string().contains("1 lists of actions for 5 ranks"));
    }
}
