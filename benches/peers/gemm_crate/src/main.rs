//! f32 products of the `gemm` crate (feature `x86-v4`, so with AVX-512), in the form of `phalanx bench gemm --json`: one JSON line a shape.
//!
//! `gemm-crate-bench THREADS ROUNDS SHAPE...` with shapes such as `forward 2048x576x576` (x·Wᵀ), `dgrad …` (dy·W), `wgrad …` (dyᵀ·x).

use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [threads, rounds, shapes @ ..] = &args[..] else {
        eprintln!("usage: gemm-crate-bench THREADS ROUNDS SHAPE...");
        std::process::exit(2);
    };
    let (threads, rounds): (usize, usize) = (threads.parse().expect("threads"), rounds.parse().expect("rounds"));
    for shape in shapes {
        let (kind, sizes) = shape.split_once(' ').expect("kind and sizes");
        let sizes: Vec<usize> = sizes.split('x').map(|s| s.parse().expect("a size")).collect();
        let [m, n, k] = sizes[..] else { panic!("three sizes") };
        let values = |len: usize| -> Vec<f32> { (0..len).map(|i| (i * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0).collect() };
        let (a, b, mut c) = (values(m * k), values(k * n), vec![0f32; m * n]);
        // Column and row strides of A [M, K] and B [K, N] as they are stored.
        let (a_strides, b_strides) = match kind {
            "forward" => ((1, k as isize), (k as isize, 1)),
            "dgrad" => ((1, k as isize), (1, n as isize)),
            "wgrad" => ((m as isize, 1), (1, n as isize)),
            _ => panic!("{kind} is none of forward, dgrad, wgrad"),
        };
        let parallelism = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
        let mut run = || {
            let start = Instant::now();
            // SAFETY: the strides describe the three buffers, and C is not shared.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    c.as_mut_ptr(),
                    1,
                    n as isize,
                    false,
                    a.as_ptr(),
                    a_strides.0,
                    a_strides.1,
                    b.as_ptr(),
                    b_strides.0,
                    b_strides.1,
                    0f32,
                    1f32,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
            start.elapsed().as_secs_f64()
        };
        run();
        let mut times: Vec<f64> = (0..rounds.max(1)).map(|_| run()).collect();
        times.sort_by(f64::total_cmp);
        let gflops = 2.0 * (m * n * k) as f64 / times[times.len() / 2] / 1e9;
        println!(r#"{{"peer":"gemm 0.19","shape":"{shape}","threads":{threads},"gflops":{gflops:.1}}}"#);
    }
}
