//! The list of a rank while it is being made, with its queue of weight gradients put off.

use std::collections::VecDeque;

use crate::pipeline::{Action, Part};

/// A rank's actions so far, which micro-batch each of its stages comes to next, and the W that wait.
pub(super) struct RankList {
    pub(super) actions: Vec<Action>,
    /// The rank's stages.
    stages: Vec<usize>,
    /// Micro-batches already gone forward and backward, by chunk.
    forward: Vec<usize>,
    backward: Vec<usize>,
    waiting: VecDeque<Part>,
}

impl RankList {
    pub(super) fn new(stages: &[usize]) -> RankList {
        RankList {
            actions: vec![],
            stages: stages.to_vec(),
            forward: vec![0; stages.len()],
            backward: vec![0; stages.len()],
            waiting: VecDeque::new(),
        }
    }

    fn next_forward(&mut self, chunk: usize) -> Part {
        self.forward[chunk] += 1;
        Part::new(self.stages[chunk], self.forward[chunk] - 1)
    }

    fn next_backward(&mut self, chunk: usize) -> Part {
        self.backward[chunk] += 1;
        Part::new(self.stages[chunk], self.backward[chunk] - 1)
    }

    /// F of the chunk's next micro-batch.
    pub(super) fn f(&mut self, chunk: usize) {
        let part = self.next_forward(chunk);
        self.actions.push(Action::Forward(part));
    }

    /// B of the chunk's next micro-batch; with `defer` only I, its W waiting.
    pub(super) fn b(&mut self, chunk: usize, defer: bool) {
        let part = self.next_backward(chunk);
        if defer {
            self.actions.push(Action::InputGrad(part));
            self.waiting.push_back(part);
        } else {
            self.actions.push(Action::Backward(part));
        }
    }

    /// F of one chunk and B of another at once.
    pub(super) fn f_and_b(&mut self, forward: usize, backward: usize) {
        let (forward, backward) = (self.next_forward(forward), self.next_backward(backward));
        self.actions.push(Action::Overlapped { forward, backward });
    }

    /// The W that has waited longest, if any waits.
    pub(super) fn w(&mut self) {
        self.actions.extend(self.waiting.pop_front().map(Action::WeightGrad));
    }

    /// How many W wait.
    pub(super) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Micro-batches gone forward through a chunk.
    pub(super) fn num_forward(&self, chunk: usize) -> usize {
        self.forward[chunk]
    }
}
