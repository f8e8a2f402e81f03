//! Sums over whole slices, split at fixed sizes.

use crate::Device;
use crate::par::{Parts, piece};
use crate::profile::per_element;
use crate::simd::math::sum_over;
use crate::simd::simd_fn;

/// Elements that one partial sum covers; fixes the order of the whole.
pub const PIECE: usize = 1 << 14;

/// Partial sums kept at once, so that none is allocated.
const BATCH: usize = 256;

/// Elements added up in f32 before f64 takes over: a sum of more would lose digits.
const RUN: usize = 1 << 10;

/// Σ x² in f64, partial sums of [`PIECE`] elements added in order. Not finite if an element is not, or if a square is beyond f32.
pub fn sum_squares(dev: &Device, x: &[f32]) -> f64 {
    let _span = dev.profiler().kernel("sum_squares", || per_element(x.len(), 2, 4));
    let mut total = 0.0;
    for x in x.chunks(PIECE * BATCH) {
        let mut parts = [0f64; BATCH];
        let parts = &mut parts[..x.len().div_ceil(PIECE)];
        let out = Parts::new(parts);
        dev.team().run(x.len().div_ceil(PIECE), &|i, _| {
            // SAFETY: each task writes its own element.
            let out = unsafe { out.get(i..i + 1) };
            out[0] = sum_squares_piece(dev.isa(), &x[piece(i, PIECE, x.len())]);
        });
        for p in parts.iter() {
            total += p;
        }
    }
    total
}

simd_fn! {
    fn sum_squares_piece(s, x: &[f32]) -> f64 {
        let mut total = 0.0;
        for x in x.chunks(RUN) {
            let sum = sum_over(s, x.len(), #[inline(always)] |i, sum| {
                let v = s.load(x, i);
                s.fma(v, v, sum)
            });
            total += f64::from(sum);
        }
        total
    }
}
