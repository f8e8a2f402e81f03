//! GEMM rates against the multiply-add peak and the read bandwidth of the same run.
//!
//! `cargo run --release -p phalanx-kernels --example gemm_bench -- [threads] [f32|bf16] [filter] [rounds]`
//! One JSON object a line: `gflops` and `of_peak` for products that compute, `gbs` and `of_read` for those that stream. One
//! thread is timed by its processor time, which others on the machine do not disturb; several need a quiet machine.

use phalanx_kernels::gemm::{Gemm, gemm};
use phalanx_kernels::scratch::HugeBuf;
use phalanx_kernels::{Device, Mat, bf16, peak};
use std::time::Instant;

/// Name, M, N, K, whether A and B are stored transposed. `fwd` is x·Wᵀ, `dgrad` dy·W, `wgrad` dyᵀ·x.
const SHAPES: &[(&str, usize, usize, usize, bool, bool)] = &[
    ("fwd 2048x2048x2048", 2048, 2048, 2048, false, true),
    ("dgrad 2048x2048x2048", 2048, 2048, 2048, false, false),
    ("wgrad 2048x2048x2048", 2048, 2048, 2048, true, false),
    ("fwd 1024x768x768", 1024, 768, 768, false, true),
    ("dgrad 1024x768x768", 1024, 768, 768, false, false),
    ("wgrad 768x768x1024", 768, 768, 1024, true, false),
    ("fwd 1024x3072x768", 1024, 3072, 768, false, true),
    ("dgrad 1024x768x3072", 1024, 768, 3072, false, false),
    ("wgrad 3072x768x1024", 3072, 768, 1024, true, false),
    ("fwd 512x32000x768", 512, 32000, 768, false, true),
    ("dgrad 512x768x32000", 512, 768, 32000, false, false),
    ("wgrad 32000x768x512", 32000, 768, 512, true, false),
    ("smol fwd 2048x576x576", 2048, 576, 576, false, true),
    ("smol fwd 2048x192x576", 2048, 192, 576, false, true),
    ("smol fwd 2048x1536x576", 2048, 1536, 576, false, true),
    ("smol wgrad 576x1536x2048", 576, 1536, 2048, true, false),
    ("lora fwd 2048x8x576", 2048, 8, 576, false, true),
    ("decode 1x4096x4096", 1, 4096, 4096, false, true),
    ("decode 1x49152x576", 1, 49152, 576, false, true),
    ("decode 1x1536x576", 1, 1536, 576, false, true),
    ("decode 4x4096x4096", 4, 4096, 4096, false, true),
    ("decode 16x4096x4096", 16, 4096, 4096, false, true),
    ("decode 64x4096x4096", 64, 4096, 4096, false, true),
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, or: &str| args.get(i).cloned().unwrap_or_else(|| or.to_string());
    let threads: usize = arg(0, "1").parse().expect("the number of threads");
    let (half, filter) = (arg(1, "f32") == "bf16", arg(2, ""));
    let rounds: usize = arg(3, "7").parse().expect("the number of rounds");
    let dev = Device::new(threads);
    // The best of each: somebody else's load lowers a rate, nothing raises one.
    let (mut fma, mut read) = (0f64, 0f64);
    let mut rows = Vec::new();
    for &(name, m, n, k, a_trans, b_trans) in SHAPES.iter().filter(|s| s.0.contains(&filter)) {
        let (a, b, c) =
            (Operand::new(m * k, half), Operand::new(k * n, half), HugeBuf::new(4 * m * n).expect("memory"));
        // SAFETY: the mapping holds m·n zeros and is used here alone.
        let c = unsafe { std::slice::from_raw_parts_mut(c.as_ptr().cast::<f32>(), m * n) };
        let g = Gemm { a_trans, b_trans, ..Gemm::nt(m, n, k, a.mat(), b.mat()) };
        let flop = 2.0 * (m * n * k) as f64;
        let repeats = (5e8 / flop).ceil() as usize;
        gemm(&dev, &g, c).expect("shapes fit");
        let mut seconds = f64::MAX;
        for _ in 0..rounds {
            let start = (Instant::now(), peak::thread_time());
            for _ in 0..repeats {
                gemm(&dev, &g, c).expect("shapes fit");
            }
            let took = if threads == 1 { peak::thread_time() - start.1 } else { start.0.elapsed() };
            seconds = seconds.min(took.as_secs_f64() / repeats as f64);
            fma = fma.max(peak::fma_gflops(&dev));
        }
        read = read.max(peak::read_bandwidth_gbs(&dev).expect("memory"));
        let bytes = (n * k) as f64 * if half { 2.0 } else { 4.0 };
        rows.push((name, m, flop / seconds / 1e9, bytes / seconds / 1e9));
    }
    let mut fractions = Vec::new();
    for (name, m, gflops, gbs) in rows {
        if m <= 64 {
            let of = gbs / read;
            println!(
                "{{\"shape\":\"{name}\",\"threads\":{threads},\"bf16\":{half},\"gbs\":{gbs:.1},\"of_read\":{of:.3}}}"
            );
        } else {
            let of = gflops / fma;
            fractions.push(of);
            println!(
                "{{\"shape\":\"{name}\",\"threads\":{threads},\"bf16\":{half},\"gflops\":{gflops:.1},\"of_peak\":{of:.3}}}"
            );
        }
    }
    fractions.sort_by(f64::total_cmp);
    let median = fractions.get(fractions.len() / 2).copied().unwrap_or(0.0);
    println!(
        "{{\"isa\":\"{}\",\"threads\":{threads},\"fma_gflops\":{fma:.1},\"read_gbs\":{read:.1},\"median_of_peak\":{median:.3}}}",
        dev.isa()
    );
}

struct Operand(HugeBuf, usize, bool);

impl Operand {
    fn new(n: usize, half: bool) -> Operand {
        let buf = HugeBuf::new(n * if half { 2 } else { 4 }).expect("memory");
        for i in 0..n {
            let x = ((i * 2_654_435_761) >> 8 & 0xFF) as f32 / 128.0 - 1.0;
            // SAFETY: element i lies in the mapping.
            unsafe {
                if half {
                    *buf.as_ptr().cast::<bf16>().add(i) = bf16::from_f32(x);
                } else {
                    *buf.as_ptr().cast::<f32>().add(i) = x;
                }
            }
        }
        Operand(buf, n, half)
    }
    fn mat(&self) -> Mat<'_> {
        // SAFETY: `new` wrote all elements in this type.
        unsafe {
            if self.2 {
                Mat::Bf16(std::slice::from_raw_parts(self.0.as_ptr().cast(), self.1))
            } else {
                Mat::F32(std::slice::from_raw_parts(self.0.as_ptr().cast(), self.1))
            }
        }
    }
}
