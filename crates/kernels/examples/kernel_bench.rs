//! Rates of every kernel but the matrix product, against what the same run measures for register multiply-adds and copying.
//!
//! `cargo run --release -p phalanx-kernels --example kernel_bench [threads]` prints one JSON line a case.
fn main() {
    attention();
}
fn attention() {
    use phalanx_kernels::attention::*;
    use phalanx_kernels::*;
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1);
    let dev = Device::new(threads);
    for (s, heads, kv, d) in [(512, 9, 3, 64), (1024, 9, 3, 64), (2048, 9, 3, 64), (1024, 4, 2, 128), (2048, 4, 2, 128)] {
        let seqs = [Seq { q_start: 0, q_len: s, kv_start: 0, kv_len: s }];
        let a = Attention { seqs: &seqs, heads, kv_heads: kv, head_dim: d, scale: 0.125, window: None };
        let q: Vec<f32> = (0..s * heads * d).map(|i| ((i * 7919 % 1000) as f32) / 500.0 - 1.0).collect();
        let k: Vec<f32> = (0..s * kv * d).map(|i| ((i * 6101 % 1000) as f32) / 500.0 - 1.0).collect();
        let (mut o, mut l) = (q.clone(), vec![0.0; s * heads]);
        let (mut dq, mut dk, mut dv) = (q.clone(), k.clone(), k.clone());
        let flops = (s * (s + 1) / 2 * heads * d * 4) as f64;
        let best = |f: &mut dyn FnMut()| {
            (0..7).map(|_| { let t = std::time::Instant::now(); f(); t.elapsed().as_secs_f64() }).fold(1e9, f64::min)
        };
        let f = best(&mut || forward(&dev, &a, &q, &k, &k, &mut o, &mut l).unwrap());
        let b = best(&mut || backward(&dev, &a, &q, &k, &k, &o, &l, &q, &mut dq, &mut dk, &mut dv).unwrap());
        println!("S {s} D {d}: forward {:.1} GFLOP/s, backward {:.1}", flops / f / 1e9, flops * 2.5 / b / 1e9);
    }
}
