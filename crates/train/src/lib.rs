//! Training: from a configuration to a trained model, exactly and resumably.
//!
//! # Why it is built this way
//! * **A loss is a sum and a count** ([`step::LossCount`]). Gradients accumulate as sums over tokens and are divided once, by the count
//!   of the whole window, inside the update. Unequal label counts, a short last window and any split into micro-batches give the
//!   numbers of one big batch.
//! * **All checks come first** ([`job`]): configuration, plan, tokenizer, data and output folder are sound before a weight is read.
//! * **A run is its state** ([`checkpoint::RunState`]): step, sample stream, micro-batch counter (all randomness hangs on it), moments and
//!   exact weights are one atomic folder. Going on gives the losses of a run that was never stopped.
//! * **What ships is checked** ([`mod@export`]): merged logits must equal adapted ones, and a merge that rounding would wipe out is refused.
//! * **Numbers are compared with PyTorch's** ([`parity`]).
//!
//! The loop itself is [`trainer::train`]; what the configuration keys mean for modules is [`method`].
//!
//! ```
//! use phalanx_train::schedule::{Schedule, Shape};
//! let s = Schedule { lr: 1e-3, warmup_steps: 10, total_steps: 110, shape: Shape::Linear };
//! assert_eq!(s.at(10), 1e-3);
//! assert_eq!(s.at(60), 5e-4);
//! ```

pub mod adapter;
pub mod bench;
pub mod checkpoint;
pub mod disk;
mod error;
pub mod evaluate;
pub mod experts;
pub mod export;
mod gguf;
pub mod job;
pub mod layouts;
pub mod method;
mod model_output;
pub mod near_lossless;
pub mod optimizer;
pub mod parity;
pub mod pipeline;
pub mod profiling;
mod ranks;
pub mod resume;
pub mod run_files;
pub mod same_run;
pub mod schedule;
pub mod step;
pub mod step_clock;
pub mod trainer;
pub mod window;

pub use error::{Result, TrainError};
