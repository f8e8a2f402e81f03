//! Training on tiny models: what must not change when batches, recompute, stops or threads do.
//!
//! One binary: the files share helpers, and a test that is killed runs this binary again as its child.

mod accumulation;
mod adapters;
mod common;
mod delayed;
mod documents;
mod experts;
mod freeze;
mod guard;
mod optimizer;
mod peft;
mod profile;
mod ranks;
mod recompute;
mod resume;
mod saves;
mod start;
