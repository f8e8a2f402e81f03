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
mod sliced_cross_entropy;

pub use add::{add, scale_add};
pub use attention::{AttentionSpec, attention};
pub use columns::{columns, join_heads};
pub use dropout::{Part, dropout, dropout_part};
pub use embedding::{embedding, embedding_slice};
pub use experts::{GroupedSpec, Places, from_experts, grouped_linear, to_experts, weigh};
pub use glu::glu;
pub use linear::{LinearSpec, PassScales, linear};
pub use linear_cross_entropy::{HeadSpec, LossOutput, linear_cross_entropy};
pub use norm::{layer_norm, rms_norm};
pub use phalanx_kernels::embedding::Rows;
pub use rope::{rope, rope_form};
pub use route::{AskSlopes, BalanceSlopes, Chosen, route};
pub use sliced_cross_entropy::{Across, VocabularySlice};

use std::sync::Arc;

use phalanx_tensor::Tensor;

use crate::{GradSlot, Result};

/// Where the value of a parameter is found when it is needed. Backward asks again: between the two the value may have been given
/// back and gathered anew (sharded training), so nothing on a tape holds on to it.
pub trait ParamSource: Send + Sync {
    /// The value, in the type it is stored in.
    ///
    /// # Errors
    /// If it is not there.
    fn value(&self) -> Result<Tensor>;
}

impl ParamSource for Tensor {
    fn value(&self) -> Result<Tensor> {
        Ok(self.clone())
    }
}

/// A parameter as a function sees it: where its value is found, and where its gradient goes if it is trained.
#[derive(Clone)]
pub struct Param {
    source: Arc<dyn ParamSource>,
    /// The gradient's place; `None` when frozen.
    pub grad: Option<GradSlot>,
}

impl Param {
    /// From a source (a plain tensor is one).
    pub fn new(source: impl ParamSource + 'static, grad: Option<GradSlot>) -> Param {
        Param { source: Arc::new(source), grad }
    }

    /// The value, now.
    ///
    /// # Errors
    /// If it is not there.
    pub fn value(&self) -> Result<Tensor> {
        self.source.value()
    }
}
