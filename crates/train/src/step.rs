//! One micro-batch forward and backward, and the sums that an update divides by.

use std::sync::Arc;

use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, loss};
use phalanx_nn::{Batch, Cx, Env};
use phalanx_tensor::Category;
use serde::{Deserialize, Serialize};

use crate::Result;

/// A loss as it is everywhere here: a sum and a count, never a mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossCount {
    /// Σ −log p over counted targets.
    #[serde(deserialize_with = "nan_where_null")]
    pub sum: f64,
    /// Counted targets.
    pub count: u64,
}

impl LossCount {
    /// Adds another sum and count.
    pub fn add(&mut self, other: LossCount) {
        self.sum += other.sum;
        self.count += other.count;
    }

    /// Σ / count; 0 when nothing was counted.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }
}

/// JSON has no NaN and writes `null`; without the guard against broken steps a sum may be one.
pub(crate) fn nan_where_null<'de, D: serde::Deserializer<'de>>(d: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(d)?.unwrap_or(f64::NAN))
}

/// Where the documents of a batch lie.
pub fn layout(batch: &TokenBatch) -> Batch {
    let lens: Vec<usize> = batch.docs.iter().map(std::ops::Range::len).collect();
    Batch::causal(&lens)
}

/// The rows of a micro-batch, ready to run.
pub(crate) struct Rows {
    pub env: Env,
    pub ids: Arc<[u32]>,
    pub targets: Arc<[i32]>,
}

impl Rows {
    pub fn new(env: &Env, batch: &TokenBatch, moment: u64) -> Rows {
        if let Some(context) = &env.context {
            let documents: Vec<usize> = batch.docs.iter().map(std::ops::Range::len).collect();
            let share = context.share(&documents);
            let (ids, targets) = (share.take(&batch.ids, 0), share.take(&batch.targets, -100));
            return Rows { env: env.for_batch(share.batch, moment), ids, targets };
        }
        if batch.ids.is_empty() && env.hooks.is_some() {
            // On a mesh a rank without tokens takes part all the same, or its peers would wait for it: one token that counts for nothing.
            let env = env.for_batch(Batch::causal(&[1]), moment);
            return Rows { env, ids: [0].into(), targets: [-100].into() };
        }
        let (ids, targets) = tensors(batch);
        Rows { env: env.for_batch(layout(batch), moment), ids, targets }
    }
}

/// Forward and backward of one micro-batch: gradients of the summed loss are added to the parameters' slots.
///
/// # Errors
/// If an id has no row, or memory runs out.
pub fn forward_backward(model: &Model, env: &Env, batch: &TokenBatch) -> Result<LossCount> {
    if batch.num_targets == 0 && env.hooks.is_none() {
        return Ok(LossCount::default());
    }
    let Rows { env, ids, targets } = &Rows::new(env, batch, env.moment);
    let profiler = env.rt.device().profiler();
    let mut cx = Cx::train(env);
    let forward = profiler.phase("forward");
    let out = loss(model, &mut cx, ids, targets)?;
    drop(forward);
    let _backward = profiler.phase("backward");
    let one = env.rt.from_f32(&[1], &[1.0], Category::Activations)?;
    if let Some(tape) = cx.into_tape() {
        tape.backward(&env.rt, &out.loss, one)?;
    }
    Ok(LossCount { sum: out.sum.sum, count: out.sum.count as u64 })
}

/// Forward only.
///
/// # Errors
/// As [`forward_backward`].
pub fn evaluate_batch(model: &Model, env: &Env, batch: &TokenBatch) -> Result<LossCount> {
    if batch.num_targets == 0 && env.hooks.is_none() {
        return Ok(LossCount::default());
    }
    let Rows { env, ids, targets } = &Rows::new(env, batch, env.moment);
    let out = loss(model, &mut Cx::eval(env), ids, targets)?;
    Ok(LossCount { sum: out.sum.sum, count: out.sum.count as u64 })
}

fn tensors(batch: &TokenBatch) -> (Arc<[u32]>, Arc<[i32]>) {
    (batch.ids.as_slice().into(), batch.targets.as_slice().into())
}
