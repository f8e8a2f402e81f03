//! Token embedding.

use std::sync::Arc;

use phalanx_autograd::functions::{self, Rows};
use phalanx_tensor::{Category, DType, Tensor};

use crate::{Cx, Describe, Parameter, Result, Visitor};

/// A table of rows. Not a [`crate::Module`]: it maps ids, not rows.
pub struct Embedding {
    weight: Parameter,
}

impl Embedding {
    /// `prefix.weight` [vocab, hidden].
    pub fn named(prefix: &str, vocab: usize, hidden: usize) -> Embedding {
        Embedding { weight: Parameter::new(format!("{prefix}.weight"), &[vocab, hidden]) }
    }

    /// The table.
    pub fn weight(&self) -> &Parameter {
        &self.weight
    }

    /// ids [T] → [T, hidden]; zeros for ids whose rows are on another rank
    ///
    /// # Errors
    /// If an id has no row, or memory runs out.
    pub fn forward(&self, cx: &mut Cx, ids: &Arc<[u32]>) -> Result<Tensor> {
        if let Some(table) = self.weight.prepared().filter(|_| cx.tape.is_none()) {
            let rt = cx.rt();
            let mut rows = rt.empty(&[ids.len(), table.shape()[1]], DType::F32, Category::Activations)?;
            table.gather(ids, rows.f32_mut()?)?;
            return Ok(rows);
        }
        let param = self.weight.param()?;
        // Of a table whose rows are on several ranks: what this rank's rows give.
        let slice = Rows { first: self.weight.placement().working[0].start, vocab: self.weight.shape()[0] };
        let (rt, tape) = cx.parts();
        Ok(functions::embedding_slice(rt, tape, ids, param, slice)?)
    }
}

impl Describe for Embedding {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.weight);
    }
    fn kind(&self) -> &'static str {
        "embedding"
    }
}
