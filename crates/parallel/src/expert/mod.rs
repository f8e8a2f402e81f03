//! Expert parallelism: so far, where experts should lie.

mod placement;

pub use placement::{Placement, PlacementError, Ranks, place_experts};
