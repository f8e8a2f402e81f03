//! What can go wrong with a tensor.

use crate::DType;

/// An error of a tensor operation.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// The element type is another one than the operation works on.
    #[error("{what}: the tensor holds {got}, {want} is needed")]
    DType {
        /// Where.
        what: &'static str,
        /// Found.
        got: DType,
        /// Needed.
        want: DType,
    },
    /// Two shapes, or a shape and a number of values, do not go together.
    #[error("{what}: shape {shape:?} does not hold {elements} elements")]
    Elements {
        /// Where.
        what: &'static str,
        /// The shape.
        shape: Vec<usize>,
        /// The number of elements at hand.
        elements: usize,
    },
    /// A shape has more elements than an address space can hold.
    #[error("shape {shape:?} is beyond any memory; is a size in config.json or in the settings wrong?")]
    TooLarge {
        /// The shape.
        shape: Vec<usize>,
    },
    /// Somebody else still reads the memory that is to be changed.
    #[error("{what}: the tensor is still shared and cannot be changed in place")]
    Shared {
        /// Where.
        what: &'static str,
    },
    /// The memory budget or the system has no more.
    #[error(
        "out of memory: {asked} bytes for {category} asked, {in_use} in use, budget {budget}; the largest: {largest}. Lower the batch or cutoff_len, or turn on recompute in the plan"
    )]
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// For what.
        category: &'static str,
        /// Bytes in use.
        in_use: usize,
        /// What the limit is, in words.
        budget: String,
        /// The biggest holders.
        largest: String,
    },
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] phalanx_kernels::KernelError),
}

/// Result of a tensor operation.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;
