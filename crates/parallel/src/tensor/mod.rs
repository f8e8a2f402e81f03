//! Tensor and sequence parallelism: every rank of the `tp` group holds a slice of the big matrices, and a share of the rows between them.
//!
//! # How it works
//! After Shoeybi et al. (Megatron-LM, arXiv 1909.08053) with the sequence parallelism of Korthikanti et al. (arXiv 2205.05198). A *region* is
//! a module whose inner width is cut: attention by heads, the feed-forward by its intermediate units. Its first linear layers hold some
//! of the outputs (*column*), its last one the matching inputs (*row*), so that inside it nothing moves. Outside of regions each rank has
//! ⌈T / t⌉ of the T rows of a batch ([`phalanx_nn::chunk`]; the last ranks fewer, or none): norms and residuals run on those. At the borders:
//!
//! | where | forward | backward |
//! |---|---|---|
//! | input of a region, of the head | all_gather of rows | reduce_scatter of rows |
//! | output of a row layer, of the embedding | reduce_scatter of rows | all_gather of rows |
//!
//! Embedding and head hold some rows of the vocabulary each (*vocabulary*); the fused loss tells other ranks three numbers a token.
//!
//! What a region gathers is not kept for backward but gathered again (as in arXiv 2205.05198, §4.2.2): otherwise every rank would keep T rows
//! where one rank alone keeps none, since norms are rebuilt from the residual stream. That is a gather more; [`Tensor::keep_gathered`] saves it. A
//! region that is recomputed anyhow keeps what its second run gathers, which is short-lived.
//!
//! # Gradients
//! A parameter that several ranks hold, each of which sees a part of what it does (norms: other rows; norms of heads: other heads; biases of row
//! layers: one rank only; a key head that ranks share: other query heads), has partial gradients. They are summed over just those ranks,
//! in f32 and in the order of ranks, once a window. Every other gradient is complete where it is formed.
//!
//! # Files
//! [`Style`] and which module has which; `layout` cuts and borders from the styles; `moves` the pairs of functions at borders; `engine` puts them into
//! the hooks.

mod engine;
mod layout;
mod moves;
mod style;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub(crate) use engine::TensorParallel;
pub(crate) use layout::{Layout, Slice};
pub use style::Style;

/// What there is to choose beside the number of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tensor {
    /// Styles by pattern, for the modules named and those below them, later lines winning; without a line, that of the module's name
    /// ([`Style::usual`]).
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "crate::plan::pairs")]
    pub styles: Vec<(String, Style)>,
    /// Keep for backward what was gathered in forward: a gather less a region and micro-batch, for T rows of memory.
    pub keep_gathered: bool,
}
