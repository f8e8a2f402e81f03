//! `phalanx bench train`

use phalanx_tensor::DType;
use phalanx_train::bench::{BenchOptions, Layout, bench_train};

use super::super::runtime;
use super::show;
use crate::args::{BenchTrain, Dtype};
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(a: BenchTrain) -> Result<Outcome> {
    let rt = runtime(a.threads)?;
    let options = BenchOptions {
        shape: a.shape,
        batch: a.batch,
        seq: a.seq,
        dtype: if a.dtype == Dtype::F32 { DType::F32 } else { DType::Bf16 },
        warmup: a.warmup,
        steps: a.steps,
        recompute: a.recompute,
        arithmetic: a.arithmetic,
        ranks: a.ranks,
        layout: a.plan.as_deref().map(Layout::read).transpose()?,
        micro_batches: a.micro_batches,
        profile: a.profiling.profile,
    };
    let result = bench_train(&rt, &options)?;
    if a.json {
        out::line(serde_json::to_string(&result)?)?;
    } else {
        out::line(format_args!("{} {} parameters, {} threads", result.shape, result.params, result.threads))?;
        if result.ranks > 1 {
            out::line(format_args!("{} ranks: {}", result.ranks, result.mesh))?;
        }
        out::line(format_args!(
            "{:.1} tokens/s, {:.1} GFLOP/s, {:.3} s a step",
            result.tokens_per_s, result.model_gflops, result.step_s
        ))?;
        out::line(format_args!(
            "peak memory {} MiB; loss {} -> {}",
            result.peak_rss_mib, result.loss_first, result.loss_last
        ))?;
    }
    show(&rt, &a.profiling, a.json)?;
    Ok(Outcome::Done)
}
