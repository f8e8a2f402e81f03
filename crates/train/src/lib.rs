//! Training (being filled).

mod error;
pub mod optimizer;
pub mod parity;
pub mod schedule;
pub mod step;

pub use error::{Result, TrainError};
