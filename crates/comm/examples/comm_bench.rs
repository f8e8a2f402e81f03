//! How fast ranks of this process exchange large buffers, beside what the machine can copy.
//!
//! `cargo run --release -p phalanx-comm --example comm_bench -- RANKS [MIB...]`
//!
//! One JSON line for each collective and size. An operation on P ranks whose full buffer has N bytes reads N and writes N on every
//! rank (all_reduce: its slice of P buffers; all_gather: P shards), so `gb_per_s` is 2·P·N over time. The copies beside it
//! are of N bytes on each of P threads, 2·P·N over time as well, by the C library and past the caches, measured in the same rounds.
//! `fraction` is the operation's rate over that of the faster copy. Time runs from the first rank's start to the last one's end;
//! medians.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use phalanx_comm::{CommError, Communicator, ReduceOp, run_ranks};
use phalanx_kernels::stream;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

const ROUNDS: usize = 15;

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn empty(rt: &Runtime, len: usize) -> Tensor {
    let mut t = rt.empty(&[len], DType::F32, Category::Communication).unwrap();
    t.f32_mut().unwrap().fill(1.0);
    t
}

/// A barrier that does not sleep: waking up would cost more than small copies do.
#[derive(Default)]
struct Start(AtomicUsize);

impl Start {
    fn wait(&self, n: usize) {
        let ticket = self.0.fetch_add(1, Ordering::AcqRel);
        while self.0.load(Ordering::Acquire) < (ticket / n + 1) * n {
            std::thread::yield_now();
        }
    }
}

const OPS: [&str; 4] = ["all_reduce", "all_gather", "copy", "copy_past_cache"];

/// For each operation and round, when this rank began and ended.
type Times = [Vec<(f64, f64)>; 4];

fn measure(comm: &Communicator, start: &Start, epoch: Instant, len: usize) -> Result<Times, CommError> {
    let rt = Runtime::new(1);
    let n = comm.size();
    let (mut a, mut b) = (empty(&rt, len), empty(&rt, len));
    let shard = empty(&rt, len / n);
    let (a, b) = (a.f32_mut().unwrap(), b.f32_mut().unwrap());
    let mut times = Times::default();
    for _ in 0..ROUNDS {
        for (op, times) in times.iter_mut().enumerate() {
            start.wait(n);
            let begin = epoch.elapsed().as_secs_f64();
            match op {
                0 => comm.all_reduce(ReduceOp::Sum, a)?,
                1 => comm.all_gather(shard.f32().unwrap(), &mut b[..len / n * n])?,
                2 => b.copy_from_slice(a),
                _ => copy_past_cache(b, a),
            }
            times.push((begin, epoch.elapsed().as_secs_f64()));
        }
    }
    Ok(times)
}

fn copy_past_cache(to: &mut [f32], from: &[f32]) {
    // SAFETY: the bytes of two slices of f32, of which any bits are values.
    let (to, from) = unsafe { (to.align_to_mut::<u8>().1, from.align_to::<u8>().1) };
    stream::copy_past_cache(to, from);
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let n = numbers.first().copied().unwrap_or(2).max(1);
    let sizes = if numbers.len() > 1 { numbers[1..].to_vec() } else { vec![1, 16, 64] };
    for mib in sizes {
        let len = mib << 18;
        let (start, epoch) = (Start::default(), Instant::now());
        let ranks = run_ranks(n, |comm| measure(&comm, &start, epoch, len)).unwrap_or_else(|e| panic!("{e}"));
        let rate = |op: usize| {
            let round = |i: usize| {
                let begin = ranks.iter().map(|r| r[op][i].0).fold(f64::MAX, f64::min);
                ranks.iter().map(|r| r[op][i].1).fold(0.0, f64::max) - begin
            };
            2.0 * n as f64 * (len * 4) as f64 / median((0..ROUNDS).map(round).collect()) / 1e9
        };
        let (copy, past) = (rate(2), rate(3));
        for op in [0, 1] {
            println!(
                "{{\"bench\":\"comm\",\"op\":\"{}\",\"ranks\":{n},\"mib\":{mib},\"gb_per_s\":{:.2},\"{}_gb_per_s\":{copy:.2},\"{}_gb_per_s\":{past:.2},\"fraction\":{:.2}}}",
                OPS[op],
                rate(op),
                OPS[2],
                OPS[3],
                rate(op) / copy.max(past)
            );
        }
    }
    latency(n);
}

/// Time of a barrier and of a small all_reduce.
fn latency(n: usize) {
    let per_call = run_ranks(n, |comm| {
        let mut x = [0f32; 1024];
        let begin = Instant::now();
        for _ in 0..2000 {
            comm.all_reduce(ReduceOp::Sum, &mut x)?;
        }
        Ok::<_, CommError>(begin.elapsed().as_secs_f64() / 2000.0 * 1e6)
    })
    .unwrap_or_else(|e| panic!("{e}"));
    println!("{{\"bench\":\"comm\",\"op\":\"all_reduce\",\"ranks\":{n},\"kib\":4,\"us_per_call\":{:.1}}}", per_call[0]);
}
