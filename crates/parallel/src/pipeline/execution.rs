//! Running a schedule on paper: every rank does its actions in order, each as soon as what it needs is there.
//!
//! Validation, timing and the placing of messages all need the same walk, so it stands here once. The result does not depend on the order in
//! which ranks are visited: an action never takes away what another one needs.

use super::{Action, Part, Schedule, ScheduleError};

/// Which F and I are done, by stage and micro-batch.
pub(super) struct Done {
    num_micro_batches: usize,
    num_stages: usize,
    forward: Vec<bool>,
    input_grad: Vec<bool>,
}

impl Done {
    fn new(schedule: &Schedule) -> Done {
        let n = schedule.num_stages() * schedule.num_micro_batches;
        Done {
            num_micro_batches: schedule.num_micro_batches,
            num_stages: schedule.num_stages(),
            forward: vec![false; n],
            input_grad: vec![false; n],
        }
    }

    fn index(&self, p: Part) -> usize {
        p.stage * self.num_micro_batches + p.micro_batch
    }

    /// The first thing that is missing before `action` can begin.
    fn missing(&self, action: &Action) -> Option<Action> {
        let needs_forward = |p: Part| (!self.forward[self.index(p)]).then_some(Action::Forward(p));
        let needs_grad = |p: Part| (!self.input_grad[self.index(p)]).then_some(Action::InputGrad(p));
        if let Some(p) = action.forward()
            && p.stage > 0
            && let Some(missing) = needs_forward(Part::new(p.stage - 1, p.micro_batch))
        {
            return Some(missing);
        }
        if let Some(p) = action.input_grad() {
            if let Some(missing) = needs_forward(p) {
                return Some(missing);
            }
            if p.stage + 1 < self.num_stages
                && let Some(missing) = needs_grad(Part::new(p.stage + 1, p.micro_batch))
            {
                return Some(missing);
            }
        }
        match action {
            Action::WeightGrad(p) => needs_grad(*p),
            _ => None,
        }
    }

    fn finish(&mut self, action: &Action) {
        if let Some(p) = action.forward() {
            let i = self.index(p);
            self.forward[i] = true;
        }
        if let Some(p) = action.input_grad() {
            let i = self.index(p);
            self.input_grad[i] = true;
        }
    }
}

/// Visits every computing action (rank, position in its list, action) after all that it depends on. Messages are stepped over.
///
/// # Errors
/// Sizes that do not fit, or a deadlock.
pub(super) fn walk(schedule: &Schedule, mut visit: impl FnMut(usize, usize, Action)) -> Result<(), ScheduleError> {
    schedule.check_shape()?;
    let mut done = Done::new(schedule);
    let mut next = vec![0; schedule.num_ranks()];
    loop {
        let mut moved = false;
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            while let Some(action) = actions.get(next[rank]) {
                if action.is_compute() {
                    if done.missing(action).is_some() {
                        break;
                    }
                    visit(rank, next[rank], *action);
                    done.finish(action);
                }
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let waiting: Vec<_> = schedule
        .ranks
        .iter()
        .enumerate()
        .filter_map(|(rank, actions)| {
            let action = *actions.get(next[rank])?;
            let needs = done.missing(&action).map_or_else(String::new, |a| a.to_string());
            Some((rank, action, needs))
        })
        .collect();
    if waiting.is_empty() { Ok(()) } else { Err(ScheduleError::Deadlock { waiting }) }
}
