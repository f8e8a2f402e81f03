//! `phalanx bench train`

use phalanx_tensor::DType;
use phalanx_train::bench::{BenchOptions, bench_train};

use crate::args::{Bench, Dtype};
use crate::outcome::{Outcome, Result};

pub fn run(what: Bench) -> Result<Outcome> {
    let Bench::Train(a) = what;
    let rt = super::runtime(a.threads)?;
    let options = BenchOptions {
        shape: a.shape,
        batch: a.batch,
        seq: a.seq,
        dtype: if a.dtype == Dtype::F32 { DType::F32 } else { DType::Bf16 },
        warmup: a.warmup,
        steps: a.steps,
        recompute: a.recompute,
    };
    let result = bench_train(&rt, &options)?;
    if a.json {
        println!("{}", serde_json::to_string(&result)?);
    } else {
        println!("{} {} parameters, {} threads", result.shape, result.params, result.threads);
        println!(
            "{:.1} tokens/s, {:.1} GFLOP/s, {:.3} s a step",
            result.tokens_per_s, result.model_gflops, result.step_s
        );
        println!("peak memory {} MiB; loss {} -> {}", result.peak_rss_mib, result.loss_first, result.loss_last);
    }
    Ok(Outcome::Done)
}
