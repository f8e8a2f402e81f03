//! CPU kernels: pure functions over slices, no autograd, no tensors, no allocation per call.
//!
//! Every operation that training or generation spends time in lives here, one file (or folder) each, in four levels:
//!
//! | level | knows about | example |
//! |---|---|---|
//! | tile | registers, SIMD instructions of one [`Isa`] | an 8 × 48 block of C in 24 registers |
//! | block | caches, packing, bf16 widening | a KC × NC panel of B |
//! | kernel | threads: how the output is cut into tasks | one task an MC × NC block of C |
//! | device | the call people make: shapes, errors | [`gemm::gemm`] |
//!
//! Beside each stands a plain reference that only tests use.
//!
//! # Why the numbers can be trusted
//! * **Same bits for any number of threads.** Tasks are cut by shape alone and write disjoint outputs; a reduction is split at
//!   fixed sizes and summed in order.
//! * **A row does not know its neighbours.** Every element of a GEMM is one chain of multiply-adds over k in order, whatever M
//!   and N are; an attention row walks its keys in blocks counted from the start of its own document. So a token gets the same
//!   bits alone, in a batch, in a pack, while generating and while training.
//!   (With [`Isa::Amx`] an element is not one chain but another fixed sequence over its row and its column: the same promise, other bits.)
//! * bf16 is a storage type: operands count exactly, sums are f32. Less than f32 is multiplied only where a caller permits it
//!   ([`gemm::Arithmetic`]).
//! * FP8, MXFP8, fp16 and int8 are made in software, exact to the bit, by [`lowp`].
//!
//! ```
//! use phalanx_kernels::{Device, gemm::{Gemm, gemm}};
//! let dev = Device::new(2);
//! // y[2,2] = x[2,3] · wᵀ, with w stored [out=2, in=3] as in a linear layer.
//! let (x, w) = ([1., 2., 3., 4., 5., 6.], [1., 0., 0., 0., 1., 1.]);
//! let mut y = [0f32; 4];
//! gemm(&dev, &Gemm::nt(2, 2, 3, x[..].into(), w[..].into()), &mut y)?;
//! assert_eq!(y, [1., 5., 4., 11.]);
//! # Ok::<(), phalanx_kernels::KernelError>(())
//! ```

mod device;
mod error;
mod isa;
mod mat;
mod par;
mod simd;
mod team;

pub mod adamw;
pub mod attention;
pub mod columns;
pub mod cross_entropy;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod glu;
pub mod layer_norm;
pub mod lowp;
pub mod moe;
pub mod peak;
pub mod plain;
pub mod profile;
pub mod reduce;
pub mod rms_norm;
pub mod rope;
pub mod scratch;
pub mod stream;

pub use device::Device;
pub use error::{KernelError, Result};
pub use isa::{Isa, processor_signature};
pub use mat::Mat;
pub use team::Team;

pub use half::{bf16, f16};
