//! Forward/backward pairs, one file each.
//!
//! Every forward takes `tape: Option<&mut Tape>`: with `None` (evaluation, generation, the first pass of a recompute region) nothing
//! is kept. Rows: T tokens.

mod add;
mod attention;
mod columns;
mod dropout;
mod embedding;
mod experts;
mod glu;
mod linear;
mod linear_cross_entropy;
mod norm;
mod rope;
mod route;

pub use add::{add, scale_add};
pub use attention::{AttentionSpec, attention};
pub use columns::{columns, join_heads};
pub use dropout::dropout;
pub use embedding::embedding;
pub use experts::{GroupedSpec, Places, from_experts, grouped_linear, to_experts, weigh};
pub use glu::glu;
pub use linear::{LinearSpec, PassScales, linear};
pub use linear_cross_entropy::{HeadSpec, LossOutput, linear_cross_entropy};
pub use norm::{layer_norm, rms_norm};
pub use rope::{rope, rope_form};
pub use route::{AskSlopes, BalanceSlopes, Chosen, route};

use crate::GradSlot;

/// A parameter as a function sees it: its value now, and where its gradient goes if it is trained.
#[derive(Clone)]
pub struct Param {
    /// The value, in the type it is stored in.
    pub value: phalanx_tensor::Tensor,
    /// The gradient's place; `None` when frozen.
    pub grad: Option<GradSlot>,
}
