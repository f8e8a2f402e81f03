//! Loss and perplexity over a corpus.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_data::{Batch as TokenBatch, Corpus, Stream, StreamOptions};
use phalanx_models::Model;
use phalanx_nn::Env;
use phalanx_parallel::Distributed;

use crate::step::{LossCount, evaluate_batch, layout};
use crate::{Result, pipeline};

/// Summed loss over one pass of `corpus`, `rows` at a time; on a mesh each share of the ranks takes its turn. Neither `rows` nor threads nor
/// ranks change the result's meaning: sums and counts add up. `None` if `stop` became true before the end.
///
/// # Errors
/// If the forward or a peer fails.
pub fn evaluate(
    model: &Model,
    env: &Env,
    corpus: &Corpus,
    rows: usize,
    stop: &AtomicBool,
    distributed: Option<&Arc<Distributed>>,
) -> Result<Option<LossCount>> {
    let mut stream = Stream::new(corpus.clone(), StreamOptions::in_order());
    let mut env = env.clone();
    env.training = false;
    let (share, shares) = distributed.map_or((0, 1), |d| d.data_share());
    let mut total = LossCount::default();
    while stream.position() < stream.rows_per_epoch() {
        if agreed(stop, distributed)? {
            return Ok(None);
        }
        let mut own = TokenBatch::default();
        for s in 0..shares {
            if stream.position() < stream.rows_per_epoch() {
                let batch = stream.next_batch(rows)?;
                own = if s == share { batch } else { own };
            }
        }
        let env = env.for_batch(layout(&own), 0);
        total.add(match distributed.and_then(|d| Some((d, d.stages()?))) {
            None => evaluate_batch(model, &env, &own)?,
            Some((d, stages)) => pipeline::evaluate(model, &env, &own, d, stages)?,
        });
    }
    if let Some(d) = distributed {
        let mut sums = [total.sum, total.count as f64];
        d.sum_over_data(&mut sums)?;
        total = LossCount { sum: sums[0], count: sums[1] as u64 };
    }
    Ok(Some(total))
}

/// Whether `stop` is true on any rank; all get the same answer.
///
/// # Errors
/// If a peer fails.
pub fn agreed(stop: &AtomicBool, distributed: Option<&Arc<Distributed>>) -> Result<bool> {
    let here = stop.load(Ordering::Relaxed);
    let Some(d) = distributed else { return Ok(here) };
    let mut votes = [f64::from(u8::from(here))];
    d.sum_over_world(&mut votes)?;
    Ok(votes[0] > 0.0)
}

/// exp(loss), capped where a float would overflow; NaN of NaN.
pub fn perplexity(loss: f64) -> f64 {
    if loss.is_nan() { loss } else { loss.min(700.0).exp() }
}
