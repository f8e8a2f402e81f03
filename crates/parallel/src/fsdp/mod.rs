//! Fully sharded data parallelism: every rank keeps some rows of each parameter, with their gradient and optimizer state.
//!
//! # How it works
//! Parameters are grouped into [`Unit`]s: the modules that a plan names (usually the blocks), and one for what is left (embedding, last norm, head),
//! which lives as long as the whole pass. A unit's parameters are gathered when its module begins and given back when it ends; a mark on
//! the tape does the same on the way back, and behind the module's backward another one reduces the gradients: rank r gets the sum, over all
//! ranks, of the rows that it keeps. Gathers are issued ahead (the next unit's while this one computes) and run on the communication thread.
//!
//! The settings give the usual stages (Rajbhandari et al., arXiv 1910.02054; the unit-wise form is PyTorch's FSDP2, Zhao et al., arXiv 2304.11277):
//!
//! | stage | [`Reshard`] | gradients reduced |
//! |---|---|---|
//! | ZeRO-3 | after forward | each micro-batch |
//! | ZeRO-2 | after backward | each micro-batch |
//! | ZeRO-1 | after the step | once a step |
//!
//! Sums of gradients are f32, in the order of ranks, whatever the parameters are stored in. Rows are dealt by [`phalanx_nn::chunk`]:
//! ⌈n / P⌉ each, so the last ranks may keep fewer, or none.

mod engine;
mod units;

use serde::{Deserialize, Serialize};

pub use engine::Fsdp;
pub use units::{Unit, units};

/// When gathered parameters are given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// After the module's forward, and again after its backward: least memory, two gathers a micro-batch.
    #[default]
    AfterForward,
    /// After the module's backward: one gather a micro-batch.
    AfterBackward,
    /// When the optimizer has changed them: one gather a step.
    AfterStep,
}
