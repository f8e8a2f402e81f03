//! Ranks as threads: the worlds of one process, and the harness that runs a closure on each rank.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use crate::communicator::Communicator;
use crate::error::CommError;
use crate::{CommOptions, local};

/// The ranks of a world of `size` threads, one handle each, to be moved to threads of the caller's own. `size` is at least 1.
pub fn local_world(size: usize, options: &CommOptions) -> Vec<Communicator> {
    let name: Arc<str> = Arc::from("world");
    local::world(size.max(1), options, &name)
        .into_iter()
        .map(|backend| Communicator::from_backend(backend, Arc::clone(&name)))
        .collect()
}

impl Communicator {
    /// A world of one rank: every call returns at once.
    pub fn solo() -> Communicator {
        local_world(1, &CommOptions::default()).swap_remove(0)
    }
}

/// Why [`run_ranks`] has no results: what went wrong first.
#[derive(Debug)]
pub enum RunError<E> {
    /// A rank returned an error.
    Failed {
        /// The rank.
        rank: usize,
        /// Its error.
        error: E,
    },
    /// A rank panicked.
    Panicked {
        /// The rank.
        rank: usize,
        /// Its message.
        message: String,
    },
    /// The system refused a thread.
    Thread {
        /// The rank that should have run on it.
        rank: usize,
        /// What the system says.
        why: String,
    },
}

impl<E> RunError<E> {
    /// The rank where it began.
    pub fn rank(&self) -> usize {
        match self {
            RunError::Failed { rank, .. } | RunError::Panicked { rank, .. } | RunError::Thread { rank, .. } => *rank,
        }
    }
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Failed { rank, error } => write!(f, "rank {rank} failed: {error}"),
            RunError::Panicked { rank, message } => write!(f, "rank {rank} panicked: {message}"),
            RunError::Thread { rank, why } => {
                write!(f, "the system refused the thread of rank {rank}: {why}; use fewer ranks")
            }
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for RunError<E> {}

/// Runs `f` on `size` ranks, each a thread with its own [`Communicator`]; returns their results in the order of ranks.
///
/// # Errors
/// If a rank returns an error or panics: all others are ended then, by an error of the call that they are in or come to. What is
/// returned is what went wrong *first*, with its rank.
pub fn run_ranks<T, E, F>(size: usize, f: F) -> Result<Vec<T>, RunError<E>>
where
    T: Send,
    E: Send + fmt::Display,
    F: Fn(Communicator) -> Result<T, E> + Sync,
{
    run_ranks_with(&CommOptions::default(), size, f)
}

/// As [`run_ranks`], with settings.
///
/// # Errors
/// As [`run_ranks`].
pub fn run_ranks_with<T, E, F>(options: &CommOptions, size: usize, f: F) -> Result<Vec<T>, RunError<E>>
where
    T: Send,
    E: Send + fmt::Display,
    F: Fn(Communicator) -> Result<T, E> + Sync,
{
    let results: Mutex<Vec<Option<T>>> = Mutex::new((0..size).map(|_| None).collect());
    let failures: Mutex<Vec<RunError<E>>> = Mutex::default();
    let failed = |failure: RunError<E>| failures.lock().unwrap_or_else(|e| e.into_inner()).push(failure);
    let failure: Mutex<Option<CommError>> = Mutex::default();
    let world = local_world(size, options);
    std::thread::scope(|scope| {
        let (f, results, failed, failure) = (&f, &results, &failed, &failure);
        let mut comms = world.into_iter().take(size).enumerate();
        for (rank, comm) in comms.by_ref() {
            // Kept here, so that a failure is told to the peers before anything of this rank goes.
            let own = comm.clone();
            let body = move || {
                match catch_unwind(AssertUnwindSafe(|| f(comm))) {
                    Ok(Ok(result)) => results.lock().unwrap_or_else(|e| e.into_inner())[rank] = Some(result),
                    Ok(Err(error)) => {
                        own.abort(error.to_string());
                        failed(RunError::Failed { rank, error });
                    }
                    Err(panic) => {
                        own.core().engine.backend.fail(CommError::RankPanicked { rank });
                        failed(RunError::Panicked { rank, message: message(panic.as_ref()) });
                    }
                }
                if let Some(found) = own.failure() {
                    *failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(found);
                }
            };
            let spawned = std::thread::Builder::new().name(format!("rank-{rank}")).spawn_scoped(scope, body);
            if let Err(e) = spawned {
                failed(RunError::Thread { rank, why: e.to_string() });
                // Its closure was dropped, and with it the rank's communicator; so were those not started yet.
                break;
            }
        }
    });
    let mut failures = failures.into_inner().unwrap_or_else(|e| e.into_inner());
    if failures.is_empty() {
        let results = results.into_inner().unwrap_or_else(|e| e.into_inner());
        return Ok(results.into_iter().flatten().collect());
    }
    // The rank that the world's failure names, if it ended in failure; otherwise the first that did.
    let failure = failure.into_inner().unwrap_or_else(|e| e.into_inner());
    let culprit = failure.and_then(|failure| failure.culprit());
    let first = failures.iter().position(|f| Some(f.rank()) == culprit).unwrap_or(0);
    let thread = failures.iter().position(|f| matches!(f, RunError::Thread { .. }));
    Err(failures.swap_remove(thread.unwrap_or(first)))
}

pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().map(|s| (*s).to_owned()).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without a message".to_owned())
}
