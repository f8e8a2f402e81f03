//! `phalanx bench decode MODEL`: tokens a second of generation. Making one token reads every weight once, so the read bandwidth over the
//! bytes of the weights is the ceiling for one sequence; several share the reading.

use std::ops::ControlFlow;
use std::time::Instant;

use phalanx_generate::{Generator, GeneratorOptions, Request};
use phalanx_kernels::peak;
use serde_json::json;

use super::super::model;
use super::{median, record, rounded, show};
use crate::args::BenchDecode;
use crate::out;
use crate::outcome::{Outcome, Result};

/// Tokens of each prompt.
const PROMPT: usize = 128;

pub fn run(a: &BenchDecode) -> Result<Outcome> {
    if a.tokens < 2 {
        return Err("--tokens must be at least 2".into());
    }
    let loaded = model::load(&a.model)?;
    let (job, dev) = (&loaded.job, loaded.job.rt.device());
    // The head's matrix is the embedding where they are tied; of an untied embedding one row is read.
    let bytes: usize = job
        .model
        .parameters()
        .iter()
        .filter(|p| job.model.config().tie_word_embeddings || !p.name().contains("embed_tokens"))
        .map(|p| p.bytes())
        .sum();
    record(dev, &a.profiling);
    let vocab = job.model.config().vocab_size as u32;
    for &batch in if a.batch.is_empty() { &[1, 4, 16][..] } else { &a.batch } {
        if batch == 0 {
            return Err("--batch must be at least 1".into());
        }
        let (mut prefills, mut decodes, mut reads) = (vec![], vec![], vec![]);
        for _ in 0..a.rounds.max(1) {
            let options = GeneratorOptions { max_batch: batch, ..Default::default() };
            let mut generator = Generator::new(&job.model, &loaded.env, options)?;
            let request = |i: usize| Request {
                prompt: (0..PROMPT).map(|t| (t * 31 + i * 977 + 5) as u32 % vocab).collect(),
                max_new_tokens: a.tokens,
                ..Request::default()
            };
            let start = Instant::now();
            let (mut first, mut last, mut seen) = (None, start, 0usize);
            let generating = dev.profiler().region("generation");
            generator.generate((0..batch).map(request).collect(), &mut |t| {
                last = Instant::now();
                // Once the last sequence has its first token, all are past their prompts.
                match first {
                    None if t.request + 1 == batch && t.index == 0 => first = Some(last),
                    None => {}
                    Some(_) => seen += 1,
                }
                Ok(ControlFlow::Continue(()))
            })?;
            drop(generating);
            let first = first.ok_or("no token came")?;
            prefills.push((PROMPT * batch) as f64 / (first - start).as_secs_f64());
            decodes.push(seen as f64 / (last - first).as_secs_f64());
            reads.push(peak::read_bandwidth_gbs(dev)?);
        }
        let (prefill, decode, read) = (median(prefills), median(decodes), median(reads));
        let ceiling = read * 1e9 / bytes as f64;
        let of = decode / ceiling / batch as f64;
        if a.json {
            out::line(json!({
                "batch": batch, "threads": dev.team().threads(), "isa": dev.isa().to_string(), "weight_mib": bytes >> 20,
                "prefill_tokens_per_s": rounded(prefill, 1), "decode_tokens_per_s": rounded(decode, 1),
                "read": rounded(read, 1), "ceiling_tokens_per_s": rounded(ceiling * batch as f64, 1), "fraction_of_ceiling": rounded(of, 3),
            }))?;
        } else {
            out::line(format_args!(
                "batch {batch:<3} prefill {prefill:>7.1} tokens/s, decode {decode:>7.1} tokens/s: {of:.2} of {batch} × {ceiling:.1} ({} MiB at {read:.1} GB/s)",
                bytes >> 20
            ))?;
        }
    }
    show(&job.rt, &a.profiling, a.json)?;
    Ok(Outcome::Done)
}
