//! How long a step takes here: for `minutes`, and for saying beforehand how long the demo will take.

use std::time::Instant;

use phalanx_data::{Corpus, Stream, StreamOptions};
use phalanx_nn::{Batch, Env};
use phalanx_train::job::{Job, data_options};
use phalanx_train::step::{forward_backward, layout};

use crate::error::{DemoError, Result};

/// Steps that are timed, after one that is not.
const TIMED: usize = 3;

/// Seconds of a training step: the fastest of a few, without the update of the weights (a few percent). `job` has weights, which do not change.
///
/// # Errors
/// If memory runs out.
pub fn seconds_per_step(job: &Job, corpus: &Corpus) -> Result<f64> {
    let t = &job.config.train;
    let mut stream = Stream::new(corpus.clone(), StreamOptions::of(&data_options(&job.config)));
    let mut env = Env::new(job.rt.clone(), Batch::causal(&[]));
    env.plan = job.plan.clone();
    env.training = true;
    let mut best = f64::INFINITY;
    for i in 0..=TIMED {
        let started = Instant::now();
        for _ in 0..t.gradient_accumulation_steps {
            let batch = stream.next_batch(t.per_device_train_batch_size)?;
            forward_backward(&job.model, &env.for_batch(layout(&batch), 0), &batch)?;
        }
        if i > 0 {
            best = best.min(started.elapsed().as_secs_f64());
        }
    }
    for p in job.model.parameters() {
        drop(p.grad().take());
    }
    Ok(best)
}

/// Steps that fit in `minutes`, at least 10.
pub fn steps_in(minutes: f64, seconds_per_step: f64) -> u64 {
    ((minutes * 60.0 / seconds_per_step) as u64).max(10)
}

/// Refuses minutes that mean nothing.
///
/// # Errors
/// Names the option.
pub fn check_minutes(minutes: f64) -> Result<()> {
    if minutes.is_finite() && minutes > 0.0 {
        return Ok(());
    }
    Err(DemoError::Option { key: "minutes", why: format!("{minutes} is not a time; write a number above 0") })
}
