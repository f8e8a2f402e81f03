//! The products of the experts of a mixture, beside the same ceilings as the others.

use phalanx_kernels::gemm::{Arithmetic, Gemm, Grouped, gemm, grouped};
use phalanx_kernels::{Mat, peak};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::{median, seconds};
use crate::args::BenchGemm;
use crate::outcome::Result;

/// Which product of the experts.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Pass {
    Forward,
    InputGradient,
    WeightGradient,
    /// One row for each of the groups: weights stream past.
    Decode,
}
use Pass::{Decode, Forward, InputGradient, WeightGradient};

impl Pass {
    fn name(self) -> &'static str {
        match self {
            Forward => "forward",
            InputGradient => "dgrad",
            WeightGradient => "wgrad",
            Decode => "decode",
        }
    }
}

/// Groups, how their rows lie, and W [out, in].
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) pass: Pass,
    groups: usize,
    /// Rows of a group on average; `ragged`: from none to twice as many.
    rows: usize,
    ragged: bool,
    out: usize,
    inputs: usize,
}

const fn shape(pass: Pass, groups: usize, rows: usize, out: usize, inputs: usize) -> Shape {
    Shape { pass, groups, rows, ragged: false, out, inputs }
}

pub(super) const SHAPES: &[Shape] = &[
    shape(Forward, 8, 64, 1408, 2048),
    shape(InputGradient, 8, 64, 1408, 2048),
    shape(WeightGradient, 8, 64, 1408, 2048),
    shape(Forward, 8, 512, 1408, 2048),
    shape(InputGradient, 8, 512, 1408, 2048),
    shape(WeightGradient, 8, 512, 1408, 2048),
    Shape { ragged: true, ..shape(Forward, 32, 128, 768, 2048) },
    Shape { ragged: true, ..shape(InputGradient, 32, 128, 768, 2048) },
    Shape { ragged: true, ..shape(WeightGradient, 32, 128, 768, 2048) },
    shape(Forward, 64, 64, 512, 1024),
    shape(InputGradient, 64, 64, 512, 1024),
    shape(WeightGradient, 64, 64, 512, 1024),
    shape(Decode, 8, 1, 1408, 2048),
    shape(Decode, 8, 1, 2048, 768),
];

impl Shape {
    pub(super) fn name(&self) -> String {
        let Shape { pass, groups, rows, ragged, out, inputs } = self;
        let about = if *ragged { "~" } else { "" };
        format!("grouped {} {groups}x{about}{rows} {out}x{inputs}", pass.name())
    }

    /// Where the rows of each group start, and the end.
    fn offsets(&self) -> Vec<usize> {
        let rows = |g: usize| match self.ragged {
            false => self.rows,
            // 0, …, 2·rows in an order that mixes them; as many in all.
            true => 2 * self.rows * (g * 5 % self.groups) / (self.groups - 1).max(1),
        };
        let mut offsets = vec![0];
        for g in 0..self.groups {
            offsets.push(offsets[g] + rows(g));
        }
        offsets
    }

    /// Runs it: GFLOP/s, the peak, GB/s of weights, the read rate.
    pub(super) fn measure(
        &self,
        rt: &Runtime,
        operand: &dyn Fn(usize, usize) -> Result<Tensor>,
        o: &BenchGemm,
        arithmetic: Arithmetic,
    ) -> Result<(f64, f64, f64, f64)> {
        let (dev, offsets) = (rt.device(), self.offsets());
        let (rows, out, inputs) = (offsets[self.groups], self.out, self.inputs);
        let x = operand(rows * inputs, 1)?;
        let dy = operand(rows * out, 2)?;
        let weights = operand(self.groups * out * inputs, 3)?;
        let w: Vec<Mat<'_>> =
            (0..self.groups).map(|g| weights.mat().slice(g * out * inputs..(g + 1) * out * inputs)).collect();
        let result = match self.pass {
            Forward | Decode => rows * out,
            InputGradient => rows * inputs,
            WeightGradient => self.groups * out * inputs,
        };
        let mut c = rt.empty(&[result], DType::F32, Category::Workspace)?;
        let mut run = || -> Result<()> {
            let c = c.f32_mut()?;
            match self.pass {
                Forward | Decode => {
                    let call = Grouped::nt(out, inputs, x.mat(), &offsets, &w).arithmetic(arithmetic);
                    grouped(dev, &call, c)?;
                }
                InputGradient => {
                    let call = Grouped::nn(inputs, out, dy.mat(), &offsets, &w).arithmetic(arithmetic);
                    grouped(dev, &call, c)?;
                }
                WeightGradient => {
                    for (dw, r) in c.chunks_exact_mut(out * inputs).zip(offsets.windows(2)) {
                        let dy = dy.mat().slice(r[0] * out..r[1] * out);
                        let x = x.mat().slice(r[0] * inputs..r[1] * inputs);
                        gemm(dev, &Gemm::tn(out, inputs, r[1] - r[0], dy, x).arithmetic(arithmetic), dw)?;
                    }
                }
            }
            Ok(())
        };
        run()?;
        let (mut rates, mut peaks, mut reads) = (vec![], vec![], vec![]);
        for _ in 0..o.rounds.max(1) {
            rates.push(1.0 / seconds(dev, &mut run)? / 1e9);
            peaks.push(peak::fma_gflops(dev));
            if self.pass == Decode {
                reads.push(peak::read_bandwidth_gbs(dev)?);
            }
        }
        let rate = median(rates);
        let (flop, bytes) = (2.0 * (rows * out * inputs) as f64, weights.bytes() as f64);
        Ok((flop * rate, median(peaks), bytes * rate, median(reads)))
    }
}
