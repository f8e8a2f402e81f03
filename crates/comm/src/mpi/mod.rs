//! Ranks as processes over MPI (feature `mpi`): between machines, or where one process is not wanted.
//!
//! The program is started by `mpirun`; each process calls [`run_mpi`] where it would otherwise call [`crate::run_ranks`]. It needs an
//! MPI with `MPI_THREAD_MULTIPLE` and, to build, libclang: on Debian `apt-get install libopenmpi-dev openmpi-bin libclang-dev`.
//!
//! # How it differs from threads
//! * Groups are lists of ranks with message tags of their own; making one sends nothing.
//! * MPI waits by spinning. All calls here are non-blocking ones with sleeps between looks, so ranks may outnumber cores.
//! * A message sent and not yet asked for may already have left: a send can return before the peer takes it. If the two do not
//!   fit, the receiver gets the error, and the sender with its next call.
//! * A send that MPI has begun cannot be taken back. If a rank that has come to a collective does not take part in moving its data
//!   (its process stopped in that moment), all processes end with the error printed, since none may have its buffers back.
//! * A process that dies takes the others with it: `mpirun` ends them.

mod backend;
mod header;
mod room;
mod wire;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::mpi::Threading;
use ::mpi::traits::Communicator as _;

use crate::CommOptions;
use crate::communicator::Communicator;
use crate::error::{CommError, Result};
use crate::run::{RunError, message};
use backend::MpiBackend;
use wire::Wire;
use world::World;

/// How long a rank that has failed stays for the others to hear why, before its exit makes `mpirun` end them.
const GRACE: Duration = Duration::from_secs(2);

/// Runs `f` as this process's rank of the MPI world that `mpirun` started. Once a process.
///
/// # Errors
/// If `f` returns an error or panics (the other ranks are told), another rank fails before all have ended, or MPI cannot be
/// started. The program should then end with a code other than 0.
#[track_caller]
pub fn run_mpi<T, E, F>(options: &CommOptions, f: F) -> Result<T, RunError<E>>
where
    E: fmt::Display + From<CommError>,
    F: FnOnce(Communicator) -> Result<T, E>,
{
    let broken = |what: String, mend: &str| {
        let error = CommError::Backend { rank: 0, what, mend: mend.into() };
        RunError::Failed { rank: 0, error: E::from(error) }
    };
    let Some((universe, threading)) = ::mpi::initialize_with_threading(Threading::Multiple) else {
        return Err(broken("MPI was started before".into(), "call run_mpi once, and start MPI nowhere else"));
    };
    if threading != Threading::Multiple {
        return Err(broken(
            format!("MPI offers {threading:?} only, no calls from several threads"),
            "use an MPI built with MPI_THREAD_MULTIPLE",
        ));
    }
    let (rank, size) = (universe.world().rank() as usize, universe.world().size() as usize);
    let wire = Wire::new().map_err(|e| broken(e, "see the output of mpirun"))?;
    let world = Arc::new(World::new(wire, options.clone(), rank, size));
    let name: Arc<str> = Arc::from("world");
    let backend = MpiBackend::new(Arc::clone(&world), Arc::clone(&name), (0..size).collect(), 0, 0);
    let comm = match backend {
        Ok(backend) => Communicator::from_backend(Arc::new(backend), name),
        Err(e) => return Err(RunError::Failed { rank, error: E::from(e) }),
    };
    let own = comm.clone();
    let outcome = match catch_unwind(AssertUnwindSafe(|| f(comm))) {
        // Nobody leaves before all have ended well.
        Ok(Ok(result)) => own.barrier().map(|()| result).map_err(|e| RunError::Failed { rank, error: E::from(e) }),
        Ok(Err(error)) => {
            own.abort(error.to_string());
            Err(RunError::Failed { rank, error })
        }
        Err(panic) => {
            world.fail(CommError::RankPanicked { rank });
            Err(RunError::Panicked { rank, message: message(panic.as_ref()) })
        }
    };
    drop(own);
    // Communication threads end by themselves, after what they have left to do.
    let since = Instant::now();
    while Arc::strong_count(&world) > 1 && since.elapsed() < options.timeout.min(Duration::from_secs(10)) {
        std::thread::sleep(Duration::from_micros(200));
    }
    if outcome.is_err() || Arc::strong_count(&world) > 1 {
        world.leave(GRACE);
        // Requests may be open that nobody will ever answer; ending MPI would wait for them.
        std::mem::forget(universe);
    }
    outcome
}
