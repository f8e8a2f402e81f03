//! The seam: what a way of moving bytes between ranks must be able to do.
//!
//! Everything above it is the same for all back ends: argument checks, element types, order of calls, asynchronous forms,
//! accounting. A back end compares the [`Call`]s of all ranks before it moves anything, reduces in the order of ranks, ends
//! every wait within the time-out, and tells every rank of a failure. Another transport is another implementation of this trait.

use std::sync::Arc;
use std::time::Duration;

use phalanx_tensor::Tensor;

use crate::call::Call;
use crate::element::{ElementType, ReduceOp};
use crate::error::{CommError, Result};

/// Where the time of a call went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Waiting for peers to come, and for them to have finished.
    pub waiting: Duration,
    /// Moving and reducing data.
    pub moving: Duration,
}

/// One item of an all_gather.
pub struct GatherPart<'a> {
    /// What the bytes are.
    pub dtype: ElementType,
    /// This rank's elements: `counts[rank]` of them.
    pub shard: &'a [u8],
    /// Elements of each rank.
    pub counts: &'a [usize],
    /// All elements, those of rank 0 first.
    pub full: &'a mut [u8],
}

/// One item of a reduce_scatter.
pub struct ScatterPart<'a> {
    /// What the bytes are.
    pub dtype: ElementType,
    /// This rank's summands for all ranks, those for rank 0 first.
    pub full: &'a [u8],
    /// Elements that each rank gets.
    pub counts: &'a [usize],
    /// The reduced elements of this rank: `counts[rank]` of them.
    pub shard: &'a mut [u8],
}

/// One item of an all_reduce.
pub struct ReducePart<'a> {
    /// What the bytes are.
    pub dtype: ElementType,
    /// Summands before, result after.
    pub data: &'a mut [u8],
}

/// The buffers of an all_to_all.
pub struct ExchangePart<'a> {
    /// What the bytes are.
    pub dtype: ElementType,
    /// Pieces for ranks 0, 1, …, one after another.
    pub send: &'a [u8],
    /// Elements for each rank.
    pub send_counts: &'a [usize],
    /// Pieces from ranks 0, 1, …, one after another.
    pub recv: &'a mut [u8],
    /// Elements from each rank.
    pub recv_counts: &'a [usize],
}

/// A message on its way, with the tensor that it fills or empties.
pub trait InFlight: Send {
    /// Whether [`InFlight::wait`] would return at once.
    fn is_done(&self) -> bool;
    /// Waits, and gives the tensor back.
    ///
    /// # Errors
    /// As for a collective.
    fn wait(self: Box<Self>) -> Result<(Tensor, Spent)>;
}

/// A way of moving bytes between the ranks of one group. Ranks are those of the group. Lengths have been checked.
pub trait Backend: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn size(&self) -> usize;
    /// The members as ranks of the world.
    fn members(&self) -> &[usize];
    /// Fails the world, unless it has failed before; returns the first failure.
    fn fail(&self, failure: CommError) -> CommError;
    /// The failure of the world, if it has failed.
    fn failure(&self) -> Option<CommError>;
    /// A group of some of the members; every one of them calls it, the others do not.
    ///
    /// # Errors
    /// If the message layer refuses.
    fn subgroup(&self, name: &Arc<str>, members: &[usize]) -> Result<Arc<dyn Backend>>;

    /// See [`crate::Communicator::all_gather_many`].
    ///
    /// # Errors
    /// Like all that follow: if the calls do not fit, a peer does not come in time, or the world has failed.
    fn all_gather(&self, call: Call, parts: &mut [GatherPart<'_>]) -> Result<Spent>;
    /// See [`crate::Communicator::reduce_scatter_many`].
    fn reduce_scatter(&self, call: Call, op: ReduceOp, parts: &mut [ScatterPart<'_>]) -> Result<Spent>;
    /// See [`crate::Communicator::all_reduce`].
    fn all_reduce(&self, call: Call, op: ReduceOp, parts: &mut [ReducePart<'_>]) -> Result<Spent>;
    /// See [`crate::Communicator::all_to_all_v`].
    fn all_to_all(&self, call: Call, part: ExchangePart<'_>) -> Result<Spent>;
    /// See [`crate::Communicator::broadcast`].
    fn broadcast(&self, call: Call, root: usize, data: &mut [u8]) -> Result<Spent>;
    /// See [`crate::Communicator::barrier`].
    fn barrier(&self, call: Call) -> Result<Spent>;

    /// Gives `data` to a rank; returns when it has it.
    fn send(&self, call: Call, to: usize, data: &[u8]) -> Result<Spent>;
    /// Takes `data` from a rank.
    fn recv(&self, call: Call, from: usize, data: &mut [u8]) -> Result<Spent>;
    /// Both at once; neither waits for the other.
    fn send_recv(&self, send: (Call, usize, &[u8]), recv: (Call, usize, &mut [u8])) -> Result<(Spent, Spent)>;
    /// Hands a tensor over to be sent; returns at once.
    fn post_send(&self, call: Call, to: usize, tensor: Tensor) -> Result<Box<dyn InFlight>>;
    /// Hands a tensor over to be filled; returns at once. Nobody else holds its memory.
    fn post_recv(&self, call: Call, from: usize, tensor: Tensor) -> Result<Box<dyn InFlight>>;
}

/// The bytes of `rank` in a buffer that holds `counts` elements of each rank, one rank after another.
pub(crate) fn range_of(counts: &[usize], dtype: ElementType, rank: usize) -> std::ops::Range<usize> {
    let start = counts[..rank].iter().sum::<usize>() * dtype.size();
    start..start + counts[rank] * dtype.size()
}

/// The elements of `len` that `rank` of `size` takes on in an all_reduce, as bytes; borders lie at multiples of 64 bytes.
pub(crate) fn slice_of(len: usize, dtype: ElementType, rank: usize, size: usize) -> std::ops::Range<usize> {
    let bytes = len * dtype.size();
    let lines = bytes.div_ceil(64);
    let border = |r: usize| (lines * r / size * 64).min(bytes);
    border(rank)..border(rank + 1)
}
