//! Tensors: contiguous, row-major values over pooled, accounted memory.
//!
//! # Why so little
//! A tensor here is a shape, an element type and a piece of pooled memory. There are no strides, no lazy graphs and no
//! broadcasting: model code works on `[T, …]` rows (T tokens, all sequences of a batch one after another, no padding), and the
//! [kernels](phalanx_kernels) do the rest. What the crate is careful about is *memory*: every byte comes from a [`Pool`] of
//! huge-page-advised blocks (never from `Vec`, see `docs/performance-notes.md`), carries a [`Category`], and is counted, now
//! and at the peak. After the second step of a training loop with fixed shapes nothing is asked of the system any more.
//!
//! [`Runtime`] bundles a rank's [`Device`](phalanx_kernels::Device) and pool; it is a value, there are no globals.
//! [`rng`] is counter-based: a value depends on seed, name and offset, never on layout or thread.
//!
//! ```
//! use phalanx_tensor::{Category, Runtime};
//! let rt = Runtime::new(1);
//! let x = rt.from_f32(&[2, 3], &[1., 2., 3., 4., 5., 6.], Category::Activations)?;
//! assert_eq!(x.shape(), [2, 3]);
//! assert!(rt.pool().current(Category::Activations) >= x.bytes());
//! # Ok::<(), phalanx_tensor::TensorError>(())
//! ```

mod dtype;
mod error;
mod pool;
mod prepared;
pub mod rng;
mod runtime;
#[allow(clippy::module_inception)]
mod tensor;

pub use dtype::DType;
pub use error::{Result, TensorError};
pub use pool::{Category, Pool, PoolStats};
pub use prepared::{PreparedMatrix, PreparedSpace, multiply_prepared};
pub use runtime::Runtime;
pub use tensor::{NodeId, Tensor};

pub use half::bf16;
