//! Rates of the low-precision kernels, beside the copy bandwidth of the same run.
//!
//! `cargo run --release -p phalanx-kernels --example lowp_bench -- [threads] [avx512|avx2|portable]` prints one JSON line a
//! case. `gbs` is GB of f32 values a second (4 bytes each, whatever the codes are), `of_copy` the same over a copy's.

use std::hint::black_box;
use std::time::Instant;

use phalanx_kernels::lowp::{
    self, E4M3, E5M2, Fp16, Int8, Operand, Recipe, Rounding, Scaling, Tile, fake_quantise, quantise,
};
use phalanx_kernels::{Device, Isa, f16};

const ROWS: usize = 2048;
const COLS: usize = 2048;

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
    let n = ROWS * COLS;
    let x: Vec<f32> = (0..n).map(|i| ((i * 7919) % 2003) as f32 / 1001.0 - 1.0).collect();
    let mut out = vec![0f32; n];
    let copy = rate(n, || out.copy_from_slice(black_box(&x)));
    let report = |name: &str, gbs: f64| {
        println!(
            "{{\"case\":\"{name}\",\"isa\":\"{isa}\",\"threads\":{threads},\"gbs\":{gbs:.2},\"of_copy\":{:.2}}}",
            gbs / copy
        );
    };
    report("copy", copy);

    let (mut bytes, mut ints, mut halves) = (vec![0u8; n], vec![0i8; n], vec![f16::ZERO; n]);
    report("encode e4m3", rate(n, || lowp::encode::<E4M3>(&dev, &x, &mut bytes).unwrap()));
    report("decode e4m3", rate(n, || lowp::decode::<E4M3>(&dev, &bytes, &mut out).unwrap()));
    report("encode e5m2", rate(n, || lowp::encode::<E5M2>(&dev, &x, &mut bytes).unwrap()));
    report("decode e5m2", rate(n, || lowp::decode::<E5M2>(&dev, &bytes, &mut out).unwrap()));
    report("encode fp16", rate(n, || lowp::encode::<Fp16>(&dev, &x, &mut halves).unwrap()));
    report("decode fp16", rate(n, || lowp::decode::<Fp16>(&dev, &halves, &mut out).unwrap()));
    report("amax", rate(n, || _ = black_box(lowp::amax(&dev, &x))));

    let nearest = Rounding::NearestEven;
    let random = Rounding::Stochastic { seed: 1, first: 0 };
    let mut scales = vec![0f32; Tile::ROW_128.scales(ROWS, COLS)];
    let quantise_int8 = |rounding, codes: &mut [i8], scales: &mut [f32]| {
        quantise::<Int8>(&dev, Tile::ROW_128, Scaling::Amax, rounding, &x, ROWS, COLS, codes, scales).unwrap();
    };
    report("quantise int8 1x128", rate(n, || quantise_int8(nearest, &mut ints, &mut scales)));
    report("quantise int8 1x128, stochastic", rate(n, || quantise_int8(random, &mut ints, &mut scales)));
    report("compress", rate(n, || lowp::saved::compress(&dev, &x, ROWS, COLS, &mut bytes, &mut scales).unwrap()));
    report("decompress", rate(n, || lowp::saved::decompress(&dev, &bytes, &scales, ROWS, COLS, &mut out).unwrap()));
    for recipe in Recipe::ALL {
        for operand in [Operand::Activation, Operand::Weight] {
            let along = recipe.spec(operand);
            for (name, spec) in [("", along), (" over rows", along.summed_over_rows())] {
                let gbs = rate(n, || fake_quantise(&dev, &spec, nearest, &x, ROWS, COLS, &mut out).unwrap());
                report(&format!("fake {recipe} {operand:?}{name}"), gbs);
            }
        }
        let spec = recipe.spec(Operand::Gradient);
        let gbs = rate(n, || fake_quantise(&dev, &spec, random, &x, ROWS, COLS, &mut out).unwrap());
        report(&format!("fake {recipe} Gradient, stochastic"), gbs);
    }
}

/// GB of f32 a second of the fastest of several calls.
fn rate(n: usize, mut f: impl FnMut()) -> f64 {
    f();
    let best = (0..9)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    n as f64 * 4e-9 / best
}
