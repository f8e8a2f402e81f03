//! How fast ranks of this process exchange large buffers, beside what the machine can copy.
//!
//! `cargo run --release -p phalanx-comm --example comm_bench -- RANKS [MIB...]`
//!
//! One JSON line for each collective and size. `gb_per_s` is bytes that the operation must read and write on all ranks, over
//! time: an all_reduce of N bytes on P ranks reads and writes N on each, 2·P·N; an all_gather to N bytes reads every shard
//! once (N over all ranks) and writes N on each, N + P·N (a copy per rank that reads its source anew would have 2·P·N). `copy_gb_per_s` is a copy of N bytes
//! on each of as many threads, 2·P·N over time: the faster of the C library's and one past the caches, measured in the same rounds.
//! `fraction` is their quotient.

use std::sync::Barrier;
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

struct Times {
    reduce: f64,
    gather: f64,
    copy: f64,
    stream: f64,
}

fn measure(comm: &Communicator, start: &Barrier, len: usize) -> Result<Times, CommError> {
    let rt = Runtime::new(1);
    let n = comm.size();
    let (mut a, mut b) = (empty(&rt, len), empty(&rt, len));
    let shard = empty(&rt, len / n);
    let (mut reduce, mut gather, mut copy, mut streamed) = (vec![], vec![], vec![], vec![]);
    let timed = |out: &mut Vec<f64>, work: &mut dyn FnMut() -> Result<(), CommError>| {
        start.wait();
        let begin = Instant::now();
        work()?;
        // Until the last rank is through.
        start.wait();
        out.push(begin.elapsed().as_secs_f64());
        Ok::<_, CommError>(())
    };
    for _ in 0..ROUNDS {
        timed(&mut reduce, &mut || comm.all_reduce(ReduceOp::Sum, a.f32_mut().unwrap()))?;
        timed(&mut gather, &mut || comm.all_gather(shard.f32().unwrap(), &mut b.f32_mut().unwrap()[..len / n * n]))?;
        timed(&mut copy, &mut || {
            b.f32_mut().unwrap().copy_from_slice(a.f32().unwrap());
            Ok(())
        })?;
        timed(&mut streamed, &mut || {
            let bytes = |x: &[f32]| x.as_ptr().cast::<u8>();
            let (from, to) = (bytes(a.f32().unwrap()), b.f32_mut().unwrap().as_mut_ptr().cast::<u8>());
            // SAFETY: two tensors' own memory, `len` f32 each.
            let (from, to) =
                unsafe { (std::slice::from_raw_parts(from, len * 4), std::slice::from_raw_parts_mut(to, len * 4)) };
            stream::copy_past_cache(to, from);
            Ok(())
        })?;
    }
    Ok(Times { reduce: median(reduce), gather: median(gather), copy: median(copy), stream: median(streamed) })
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let n = numbers.first().copied().unwrap_or(2).max(1);
    let sizes = if numbers.len() > 1 { numbers[1..].to_vec() } else { vec![1, 16, 64] };
    for mib in sizes {
        let len = mib << 18;
        let start = Barrier::new(n);
        let times = run_ranks(n, |comm| measure(&comm, &start, len)).unwrap_or_else(|e| panic!("{e}")).swap_remove(0);
        let bytes = (len * 4) as f64;
        let ceiling = 2.0 * n as f64 * bytes / times.copy.min(times.stream) / 1e9;
        let rates = [
            ("all_reduce", 2.0 * n as f64 * bytes / times.reduce / 1e9),
            ("all_gather", (1.0 + n as f64) * bytes / times.gather / 1e9),
        ];
        for (name, rate) in rates {
            println!(
                "{{\"bench\":\"comm\",\"op\":\"{name}\",\"ranks\":{n},\"mib\":{mib},\"gb_per_s\":{rate:.2},\"copy_gb_per_s\":{ceiling:.2},\"fraction\":{:.2}}}",
                rate / ceiling
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
