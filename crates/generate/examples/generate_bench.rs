//! Tokens per second of generation on a model folder, beside the measured read bandwidth of this machine (generating one
//! token at a time reads every weight once, so bandwidth / bytes of weights is its ceiling).
//!
//! `cargo run --release -p phalanx-generate --example generate_bench -- DIR [--threads 2] [--dtype f32|bf16] [--tokens 64]`

use std::ops::ControlFlow;
use std::time::Instant;

use phalanx_generate::{Generator, GeneratorOptions, Request};
use phalanx_kernels::peak;
use phalanx_models::{Model, ModelConfig, load_weights};
use phalanx_nn::{Batch, Env};
use phalanx_tensor::{Category, DType, Runtime};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut dir = None;
    let (mut threads, mut dtype, mut tokens) = (2usize, DType::F32, 64usize);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--tokens" => tokens = value()?.parse()?,
            "--dtype" => {
                dtype = match value()?.as_str() {
                    "f32" => DType::F32,
                    "bf16" => DType::Bf16,
                    other => return Err(format!("--dtype {other}: f32 or bf16").into()),
                }
            }
            other => dir = Some(other.to_owned()),
        }
    }
    let dir = dir.ok_or("which model folder?")?;
    let rt = Runtime::new(threads);
    let model = Model::new(&ModelConfig::from_folder(&dir)?)?;
    // Norms are read as f32 in training; for speed only the matrices matter.
    load_weights(&rt, &model, &dir, &|_| dtype)?;
    let weights: usize = model.parameters().iter().map(|p| p.value().map(|v| v.bytes()).unwrap_or(0)).sum();
    let read = peak::read_bandwidth_gbs(rt.device())?;
    let env = Env::new(rt.clone(), Batch::causal(&[]));
    let vocab = model.config().vocab_size as u32;
    for batch in [1usize, 4, 8] {
        let mut generator = Generator::new(&model, &env, GeneratorOptions { max_batch: batch, ..Default::default() })?;
        let request = |i: usize| Request {
            prompt: (0..128).map(|t| (t * 31 + i as u32 * 977 + 5) % vocab).collect(),
            max_new_tokens: tokens,
            ..Request::default()
        };
        let start = Instant::now();
        let mut first = None;
        let mut last = start;
        let mut seen = 0usize;
        generator.generate((0..batch).map(request).collect(), &mut |t| {
            // From here on every sequence is past its prompt.
            if t.request + 1 == batch && t.index == 0 {
                first = Some(Instant::now());
                seen = 0;
            } else {
                seen += 1;
            }
            last = Instant::now();
            Ok(ControlFlow::Continue(()))
        })?;
        let first = first.ok_or("no token came")?;
        let prefill = (128 * batch) as f64 / (first - start).as_secs_f64();
        let decode = seen as f64 / (last - first).as_secs_f64();
        let ceiling = read * 1e9 / weights as f64 * batch as f64;
        println!(
            "{{\"batch\": {batch}, \"threads\": {threads}, \"dtype\": \"{dtype}\", \"prefill_tokens_per_s\": {prefill:.1}, \
             \"decode_tokens_per_s\": {decode:.2}, \"weights_mib\": {}, \"read_gb_s\": {read:.1}, \
             \"ceiling_tokens_per_s\": {ceiling:.2}, \"of_ceiling\": {:.3}, \"kv_cache_mib\": {}}}",
            weights >> 20,
            decode / ceiling,
            rt.pool().current(Category::KvCache) >> 20,
        );
    }
    Ok(())
}
