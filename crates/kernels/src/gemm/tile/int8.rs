//! int8 with block scales: 8 × 48 of C, four products of bytes a lane and instruction, four times the rate of f32 multiply-adds.
//!
//! A row of an operand is cut into stretches of [`BLOCK`] steps of k. Each has one scale, its greatest magnitude / 127; what is
//! multiplied are the rounded codes in −127..=127, summed exactly in int32 over the stretch and then *promoted*: sum · scale of B ·
//! scale of A joins the f32 sum in C by one multiply and one multiply-add. A weight shares its scale over 128 × 128 values,
//! so that forward and backward see the same codes. This is the recipe of DeepSeek-V3 (arXiv 2412.19437, 3.3) with int8 for FP8.
//!
//! A gradient may be rounded at random instead: code = ⌊value / scale + a number in [0, 1)⌋. What is always rounded away to nearest then
//! survives on average.
//!
//! **The same bits everywhere.** Integers are exact and the f32 steps fixed, so [`plain`] and [`vnni`] agree to the bit, as does
//! any batch. Values that are not finite give a scale that is not finite: they are never lost silently.
//!
//! Layout of a panel: for each stretch 32 steps of words (four codes of one row), then a scale a row, then −128 · the sum of its codes.
//! The instruction multiplies unsigned by signed bytes, so A's codes are stored 128 higher; that last number takes it back.

#[cfg(target_arch = "x86_64")]
mod pack;
mod plain;
#[cfg(target_arch = "x86_64")]
mod vnni;

pub(crate) use plain::Plain;
#[cfg(target_arch = "x86_64")]
pub(crate) use vnni::Vnni;

use super::{BLOCK, BlockScales, Form, Noise, Side};
use crate::{Isa, Mat};

const MR: usize = 8;
const NR: usize = 48;
/// Words of four codes in a stretch of one row.
const WORDS: usize = BLOCK / 4;
/// 32-bit values that a stretch of one row takes in a panel: its words, its scale, its sum.
const ROW: usize = WORDS + 2;

/// The 32-bit values that `values` packed ones, whole stretches, take with their scales and sums.
fn room(values: usize) -> usize {
    values / BLOCK * ROW
}

/// The factor that makes codes of values, and the one that makes values of codes, of a stretch with this greatest magnitude.
///
/// The smallest magnitude is 2⁻¹⁰⁰: stretches of less become zeros, and no factor overflows.
#[inline(always)]
pub(crate) fn factors(amax: f32) -> (f32, f32) {
    // NaN compares as greater by its bits.
    let amax = f32::from_bits(amax.to_bits().max(TINY.to_bits()));
    (127.0 / amax, amax / 127.0)
}

/// 2⁻¹⁰⁰.
const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// What A's codes are raised by.
fn raised(side: Side) -> u8 {
    if side == Side::A { 0x80 } else { 0 }
}

/// The greatest magnitude (NaN, if there is one) in each stretch of [`BLOCK`] columns of up to [`BLOCK`] rows.
pub(crate) fn greatest_of_blocks(isa: Isa, rows: &Mat<'_>, columns: usize, amax: &mut [f32]) {
    amax.fill(0.0);
    for row in 0..rows.len() / columns {
        let row = rows.slice(row * columns..(row + 1) * columns);
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 {
            // SAFETY: a `Device` has only instruction sets that the processor has; `amax` has a place for each block of the row.
            unsafe {
                match row {
                    Mat::F32(x) => pack::greatest_of_blocks(x.as_ptr(), columns, amax),
                    Mat::Bf16(x) => pack::greatest_of_blocks(x.as_ptr(), columns, amax),
                }
            }
            continue;
        }
        let _ = isa;
        for (block, most) in amax.iter_mut().enumerate() {
            let values = block * BLOCK..columns.min((block + 1) * BLOCK);
            *most = values.fold(*most, |m, i| f32::from_bits(m.to_bits().max(row.at(i).abs().to_bits())));
        }
    }
}

impl Form {
    /// The same, seen from row `i` of a source whose memory rows run across the panels.
    fn after_rows(self, i: usize) -> Form {
        let scales = self.scales.map(|s| BlockScales { at: (s.at.0 + i, s.at.1), ..s });
        let noise = self.noise.map(|n| Noise { at: n.at + i, ..n });
        Form { scales, noise, ..self }
    }
}
