//! Block sizes: a table by unit and microarchitecture, and the search that finds better ones for the machine at hand.
//!
//! No size changes a bit of any result (see [`kernel`](super::kernel)), so a table may come from anywhere.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::kernel::{Blocking, Unit};
use super::{Arithmetic, Gemm, gemm_blocked};
use crate::scratch::HugeBuf;
use crate::{Device, Isa, KernelError, Mat, Result};

/// Block sizes that differ from the table's, by the name of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning(Vec<(Unit, Blocking)>);

static INSTALLED: OnceLock<Tuning> = OnceLock::new();

impl Tuning {
    /// Makes this what devices made from now on use. Only the first call of a process counts; whether this was it.
    pub fn install(self) -> bool {
        INSTALLED.set(self).is_ok()
    }

    /// What is installed, or nothing.
    pub(crate) fn installed() -> Tuning {
        INSTALLED.get().cloned().unwrap_or_default()
    }

    /// Replaces the sizes of a unit.
    ///
    /// # Errors
    /// If there is no such unit here, or a size is 0 or absurd.
    pub fn set(&mut self, unit: &str, sizes: Blocking) -> std::result::Result<(), String> {
        let unit: Unit = unit.parse()?;
        sizes.check()?;
        self.0.retain(|(u, _)| *u != unit);
        self.0.push((unit, sizes));
        Ok(())
    }

    /// The sizes for products of an arithmetic on an instruction set.
    pub fn sizes(&self, isa: Isa, arithmetic: Arithmetic) -> Blocking {
        let unit = Unit::of(isa, arithmetic);
        self.0.iter().find(|(u, _)| *u == unit).map_or_else(|| Blocking::best(isa, arithmetic), |(_, b)| *b)
    }

    /// What it holds: names of units and their sizes.
    pub fn entries(&self) -> impl Iterator<Item = (String, Blocking)> + '_ {
        self.0.iter().map(|(u, b)| (u.to_string(), *b))
    }
}

/// The unit that makes products of an arithmetic on an instruction set, by name.
pub fn unit_name(isa: Isa, arithmetic: Arithmetic) -> String {
    Unit::of(isa, arithmetic).to_string()
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(_, u)| u == self).map_or("portable", |(name, _)| name))
    }
}

impl FromStr for Unit {
    type Err = String;
    fn from_str(s: &str) -> std::result::Result<Unit, String> {
        NAMES
            .iter()
            .find(|(name, _)| *name == s)
            .map(|(_, u)| *u)
            .ok_or_else(|| format!("\"{s}\" is none of the units {}", NAMES.map(|(name, _)| name).join(", ")))
    }
}

#[cfg(target_arch = "x86_64")]
const NAMES: [(&str, Unit); 7] = [
    ("portable", Unit::Portable),
    ("avx2", Unit::Avx2),
    ("avx512", Unit::Avx512),
    ("amx", Unit::Amx),
    ("bf16_dot", Unit::Bf16Dot),
    ("int8", Unit::Int8),
    ("int8_plain", Unit::Int8Plain),
];
#[cfg(not(target_arch = "x86_64"))]
const NAMES: [(&str, Unit); 2] = [("portable", Unit::Portable), ("int8_plain", Unit::Int8Plain)];

/// What a search found.
#[derive(Clone, Copy, Debug)]
pub struct Tuned {
    /// The sizes it began with.
    pub before: Blocking,
    /// The best sizes.
    pub best: Blocking,
    /// Geometric mean over the shapes of the rate with `best` over that with `before`, measured once more at the end, alternating.
    pub gain: f64,
    /// Other sizes that were tried.
    pub tried: usize,
}

/// Products of a transformer step: what is tuned for. M, N, K; forward, gradient of the input, gradient of the weight.
const SHAPES: &[(usize, usize, usize, u8)] = &[
    (2048, 576, 576, 0),
    (1024, 3072, 768, 0),
    (512, 16384, 768, 0),
    (1024, 768, 3072, 1),
    (2048, 576, 1536, 1),
    (1536, 576, 2048, 2),
    (1024, 1024, 1024, 2),
];

/// A change must win this much to be kept: less is noise.
const WORTH: f64 = 1.01;

/// Searches for better sizes, one size at a time, each candidate alternating with the best so far. Takes `patience` for each
/// comparison.
///
/// # Errors
/// If memory for the operands runs out.
pub fn tune(dev: &Device, arithmetic: Arithmetic, patience: Duration) -> Result<Tuned> {
    search(&mut Bench::new(dev, arithmetic, patience, SHAPES)?)
}

fn search(bench: &mut Bench<'_>) -> Result<Tuned> {
    let before = bench.dev.blocking(bench.arithmetic);
    let (mut best, mut tried) = (before, 0);
    for (set, values) in changes(&before) {
        for value in values {
            let mut trial = best;
            set(&mut trial, value);
            if trial == best || trial.check().is_err() {
                continue;
            }
            tried += 1;
            if bench.gain(&best, &trial)? > WORTH {
                best = trial;
            }
        }
    }
    let gain = if best == before { 1.0 } else { bench.gain(&before, &best)? };
    // What wins step by step and loses in the end was noise.
    let (best, gain) = if gain < 1.0 { (before, 1.0) } else { (best, gain) };
    Ok(Tuned { before, best, gain, tried })
}

/// How a size is set, and what is tried for it.
type Change = (fn(&mut Blocking, usize), Vec<usize>);

fn changes(start: &Blocking) -> [Change; 5] {
    [
        (|b, v| b.kc = v, vec![256, 384, 512, 768, 1024, 1536, 2048]),
        (|b, v| b.mc = v, vec![start.mc / 2, start.mc * 3 / 4, start.mc * 3 / 2, start.mc * 2]),
        (|b, v| b.stretch = v, vec![1 << 19, 1 << 20, 1 << 21, 1 << 22]),
        (|b, v| b.narrow_rows = v, vec![0, 256, 512, 1024]),
        (|b, v| b.narrow_kc = v, vec![256, 512, 1024, 2048]),
    ]
}

struct Bench<'d> {
    dev: &'d Device,
    arithmetic: Arithmetic,
    patience: Duration,
    shapes: &'static [(usize, usize, usize, u8)],
    operands: [HugeBuf; 3],
}

impl<'d> Bench<'d> {
    fn new(
        dev: &'d Device,
        arithmetic: Arithmetic,
        patience: Duration,
        shapes: &'static [(usize, usize, usize, u8)],
    ) -> Result<Bench<'d>> {
        let most = |of: fn(usize, usize, usize) -> usize| shapes.iter().map(|&(m, n, k, _)| of(m, n, k)).max();
        let room = |values: Option<usize>, fill: f32| {
            let bytes = values.unwrap_or(0) * size_of::<f32>();
            let buf = HugeBuf::new(bytes).map_err(|e| KernelError::Memory { bytes, why: e.to_string() })?;
            // SAFETY: the mapping holds these values, and nobody else has it.
            unsafe { std::slice::from_raw_parts_mut(buf.as_ptr().cast::<f32>(), bytes / 4) }.fill(fill);
            Ok::<_, KernelError>(buf)
        };
        let operands =
            [room(most(|m, _, k| m * k), 0.5)?, room(most(|_, n, k| n * k), 0.25)?, room(most(|m, n, _| m * n), 0.0)?];
        Ok(Bench { dev, arithmetic, patience, shapes, operands })
    }

    /// How many times faster `b` is than `a`: geometric mean over the shapes of the ratio of the best times of alternating calls.
    fn gain(&mut self, a: &Blocking, b: &Blocking) -> Result<f64> {
        let mut logs = 0.0;
        for &(m, n, k, kind) in self.shapes {
            // SAFETY: each mapping holds the values of the largest shape, initialised; only C is written, through this borrow alone.
            let (x, w, c) = unsafe {
                let values = |i: usize, len: usize| std::slice::from_raw_parts(self.operands[i].as_ptr().cast(), len);
                let c = std::slice::from_raw_parts_mut(self.operands[2].as_ptr().cast::<f32>(), m * n);
                (Mat::F32(values(0, m * k)), Mat::F32(values(1, n * k)), c)
            };
            let product = match kind {
                0 => Gemm::nt(m, n, k, x, w),
                1 => Gemm::nn(m, n, k, x, w),
                _ => Gemm::tn(m, n, k, x, w),
            };
            let product = product.arithmetic(self.arithmetic);
            let mut best = [f64::MAX; 2];
            let start = Instant::now();
            let mut rounds = 0;
            while rounds < 3 || start.elapsed() < self.patience / self.shapes.len() as u32 {
                for (by, best) in [a, b].into_iter().zip(&mut best) {
                    let t = Instant::now();
                    gemm_blocked(self.dev, &product, c, by)?;
                    *best = best.min(t.elapsed().as_secs_f64());
                }
                rounds += 1;
            }
            logs += (best[0] / best[1]).ln();
        }
        Ok((logs / self.shapes.len() as f64).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_found_by_their_names() {
        for (name, unit) in NAMES {
            assert_eq!((unit.to_string().as_str(), name.parse()), (name, Ok(unit)));
        }
        assert!("avx1024".parse::<Unit>().unwrap_err().contains("avx2"));
    }

    #[test]
    fn what_is_set_is_used_and_nonsense_is_refused() {
        let mut t = Tuning::default();
        let mut sizes = Blocking::best(Isa::Portable, Arithmetic::F32);
        assert_eq!(t.sizes(Isa::Portable, Arithmetic::F32), sizes);
        sizes.kc = 100;
        t.set("portable", sizes).unwrap();
        assert_eq!(t.sizes(Isa::Portable, Arithmetic::F32).kc, 100);
        assert_eq!(t.entries().collect::<Vec<_>>(), [("portable".to_owned(), sizes)]);
        assert!(t.set("none", sizes).unwrap_err().contains("portable"));
        for bad in [Blocking { kc: 0, ..sizes }, Blocking { mc: 1 << 40, ..sizes }, Blocking { stretch: 0, ..sizes }] {
            assert!(t.set("portable", bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_search_ends_with_sizes_that_may_be_used() {
        let dev = Device::with_isa(Isa::Portable, 2).unwrap();
        const TINY: &[(usize, usize, usize, u8)] = &[(9, 20, 33, 0), (70, 9, 20, 1), (5, 6, 700, 2)];
        let mut bench = Bench::new(&dev, Arithmetic::F32, Duration::ZERO, TINY).unwrap();
        let found = search(&mut bench).unwrap();
        assert!(found.tried > 10 && found.gain >= 1.0 && found.before == dev.blocking(Arithmetic::F32));
        Tuning::default().set("portable", found.best).unwrap();
    }
}
