//! What can be wrong with a schedule.

use super::Action;

/// A schedule that cannot be made, or is not sound.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// No schedule of that name.
    #[error("there is no pipeline schedule \"{name}\"; {mend}")]
    UnknownName {
        /// As given.
        name: String,
        /// The nearest, or all.
        mend: String,
    },
    /// Numbers that this schedule does not allow.
    #[error("pipeline schedule {schedule}: {what}; {mend}")]
    Numbers {
        /// Which schedule.
        schedule: &'static str,
        /// Which number, and what it would have to be.
        what: String,
        /// What to do.
        mend: String,
    },
    /// More than memory should hold.
    #[error(
        "a schedule of {stages} stages × {micro_batches} micro-batches is too large (at most {most} in all); take fewer micro-batches"
    )]
    TooLarge {
        /// Stages.
        stages: usize,
        /// Micro-batches.
        micro_batches: usize,
        /// Limit of the product.
        most: usize,
    },
    /// Sizes or numbers of a schedule that do not fit each other.
    #[error("schedule: {what}; {mend}")]
    Malformed {
        /// What does not fit.
        what: String,
        /// What to do.
        mend: String,
    },
    /// Something is computed never or twice.
    #[error("schedule: stage {stage} has {} {kind} of micro-batch {micro_batch}; each stage sees each micro-batch in one F, one I and one W (B is I and W)", if *.twice { "more than one" } else { "no" })]
    Count {
        /// `F`, `I` or `W`.
        kind: char,
        /// Stage.
        stage: usize,
        /// Micro-batch.
        micro_batch: usize,
        /// More than once; otherwise never.
        twice: bool,
    },
    /// Every rank waits.
    #[error("schedule: deadlock; {}; change the order on one of them", waiting.iter().map(|(rank, action, needs)| format!("rank {rank} waits at {action} for {needs}")).collect::<Vec<_>>().join(", "))]
    Deadlock {
        /// Rank, the action it cannot begin, what that needs.
        waiting: Vec<(usize, Action, String)>,
    },
    /// A message that goes wrong.
    #[error("schedule: {action} on rank {rank}: {what}; messages are put in by `with_communication`")]
    Message {
        /// Whose list.
        rank: usize,
        /// Which entry.
        action: Action,
        /// What is wrong.
        what: String,
    },
    /// A duration that is none.
    #[error("durations: {what}; durations are finite, not negative, and in one unit")]
    Durations {
        /// Which, and its value.
        what: String,
    },
}
