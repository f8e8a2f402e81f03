//! Rates of the kernels that move memory, beside the copy bandwidth of the same run. (Products and attention: `phalanx bench gemm` and
//! `bench attention`.)
//!
//! `cargo run --release -p phalanx-kernels --example kernel_bench -- [threads] [avx512|avx2|portable]` prints one JSON line a
//! case. `of_peak` is GB/s over the copy bandwidth; bytes are those that the kernel must move, once.

use std::time::Instant;

use phalanx_kernels::adamw::{self, AdamW};
use phalanx_kernels::attention::{self, Attention, Seq};
use phalanx_kernels::glu::{self, Act};
use phalanx_kernels::lowp::{self, E4M3, Operand, Recipe, Rounding, Tile};
use phalanx_kernels::scratch::HugeBuf;
use phalanx_kernels::{
    Device, Isa, Mat, cross_entropy, elementwise, embedding, layer_norm, peak, reduce, rms_norm, rope,
};

/// Values in ±1 on huge pages, as tensors lie; kept for the whole run.
fn values(n: usize, seed: usize) -> &'static mut [f32] {
    let buf = Box::leak(Box::new(HugeBuf::new(n * 4).expect("memory for the bench")));
    // SAFETY: the mapping holds n zeroed f32, is never unmapped, and only this slice refers to it.
    let x = unsafe { std::slice::from_raw_parts_mut(buf.as_ptr().cast::<f32>(), n) };
    for (i, v) in x.iter_mut().enumerate() {
        *v = (((i + seed) * 7919) % 2003) as f32 / 1001.0 - 1.0;
    }
    x
}

/// Seconds of the fastest of several calls: processor time where one thread works, so that a busy machine does not count.
fn best(dev: &Device, mut f: impl FnMut()) -> f64 {
    f();
    (0..9)
        .map(|_| {
            let (wall, cpu) = (Instant::now(), cpu_seconds());
            f();
            if dev.team().threads() == 1 { cpu_seconds() - cpu } else { wall.elapsed().as_secs_f64() }
        })
        .fold(f64::INFINITY, f64::min)
}

fn cpu_seconds() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(1);
    let isa = match args.next().as_deref() {
        Some("avx2") => Isa::Avx2,
        Some("portable") => Isa::Portable,
        Some("avx512") => Isa::Avx512,
        _ => Isa::detect(),
    };
    let dev = Device::with_isa(isa, threads).expect("an instruction set of this processor");
    decode_rates(&dev);
    row_rates(&dev);
    low_precision_rates(&dev);
}

fn decode_rates(dev: &Device) {
    for (batch, cached, heads, kv_heads, d) in [(1, 4096, 9, 3, 64), (16, 4096, 9, 3, 64), (4, 4096, 16, 8, 128)] {
        let seqs: Vec<Seq> =
            (0..batch).map(|i| Seq { q_start: i, q_len: 1, kv_start: i * cached, kv_len: cached, ahead: 0 }).collect();
        let a = Attention { seqs: &seqs, heads, kv_heads, head_dim: d, value_dim: d, scale: 0.125, window: None };
        let (nq, nk) = (batch * heads * d, batch * cached * kv_heads * d);
        let (q, k, v, out, lse) = (values(nq, 1), values(nk, 2), values(nk, 3), values(nq, 5), values(nq / d, 6));
        let t = best(dev, || attention::forward(dev, &a, q, k, v, out, lse).unwrap());
        bandwidth(dev, &format!("attention decode, {batch} × {cached} keys, {heads}/{kv_heads} × {d}"), 8 * nk, t);
    }
}

fn bandwidth(dev: &Device, name: &str, bytes: usize, seconds: f64) {
    let (rate, copy) = (bytes as f64 / 1e9 / seconds, peak::copy_bandwidth_gbs(dev).expect("memory for the bench"));
    let of = rate / copy;
    println!(r#"{{"kernel":"{name}","gbs":{rate:.1},"copy":{copy:.1},"of_peak":{of:.2}}}"#);
}

/// Larger than the caches: 2048 tokens of smol-135m (H 576, I 1536, V 49152) and a 28 M-parameter update.
fn row_rates(dev: &Device) {
    let (t, h, inner, vocab) = (8192, 576, 1536, 49152);
    let (x, a, y, z) = (values(t * h, 1), values(t * h, 2), values(t * h, 3), values(t * h, 4));
    let (w, dw, rstd, mean) = (values(h, 5), values(h, 6), values(t, 7), values(t, 8));
    let n = 4 * t * h;
    let wm = || Mat::F32(&*w);

    let s = best(dev, || rms_norm::forward(dev, x, wm(), 1e-5, y, rstd).unwrap());
    bandwidth(dev, "rms_norm forward", 2 * n, s);
    let s = best(dev, || rms_norm::forward_add(dev, x, a, wm(), 1e-5, z, y, rstd).unwrap());
    bandwidth(dev, "rms_norm forward with residual add", 4 * n, s);
    let s = best(dev, || rms_norm::backward(dev, x, wm(), rstd, a, y, Some(dw)).unwrap());
    bandwidth(dev, "rms_norm backward", 3 * n, s);
    let s = best(dev, || layer_norm::forward(dev, x, wm(), Some(wm()), 1e-5, y, mean, rstd).unwrap());
    bandwidth(dev, "layer_norm forward", 2 * n, s);
    let s = best(dev, || layer_norm::backward(dev, x, wm(), mean, rstd, a, y, Some(dw), None).unwrap());
    bandwidth(dev, "layer_norm backward", 3 * n, s);
    let (cos, sin) = (values(t * 32, 9), values(t * 32, 10));
    let s = best(dev, || rope::apply(dev, y, 9, 64, cos, sin, false).unwrap());
    bandwidth(dev, "rope", 2 * n, s);
    let s = best(dev, || elementwise::add(dev, x, a, y).unwrap());
    bandwidth(dev, "add", 3 * n, s);
    let s = best(dev, || elementwise::add_assign(dev, y, a, 0.5).unwrap());
    bandwidth(dev, "add_assign", 3 * n, s);
    let s = best(dev, || elementwise::sum_rows(dev, x, dw).unwrap());
    bandwidth(dev, "sum_rows", n, s);
    let s = best(dev, || {
        std::hint::black_box(reduce::sum_squares(dev, x));
    });
    bandwidth(dev, "sum_squares", n, s);

    let m = 4 * t * inner;
    let (gate, up, out) = (values(t * inner, 1), values(t * inner, 2), values(t * inner, 3));
    let (dgate, dup) = (values(t * inner, 4), values(t * inner, 5));
    for act in [Act::Silu, Act::Gelu, Act::GeluTanh] {
        let s = best(dev, || glu::forward(dev, act, gate, up, out).unwrap());
        bandwidth(dev, &format!("glu forward {act:?}"), 3 * m, s);
        let s = best(dev, || glu::backward(dev, act, gate, up, out, dgate, dup).unwrap());
        bandwidth(dev, &format!("glu backward {act:?}"), 5 * m, s);
    }

    let rows = 256;
    let logits = values(rows * vocab, 6);
    let targets: Vec<i32> = (0..rows).map(|i| (i * 37 % vocab) as i32).collect();
    let (logp, lse) = (values(rows, 7), values(rows, 8));
    let s = best(dev, || cross_entropy::log_probs(dev, logits, &targets, logp, lse).unwrap());
    bandwidth(dev, "log_probs (reads each row twice)", 8 * rows * vocab, s);
    let s = best(dev, || cross_entropy::grad_in_place(dev, logits, &targets, lse, 1.0).unwrap());
    bandwidth(dev, "grad of logits in place", 8 * rows * vocab, s);

    let table = values(vocab * h, 9);
    let ids: Vec<u32> = (0..t).map(|i| ((i * 7919) % vocab) as u32).collect();
    let s = best(dev, || embedding::gather(dev, Mat::F32(&*table), h, &ids, y).unwrap());
    bandwidth(dev, "embedding gather", 2 * n, s);
    let s = best(dev, || embedding::scatter_add(dev, table, h, &ids, x).unwrap());
    bandwidth(dev, "embedding scatter_add", 3 * n, s);

    let (grad, m1, v1) = (values(vocab * h, 10), values(vocab * h, 11), values(vocab * h, 12));
    v1.iter_mut().for_each(|v| *v = v.abs());
    let mut o = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 0, grad_scale: 1.0 };
    let s = best(dev, || {
        o.step += 1;
        adamw::step(dev, &o, table, grad, m1, v1, None).unwrap();
    });
    bandwidth(dev, "adamw", 28 * vocab * h, s);
}

/// Bytes are those of the f32 values, read and written, whatever the codes are.
fn low_precision_rates(dev: &Device) {
    let (rows, cols) = (2048, 2048);
    let n = rows * cols;
    let (x, out) = (values(n, 1), values(n, 2));
    let (mut codes, mut scales) = (vec![0u8; n], vec![0f32; Tile::ROW_128.scales(rows, cols)]);
    let s = best(dev, || lowp::encode::<E4M3>(dev, x, &mut codes).unwrap());
    bandwidth(dev, "encode e4m3", 5 * n, s);
    let s = best(dev, || lowp::decode::<E4M3>(dev, &codes, out).unwrap());
    bandwidth(dev, "decode e4m3", 5 * n, s);
    let s = best(dev, || lowp::saved::compress(dev, x, rows, cols, &mut codes, &mut scales).unwrap());
    bandwidth(dev, "compress for backward", 5 * n, s);
    for recipe in Recipe::ALL {
        for operand in Operand::ALL {
            let spec = recipe.spec(operand);
            for (name, spec) in [("", spec), (" over rows", spec.summed_over_rows())] {
                let round = || lowp::fake_quantise(dev, &spec, Rounding::NearestEven, x, rows, cols, out).unwrap();
                let s = best(dev, round);
                bandwidth(dev, &format!("round {operand:?} {recipe}{name}"), 8 * n, s);
            }
        }
    }
}
