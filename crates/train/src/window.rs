//! One optimizer step over an accumulation window, on one rank or on many.

use std::sync::Arc;

use phalanx_data::Batch as TokenBatch;
use phalanx_models::Model;
use phalanx_nn::{Batch, ContextParallel, Env, ScopeHooks};
use phalanx_parallel::Distributed;
use phalanx_tensor::Runtime;

use crate::optimizer::{AdamW, clip_factor};
use crate::step::{LossCount, forward_backward};
use crate::{Result, TrainError, pipeline};

/// A micro-batch of a window.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// Its tokens; none where a rank has nothing to do.
    pub tokens: TokenBatch,
    /// Tells its randomness from that of others ([`phalanx_nn::Env::moment`]).
    pub moment: u64,
}

/// What a window gave, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WindowResult {
    /// Loss of the whole window.
    pub loss: LossCount,
    /// Norm of the mean gradient, before clipping.
    pub grad_norm: f64,
    /// Tokens read, targets or not.
    pub tokens: u64,
}

/// The environment of passes on a mesh.
pub fn env_on(env: &Env, distributed: &Arc<Distributed>) -> Env {
    let mut env = env.clone();
    env.hooks = Some(Arc::clone(distributed) as Arc<dyn ScopeHooks>);
    env.context = distributed.context().map(|c| Arc::clone(c) as Arc<dyn ContextParallel>);
    env
}

/// Gradients of a window: of `batches`, this rank's micro-batches
/// (where micro-batches are dealt to the ranks of `cp`, the whole ones, the same on each of them), and on a mesh those of the other ranks. All ranks have the same number of
/// micro-batches, some of which may be empty. Afterwards each kept gradient is the sum over all tokens of the window, wherever they were.
///
/// # Errors
/// As [`forward_backward`]; on a mesh also if a peer fails.
pub fn gradients(
    model: &Model,
    env: &Env,
    batches: &[MicroBatch],
    distributed: Option<&Arc<Distributed>>,
) -> Result<(LossCount, u64)> {
    // Ranks that share a micro-batch count the rows that they hold, so that over all of them each token counts once.
    let context = distributed.and_then(|d| d.context());
    let held = |rows: usize| context.map_or(rows, |c| c.held(rows)) as u64;
    let tokens = batches.iter().map(|b| held(b.tokens.ids.len())).sum();
    let mut loss = LossCount::default();
    if let Some((d, stages)) = distributed.and_then(|d| Some((d, d.stages()?))) {
        d.begin_pipeline();
        loss = pipeline::run(model, env, batches, d, stages)?;
        d.reduce_gradients(&env.rt)?;
        return over_all_ranks(&env.rt, d, loss, tokens);
    }
    for (i, batch) in batches.iter().enumerate() {
        if let Some(d) = distributed {
            d.begin_micro_batch(i + 1 == batches.len());
        }
        loss.add(forward_backward(model, &env.for_batch(Batch::causal(&[]), batch.moment), &batch.tokens)?);
        if let Some(d) = distributed {
            d.finish_backward(&env.rt)?;
        }
    }
    match distributed {
        None => Ok((loss, tokens)),
        Some(d) => over_all_ranks(&env.rt, d, loss, tokens),
    }
}

/// Ends a window: gradients, loss and tokens of all ranks together.
fn over_all_ranks(rt: &Runtime, d: &Distributed, loss: LossCount, tokens: u64) -> Result<(LossCount, u64)> {
    d.finish_window(rt)?;
    let mut sums = [loss.sum, loss.count as f64, tokens as f64];
    d.sum_over_data(&mut sums)?;
    Ok((LossCount { sum: sums[0], count: sums[1] as u64 }, sums[2] as u64))
}

/// A whole step: gradients of the window, clipping to `max_norm` (0: none), update.
///
/// # Errors
/// As [`gradients`].
pub fn step(
    model: &Model,
    env: &Env,
    batches: &[MicroBatch],
    optimizer: &mut AdamW,
    (lr, max_norm): (f32, f64),
    distributed: Option<&Arc<Distributed>>,
) -> Result<WindowResult> {
    let profiler = env.rt.device().profiler();
    let _step = profiler.region("step");
    let (loss, tokens) = gradients(model, env, batches, distributed)?;
    let _optimizer = profiler.phase("optimizer");
    let grad_norm = update(&env.rt, optimizer, loss.count, (lr, max_norm), distributed)?;
    env.scales.commit();
    Ok(WindowResult { loss, grad_norm, tokens })
}

/// Clips the gradients, which are sums over `count` targets, and updates the parameters. Gives the norm of the mean gradient before clipping.
///
/// # Errors
/// If a peer fails or somebody still holds a parameter's value.
pub fn update(
    rt: &Runtime,
    optimizer: &mut AdamW,
    count: u64,
    (lr, max_norm): (f32, f64),
    distributed: Option<&Arc<Distributed>>,
) -> Result<f64> {
    let n = count.max(1) as f64;
    let grad_norm = norm(rt, optimizer, distributed)? / n;
    optimizer.step(rt, lr, (clip_factor(grad_norm, max_norm) / n) as f32)?;
    if let Some(d) = distributed {
        d.parameters_changed();
    }
    Ok(grad_norm)
}

/// Norm of the summed gradients, each element counted once over all ranks.
///
/// # Errors
/// If a peer fails.
pub fn norm(rt: &Runtime, optimizer: &AdamW, distributed: Option<&Arc<Distributed>>) -> Result<f64> {
    let Some(d) = distributed else { return optimizer.grad_norm(rt) };
    let mut sum = [optimizer.grad_sum_squares(rt, &|p| d.counts(p))?];
    d.sum_over_world(&mut sum)?;
    Ok(sum[0].sqrt())
}

impl From<phalanx_comm::CommError> for TrainError {
    fn from(e: phalanx_comm::CommError) -> Self {
        TrainError::Distributed(e.into())
    }
}
