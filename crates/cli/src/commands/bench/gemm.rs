//! `phalanx bench gemm`: the products of a transformer step, beside the multiply-add peak and the read bandwidth.

use phalanx_kernels::gemm::{Arithmetic, Gemm, gemm};
use phalanx_kernels::peak;
use phalanx_tensor::{Category, DType, Runtime, Tensor};
use serde_json::json;

use super::super::runtime;
use super::{grouped, median, record, rounded, seconds, show, values};
use crate::args::{BenchGemm, Dtype};
use crate::out;
use crate::outcome::{Outcome, Result};

/// Which product of a linear layer.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// x·Wᵀ
    Forward,
    /// dy·W
    InputGradient,
    /// dyᵀ·x
    WeightGradient,
    /// x·Wᵀ with few rows: W streams past
    Decode,
}

use Kind::{Decode, Forward, InputGradient, WeightGradient};

/// Kind, M, N, K.
const SHAPES: &[(Kind, usize, usize, usize)] = &[
    (Forward, 2048, 2048, 2048),
    (InputGradient, 2048, 2048, 2048),
    (WeightGradient, 2048, 2048, 2048),
    (Forward, 1024, 768, 768),
    (InputGradient, 1024, 768, 768),
    (WeightGradient, 768, 768, 1024),
    (Forward, 1024, 3072, 768),
    (InputGradient, 1024, 768, 3072),
    (WeightGradient, 3072, 768, 1024),
    (Forward, 512, 32000, 768),
    (InputGradient, 512, 768, 32000),
    (WeightGradient, 32000, 768, 512),
    (Forward, 2048, 576, 576),
    (Forward, 2048, 192, 576),
    (Forward, 2048, 1536, 576),
    (WeightGradient, 576, 1536, 2048),
    (Forward, 256, 151_936, 1024),
    (Decode, 1, 4096, 4096),
    (Decode, 1, 49152, 576),
    (Decode, 1, 1536, 576),
    (Decode, 1, 576, 1536),
    (Decode, 1, 576, 576),
    (Decode, 1, 192, 576),
    (Decode, 4, 4096, 4096),
    (Decode, 16, 4096, 4096),
];

/// What is measured: one product, or those of a mixture's experts.
enum Case {
    One(Kind, usize, usize, usize),
    Groups(grouped::Shape),
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let one = SHAPES.iter().map(|&(kind, m, n, k)| Case::One(kind, m, n, k));
        one.chain(grouped::SHAPES.iter().map(|&s| Case::Groups(s)))
    }

    fn name(&self) -> String {
        match self {
            Case::One(kind, m, n, k) => {
                let name = match kind {
                    Forward => "forward",
                    InputGradient => "dgrad",
                    WeightGradient => "wgrad",
                    Decode => "decode",
                };
                format!("{name} {m}x{n}x{k}")
            }
            Case::Groups(shape) => shape.name(),
        }
    }

    /// Whether memory sets its pace.
    fn decodes(&self) -> bool {
        match self {
            Case::One(kind, ..) => *kind == Decode,
            Case::Groups(shape) => shape.pass == grouped::Pass::Decode,
        }
    }
}

pub fn run(a: &BenchGemm) -> Result<Outcome> {
    let rt = runtime(a.threads)?;
    let threads = rt.device().team().threads();
    let arithmetic = a.arithmetic.into();
    record(rt.device(), &a.profiling);
    let (mut fractions, mut shown) = (vec![], 0);
    for case in Case::all() {
        let shape = case.name();
        if !a.filter.iter().all(|f| shape.contains(f.as_str())) {
            continue;
        }
        let (rate, peak, gbs, read) = match &case {
            Case::One(kind, m, n, k) => measure(&rt, (*kind, *m, *n, *k), a, arithmetic)?,
            Case::Groups(s) => s.measure(&rt, &|len, seed| operand(&rt, len, seed, a.dtype), a, arithmetic)?,
        };
        shown += 1;
        let dtype = if a.dtype == Dtype::F32 { "f32" } else { "bf16" };
        let mut line = json!({
            "shape": shape, "dtype": dtype, "arithmetic": arithmetic.to_string(), "isa": rt.device().isa().to_string(), "threads": threads,
            "gflops": rounded(rate, 1), "fraction_of_peak": rounded(rate / peak, 3), "peak": rounded(peak, 1),
        });
        if case.decodes() {
            line["gbs"] = json!(rounded(gbs, 1));
            line["fraction_of_read"] = json!(rounded(gbs / read, 3));
            line["read"] = json!(rounded(read, 1));
        } else {
            fractions.push(rate / peak);
        }
        if a.json {
            out::line(line)?;
        } else if case.decodes() {
            out::line(format_args!("{shape:<34} {gbs:>7.1} GB/s      {:.2} of the read rate {read:.1}", gbs / read))?;
        } else {
            out::line(format_args!("{shape:<34} {rate:>7.1} GFLOP/s   {:.2} of the peak {peak:.0}", rate / peak))?;
        }
    }
    if shown == 0 {
        return Err(format!("no shape has {:?} in its name", a.filter).into());
    }
    if !a.json && !fractions.is_empty() {
        out::line(format_args!("median {:.2} of the f32 multiply-add peak", median(fractions)))?;
    }
    show(&rt, &a.profiling, a.json)?;
    Ok(Outcome::Done)
}

/// GFLOP/s of the product and of multiply-adds, GB/s of B and of reading: medians of rounds that alternate.
fn measure(
    rt: &Runtime,
    (kind, m, n, k): (Kind, usize, usize, usize),
    o: &BenchGemm,
    arithmetic: Arithmetic,
) -> Result<(f64, f64, f64, f64)> {
    let dev = rt.device();
    let (a, b) = (operand(rt, m * k, 1, o.dtype)?, operand(rt, k * n, 2, o.dtype)?);
    let mut c = rt.empty(&[m, n], DType::F32, Category::Workspace)?;
    let product = match kind {
        Forward | Decode => Gemm::nt(m, n, k, a.mat(), b.mat()),
        InputGradient => Gemm::nn(m, n, k, a.mat(), b.mat()),
        WeightGradient => Gemm::tn(m, n, k, a.mat(), b.mat()),
    };
    let product = product.arithmetic(arithmetic);
    gemm(dev, &product, c.f32_mut()?)?;
    let (mut rates, mut peaks, mut reads) = (vec![], vec![], vec![]);
    for _ in 0..o.rounds.max(1) {
        let s = seconds(dev, || Ok(gemm(dev, &product, c.f32_mut()?)?))?;
        rates.push(1.0 / s / 1e9);
        peaks.push(peak::fma_gflops(dev));
        if kind == Decode {
            reads.push(peak::read_bandwidth_gbs(dev)?);
        }
    }
    let rate = median(rates);
    let (flop, bytes) = (2.0 * (m * n * k) as f64, (n * k) as f64 * if o.dtype == Dtype::F32 { 4.0 } else { 2.0 });
    Ok((flop * rate, median(peaks), bytes * rate, median(reads)))
}

fn operand(rt: &Runtime, len: usize, seed: usize, dtype: Dtype) -> Result<Tensor> {
    let t = values(rt, len, seed)?;
    Ok(match dtype {
        Dtype::F32 => t,
        Dtype::Bf16 => rt.cast(&t, DType::Bf16, Category::Workspace)?,
    })
}
