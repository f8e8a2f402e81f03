//! Output projection with its loss.

use std::sync::Arc;

use phalanx_autograd::functions::{self, HeadSpec, LossOutput, VocabularySlice};
use phalanx_tensor::Tensor;

use crate::{Cx, NnError, Parameter, Result};

/// Summed cross-entropy of `targets` [T] (−100 not counted) from hidden rows [T, H] through `weight` [V, H], of which this rank may hold a slice of the
/// rows. The logits never exist at once.
///
/// # Errors
/// If a target is outside the vocabulary, the weight has no value, a peer fails, or memory runs out.
pub fn cross_entropy(cx: &mut Cx, weight: &Parameter, hidden: &Tensor, targets: &Arc<[i32]>) -> Result<LossOutput> {
    let (tokens, vocab) = (weight.placement().working[0].clone(), weight.shape()[0]);
    let slice = if tokens.len() < vocab {
        let Some(across) = cx.env().hooks.as_ref().and_then(|h| h.across()) else {
            let why =
                format!("{} holds rows {tokens:?} of {vocab}, and no rank with the others is known", weight.name());
            return Err(NnError::Parallel(why));
        };
        Some(VocabularySlice { tokens, vocab, across })
    } else {
        None
    };
    let spec = HeadSpec {
        weight: weight.param()?,
        targets: Arc::clone(targets),
        chunk_bytes: cx.env().logits_chunk_bytes,
        arithmetic: cx.arithmetic(),
        slice,
    };
    let (rt, tape) = cx.parts();
    Ok(functions::linear_cross_entropy(rt, tape, hidden, spec)?)
}
