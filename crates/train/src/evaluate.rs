//! Loss and perplexity over a corpus.

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_data::{Corpus, Stream, StreamOptions};
use phalanx_models::Model;
use phalanx_nn::Env;

use crate::Result;
use crate::step::{LossCount, evaluate_batch, layout};

/// Summed loss over one pass of `corpus`, `rows` at a time. Neither `rows` nor threads change the result's meaning: sums and counts
/// add up. `None` if `stop` became true before the end.
///
/// # Errors
/// If the forward fails.
pub fn evaluate(
    model: &Model,
    env: &Env,
    corpus: &Corpus,
    rows: usize,
    stop: &AtomicBool,
) -> Result<Option<LossCount>> {
    let mut stream = Stream::new(corpus.clone(), StreamOptions::in_order());
    let mut env = env.clone();
    env.training = false;
    let mut total = LossCount::default();
    while stream.position() < stream.rows_per_epoch() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let batch = stream.next_batch(rows)?;
        total.add(evaluate_batch(model, &env.for_batch(layout(&batch), 0), &batch)?);
    }
    Ok(Some(total))
}

/// exp(loss), capped where a float would overflow; NaN of NaN.
pub fn perplexity(loss: f64) -> f64 {
    if loss.is_nan() { loss } else { loss.min(700.0).exp() }
}
