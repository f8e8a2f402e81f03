//! Attention over the ranks of a group, each with one thread, beside one rank with as many threads: time of a forward and backward.
//!
//! `cargo run --release --example context_bench -p phalanx-parallel [rows] [ranks]` prints one JSON line a form; `ratio` is its time over that of one
//! rank (lower is better), `waiting` the part of its time in which a rank waited for others.

use std::time::Instant;

use phalanx_autograd::Tape;
use phalanx_autograd::functions::{AttentionSpec, attention};
use phalanx_comm::{Communicator, run_ranks};
use phalanx_nn::{Batch, ContextParallel, NnError};
use phalanx_parallel::context::{Context, ContextForm, Partition};
use phalanx_tensor::{Category, Runtime, Tensor};

/// Heads and their width as in a model of half a billion parameters.
const HEADS: usize = 14;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const ROUNDS: usize = 12;

fn input(rt: &Runtime, rows: usize, heads: usize) -> Result<Tensor, NnError> {
    let n = rows * heads * DIM;
    let values: Vec<f32> = (0..n).map(|i| ((i * 7919 % 1009) as f32 / 504.5) - 1.0).collect();
    Ok(rt.from_f32(&[rows, heads, DIM], &values, Category::Activations)?)
}

/// An attention of q, k and v.
type Run<'a> = &'a dyn Fn(&mut Tape, [&Tensor; 3]) -> Result<Tensor, NnError>;

/// Seconds of a forward and backward: the median of some, on this rank.
fn time(rt: &Runtime, rows: usize, comm: Option<&Communicator>, run: Run<'_>) -> Result<f64, NnError> {
    let (q, k, v) = (input(rt, rows, HEADS)?, input(rt, rows, KV_HEADS)?, input(rt, rows, KV_HEADS)?);
    let dout = input(rt, rows, HEADS)?;
    let mut seconds = vec![];
    for _ in 0..ROUNDS {
        if let Some(comm) = comm {
            comm.barrier().map_err(|e| NnError::Parallel(e.to_string()))?;
        }
        let start = Instant::now();
        let mut tape = Tape::new();
        let (q, k, v) = (tape.input(q.clone()), tape.input(k.clone()), tape.input(v.clone()));
        let out = run(&mut tape, [&q, &k, &v])?;
        tape.backward(rt, &out, dout.clone())?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[ROUNDS / 2])
}

fn over(rows: usize, ranks: usize, form: ContextForm, partition: Option<Partition>) -> Result<(f64, f64), String> {
    let times = run_ranks(ranks, |comm| {
        let rt = Runtime::new(1);
        let context = Context::new(&comm, form, partition).map_err(|e| NnError::Parallel(e.to_string()))?;
        let share = context.share(&[rows]);
        let Some(attention) = share.batch.context.clone() else { return Ok((0.0, 0.0)) };
        comm.reset_traffic();
        let own = share.batch.tokens();
        let run = |tape: &mut Tape, qkv: [&Tensor; 3]| attention.attention(&rt, Some(tape), qkv, 0.125, None);
        let begin = Instant::now();
        let seconds = time(&rt, own, Some(&comm), &run)?;
        let waiting = comm.traffic().total().waiting.as_secs_f64() / begin.elapsed().as_secs_f64();
        Ok::<_, NnError>((seconds, waiting))
    });
    let times = times.map_err(|e| e.to_string())?;
    Ok(times.into_iter().fold((0.0f64, 0.0f64), |a, b| (a.0.max(b.0), a.1.max(b.1))))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<usize>());
    let rows = arguments.next().transpose()?.unwrap_or(2048);
    let ranks = arguments.next().transpose()?.unwrap_or(2);
    let rt = Runtime::new(ranks);
    let seqs = Batch::causal(&[rows]).seqs;
    let spec = AttentionSpec { seqs, scale: 0.125, window: None };
    let alone = |tape: &mut Tape, [q, k, v]: [&Tensor; 3]| Ok(attention(&rt, Some(tape), q, k, v, spec.clone())?);
    let one = || time(&rt, rows, None, &alone);
    let mut forms = vec![
        (ContextForm::AllGather, None),
        (ContextForm::AllGather, Some(Partition::Contiguous)),
        (ContextForm::Ring, None),
        (ContextForm::Ring, Some(Partition::Contiguous)),
    ];
    if HEADS.is_multiple_of(ranks) {
        forms.push((ContextForm::Ulysses, None));
    }
    for (form, partition) in forms {
        // One rank before and after, as other work on the machine changes.
        let before = one()?;
        let (seconds, waiting) = over(rows, ranks, form, partition)?;
        let one = (before + one()?) / 2.0;
        let line = serde_json::json!({
            "form": form, "partition": partition.unwrap_or(form.partition()), "rows": rows, "ranks": ranks,
            "ms": 1e3 * seconds, "one_rank_ms": 1e3 * one, "ratio": seconds / one, "waiting": waiting,
        });
        println!("{line}");
    }
    Ok(())
}
