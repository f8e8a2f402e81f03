//! What can go wrong between ranks. Ranks in messages are those of the world, unless a group is named beside them.

use std::time::Duration;

use crate::call::Aspect;

/// An error of a collective. Cloneable, since the first one is what every later call of every rank returns.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommError {
    /// The arguments of one rank do not go together.
    #[error("rank {rank}, group `{group}`, {call}: {what}; {mend}")]
    Argument {
        /// The rank that made the call.
        rank: usize,
        /// The group it was made in.
        group: String,
        /// The call, and where it stands.
        call: String,
        /// What is wrong.
        what: String,
        /// What to do.
        mend: String,
    },
    /// Two ranks made calls that do not fit.
    #[error(
        "the ranks of group `{group}` made calls that do not fit, with {aspect}:\n  rank {first_rank}: {first}\n  rank {second_rank}: {second}\nevery rank must make the same calls in the same order with the same sizes: look for a branch that depends on the rank or on its data between these two lines"
    )]
    Mismatch {
        /// The group.
        group: String,
        /// In what they differ.
        aspect: Aspect,
        /// One rank.
        first_rank: usize,
        /// Its call, and where it stands.
        first: String,
        /// The other.
        second_rank: usize,
        /// Its call, and where it stands.
        second: String,
    },
    /// A peer did not come in time.
    #[error(
        "rank {rank} waited {:.1} s in group `{group}`, {call}, for {missing}. If the work in between may take so long, raise the comm time-out; otherwise make every rank take the same path to this call",
        after.as_secs_f64()
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The group.
        group: String,
        /// The call, and where it stands.
        call: String,
        /// How long it waited.
        after: Duration,
        /// Who did not come, and what each was doing.
        missing: String,
    },
    /// A rank ended with an error of its own.
    #[error("rank {rank} failed: {message}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// A failure that another process has found.
    #[error("rank {rank} reports: {message}")]
    Reported {
        /// The rank that found it.
        rank: usize,
        /// The failure, as it stands there.
        message: String,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked; its own message, printed above or in the log of that rank, says why")]
    RankPanicked {
        /// The rank.
        rank: usize,
    },
    /// A rank gave up its communicator while others still wait for it.
    #[error(
        "rank {rank} has left group `{group}` (it ended, or dropped its communicator), yet rank {waiting} waits for it in {call}; make every rank issue the same calls before it ends"
    )]
    RankLeft {
        /// The rank that left.
        rank: usize,
        /// The group.
        group: String,
        /// A rank that waits.
        waiting: usize,
        /// Its call, and where it stands.
        call: String,
    },
    /// A call that was given up, since the world had failed.
    #[error("rank {rank}, group `{group}`, {call}: given up, since the ranks have failed: {cause}")]
    Interrupted {
        /// The rank that made the call.
        rank: usize,
        /// The group it was made in.
        group: String,
        /// The call, and where it stands.
        call: String,
        /// The failure.
        cause: Box<CommError>,
    },
    /// A list of members that makes no group.
    #[error("rank {rank}: group `{group}` of members {members:?} in a group of {size}: {what}; {mend}")]
    Members {
        /// The rank that asked.
        rank: usize,
        /// The name of the group.
        group: String,
        /// The list.
        members: Vec<usize>,
        /// The size of the parent.
        size: usize,
        /// What is wrong.
        what: &'static str,
        /// What to do.
        mend: &'static str,
    },
    /// Mesh dimensions that do not go together.
    #[error("mesh ({shape}): {what}; {mend}")]
    Mesh {
        /// The dimensions.
        shape: String,
        /// What is wrong.
        what: String,
        /// What to do.
        mend: String,
    },
    /// The system refused a thread.
    #[error("rank {rank}: the system refused the communication thread of group `{group}`: {why}; use fewer ranks")]
    Thread {
        /// The rank.
        rank: usize,
        /// The group.
        group: String,
        /// What the system says.
        why: String,
    },
    /// The message layer underneath failed.
    #[error("rank {rank}: {what}; {mend}")]
    Backend {
        /// The rank.
        rank: usize,
        /// What it says.
        what: String,
        /// What to do.
        mend: String,
    },
}

impl CommError {
    /// What began it: the failure itself, for a call that was given up because of one.
    pub fn root_cause(&self) -> &CommError {
        match self {
            CommError::Interrupted { cause, .. } => cause.root_cause(),
            other => other,
        }
    }

    /// The rank whose doing it is, where one can be named.
    pub fn culprit(&self) -> Option<usize> {
        match self.root_cause() {
            CommError::Argument { rank, .. }
            | CommError::RankFailed { rank, .. }
            | CommError::RankPanicked { rank }
            | CommError::RankLeft { rank, .. }
            | CommError::Members { rank, .. }
            | CommError::Thread { rank, .. }
            | CommError::Backend { rank, .. } => Some(*rank),
            _ => None,
        }
    }
}

/// Result of a collective.
pub type Result<T, E = CommError> = std::result::Result<T, E>;
