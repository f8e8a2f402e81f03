//! Communication between ranks: collectives, groups, and the mesh.
//!
//! # Why ranks are threads
//! Sharding, pipelines and expert parallelism are programs of several *ranks*, each of which owns its tensors and talks to the
//! others through collectives only. Here ranks are threads of one process unless you ask for more ([`run_ranks`]): there is
//! nothing to set up, a debugger sees them all, and a collective copies straight from one rank's memory into another's. The same
//! program runs over MPI between processes and machines (feature `mpi`), since all that differs lies behind one
//! trait ([`backend::Backend`]); another transport is another implementation of it.
//!
//! # What you can rely on
//! * **The same bits.** A sum runs over ranks 0, 1, 2, … for every element, in f32 for bf16: in each run, in every back end, and
//!   wherever a buffer is cut. Maximum and minimum pass a NaN on.
//! * **No hang.** Ranks that diverge are the classic way to lose a day. Every collective first compares what the ranks have come
//!   to do: which collective, element type, counts, root. If they differ, or a rank fails, panics, ends too soon or does
//!   not come within the time-out, *every* rank gets an error that names the rank, the collective, and the line in the source
//!   on both sides ([`CommError`]). The world stays failed: later calls return that same failure.
//! * **Nobody spins for long.** A rank that waits looks out for its peers for some microseconds and then sleeps, so eight
//!   ranks on two cores work as well as two.
//! * **The right group.** Groups of a [`Mesh`] have the axis in their type; summing over the wrong one does not compile.
//! * **Where the time goes** is counted for each group and kind of call, waiting apart from moving ([`Traffic`]).
//!
//! # How to use it
//! A call that takes slices returns when it is done. The `_async` forms take tensors, go on while the rank computes, and give the
//! tensors back from [`Pending::wait`]. All calls of a rank in a group run in the order of issue; groups are independent
//! of one another. The forms `_many` and the asynchronous ones take any number of buffers at once, as sharded
//! parameters need it: one meeting of the ranks instead of hundreds.
//!
//! ```
//! use phalanx_comm::{CommError, ReduceOp, run_ranks};
//!
//! // Three ranks hold rows 0..2, 2..4 and 4..5 of a weight; each gathers it, and gets its rows of the summed gradient.
//! let counts = [2, 2, 1];
//! let gradients = run_ranks(3, |comm| {
//!     let rank = comm.rank();
//!     let shard = vec![rank as f32; counts[rank]];
//!     let mut weight = [0f32; 5];
//!     comm.all_gather_v(&shard, &counts, &mut weight)?;
//!     assert_eq!(weight, [0., 0., 1., 1., 2.]);
//!
//!     let gradient = weight.map(|w| w * 10.0);
//!     let mut mine = vec![0f32; counts[rank]];
//!     comm.reduce_scatter_v(ReduceOp::Sum, &gradient, &counts, &mut mine)?;
//!     Ok::<_, CommError>(mine)
//! })?;
//! assert_eq!(gradients, [vec![0., 0.], vec![30., 30.], vec![60.]]);
//!
//! // Ranks that diverge are told so, with the lines of both.
//! let error = run_ranks(2, |comm| match comm.rank() {
//!     0 => comm.barrier(),
//!     _ => comm.broadcast(0, &mut [1u8, 2]),
//! })
//! .unwrap_err();
//! assert!(error.to_string().contains("rank 1: broadcast of 2 u8 from root 0"), "{error}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod backend;

mod asynchronous;
mod bytes;
mod call;
mod communicator;
mod element;
mod engine;
mod error;
mod local;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
mod options;
mod reduce;
mod run;
mod traffic;

#[cfg(feature = "mpi")]
pub use self::mpi::run_mpi;
pub use asynchronous::{ExchangeTensors, GatherTensors, Pending, ScatterTensors};
pub use call::{Aspect, Call, Kind, first_mismatch};
pub use communicator::{Communicator, Gather, Scatter};
pub use element::{Element, ElementType, Reduce, ReduceOp};
pub use error::{CommError, Result};
pub use mesh::{
    Axis, AxisKind, Coordinates, Cp, Dp, DpReplicate, DpShard, Edp, Efsdp, Ep, Fsdp, Group, Loss, Mesh, MeshShape, Pp,
    Tp, World,
};
pub use options::CommOptions;
pub use run::{RunError, local_world, run_ranks, run_ranks_with};
pub use traffic::{KindTraffic, Traffic};
