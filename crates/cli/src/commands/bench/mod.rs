//! `phalanx bench`: one file a subject. Every rate stands beside the ceiling that the same run measured, since on a shared machine the
//! ceiling moves.

mod attention;
mod decode;
mod gemm;
mod grouped;
mod train;

use phalanx_kernels::Device;
use phalanx_kernels::peak::thread_time;
use phalanx_tensor::{Category, DType, Runtime, Tensor};
use phalanx_train::profiling;
use std::time::Instant;

use crate::args::{Bench, Profiling};
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(what: Bench) -> Result<Outcome> {
    match what {
        Bench::Train(a) => train::run(a),
        Bench::Gemm(a) => gemm::run(&a),
        Bench::Attention(a) => attention::run(&a),
        Bench::Decode(a) => decode::run(&a),
    }
}

/// Begins what [`show`] ends, where it is asked for.
fn record(dev: &Device, p: &Profiling) {
    if p.profile {
        dev.profiler().start(0);
    }
}

/// Shows the profile, and writes its trace if there is a place for it.
fn show(rt: &Runtime, p: &Profiling, json: bool) -> Result<()> {
    let Some(profile) = profiling::finish(rt) else { return Ok(()) };
    if json {
        profile.json_lines().iter().try_for_each(out::line)?;
    } else {
        out::text(format_args!("\n{}", profile.render(super::style())))?;
    }
    if let Some(path) = &p.trace {
        profiling::write_trace(&profile, path)?;
        if !json {
            out::line(format_args!("trace: {} (open it at https://ui.perfetto.dev)", path.display()))?;
        }
    }
    Ok(())
}

/// Seconds of one call of `work`, repeated for at least 50 ms; what a profile counts. One thread is timed by its processor time, which others on the machine do
/// not disturb; several by the clock.
fn seconds(dev: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let (threads, _region) = (dev.team().threads(), dev.profiler().region("measurement"));
    let mut calls = 0u32;
    let (clock, own) = (Instant::now(), thread_time());
    loop {
        work()?;
        calls += 1;
        let took = if threads == 1 { thread_time() - own } else { clock.elapsed() };
        if took.as_millis() >= 50 {
            return Ok(took.as_secs_f64() / f64::from(calls));
        }
    }
}

/// Values between −1 and 1.
fn values(rt: &Runtime, len: usize, seed: usize) -> Result<Tensor> {
    let mut t = rt.empty(&[len], DType::F32, Category::Workspace)?;
    for (i, x) in t.f32_mut()?.iter_mut().enumerate() {
        *x = ((i * 2_654_435_761 + seed * 97) >> 8 & 0xFF) as f32 / 128.0 - 1.0;
    }
    Ok(t)
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn rounded(x: f64, digits: i32) -> f64 {
    (x * 10f64.powi(digits)).round() / 10f64.powi(digits)
}
