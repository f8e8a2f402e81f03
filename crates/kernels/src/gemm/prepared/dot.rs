//! Products with weights in blocks: integers within a block, f32 from block to block.
//!
//! The rows of x are rounded to 8 bits once for all outputs and lie, a few rows together, in the order of the multiplication. All rows
//! pass by a panel while it is in the first-level cache: one reading of the weights does for any number of rows.

use std::ops::Range;

use half::f16;

use super::{BLOCK, Form, LANES, Product, Rows};
use crate::{Device, Isa};

#[cfg(target_arch = "x86_64")]
mod avx512;

/// f32 that a block of a row of x takes: 32 bytes of quanta, and dx, dx·Σxq, −128·Σxq.
pub(super) const ROOM: usize = BLOCK / 4 + 3;

/// |x| below which a block counts as zero: 127 / max|x| must be finite.
const TINY: f32 = 1e-35;

#[cfg(target_arch = "x86_64")]
fn vnni(dev: &Device) -> bool {
    dev.isa() >= Isa::Avx512 && crate::isa::has_vnni()
}

/// Rows that are multiplied together.
pub(super) fn rows_at_once(dev: &Device) -> usize {
    #[cfg(target_arch = "x86_64")]
    if vnni(dev) {
        return avx512::ROWS;
    }
    let _ = dev;
    PLAIN_ROWS
}

/// Rows that plain code multiplies together.
const PLAIN_ROWS: usize = 4;

/// The places in the blocks of `rows` rows of x: for each block the quanta (steps of four values, of each row in turn), then dx, dx·Σxq and
/// −128·Σxq of each row.
struct Grid {
    rows: usize,
}

impl Grid {
    fn block(&self, b: usize) -> usize {
        b * self.rows * ROOM
    }
    fn quantum(&self, b: usize, step: usize, row: usize) -> usize {
        self.block(b) + step * self.rows + row
    }
    fn scalar(&self, b: usize, which: usize, row: usize) -> usize {
        self.block(b) + (BLOCK / 4 + which) * self.rows + row
    }
}

/// Rounds `rows` rows of x to blocks. A block that holds NaN or infinity gives a scale of NaN, and so results of NaN.
pub(super) fn quantise_rows(dev: &Device, x: &[f32], rows: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if vnni(dev) {
        // SAFETY: the processor has the instructions; `out` has ROOM for every block of every row.
        unsafe { avx512::quantise_rows(x, rows, out) };
        return;
    }
    let _ = dev;
    let (grid, k) = (Grid { rows }, x.len() / rows);
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (b, x) in x.chunks(BLOCK).enumerate() {
            let most = f32::from_bits(x.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7FFF_FFFF)));
            let (d, inverse) = scale(most);
            let (mut quanta, mut sum) = ([0i8; BLOCK], 0i32);
            for (q, x) in quanta.iter_mut().zip(x) {
                // NaN, where there is one, becomes 0.
                *q = (x * inverse).round_ties_even() as i8;
                sum += i32::from(*q);
            }
            for (step, q) in quanta.as_chunks::<4>().0.iter().enumerate() {
                out[grid.quantum(b, step, row)] = f32::from_bits(u32::from_le_bytes(q.map(|q| q as u8)));
            }
            out[grid.scalar(b, 0, row)] = d;
            out[grid.scalar(b, 1, row)] = d * sum as f32;
            out[grid.scalar(b, 2, row)] = f32::from_bits((-128 * sum) as u32);
        }
    }
}

/// dx and its inverse for a greatest magnitude.
fn scale(most: f32) -> (f32, f32) {
    if !most.is_finite() {
        (f32::NAN, 0.0)
    } else if most < TINY {
        (0.0, 0.0)
    } else {
        (most / 127.0, 127.0 / most)
    }
}

/// Some panels of a product for all rows.
///
/// # Safety
/// The weight has its layout's bytes, `rows.blocks` were made by [`quantise_rows`] for this device in groups of [`rows_at_once`], and the columns
/// of the panels in y belong to the caller.
pub(super) unsafe fn panels(dev: &Device, p: &Product<'_>, rows: Rows<'_>, panels: Range<usize>) {
    let layout = p.weight.layout;
    let (at_once, each) = (rows_at_once(dev), layout.blocks() * ROOM);
    for panel in panels {
        let bytes = &p.weight.bytes[panel * layout.panel_bytes()..][..layout.panel_bytes()];
        let (scales, quanta) = bytes.split_at(layout.scale_bytes());
        let (j, n) = (panel * LANES, LANES.min(layout.n - panel * LANES));
        for i in (0..rows.m).step_by(at_once) {
            let m = at_once.min(rows.m - i);
            let x = &rows.blocks[i * each..(i + m) * each];
            let work = Work { scales, quanta, x, blocks: layout.blocks(), m, n, ldc: layout.n };
            // SAFETY: rows i..i+m and columns j..j+n of y belong to the caller.
            unsafe {
                let y = p.y.at(i * layout.n + j);
                work.run(dev, layout.form, y);
                if let Some(bias) = p.bias {
                    super::exact::add_bias(y, layout.n, m, &bias[j..j + n]);
                }
            }
        }
    }
}

/// A panel against a few rows.
struct Work<'a> {
    scales: &'a [u8],
    quanta: &'a [u8],
    x: &'a [f32],
    blocks: usize,
    m: usize,
    n: usize,
    ldc: usize,
}

impl Work<'_> {
    /// # Safety
    /// `y` has `m` rows of `n` elements at stride `ldc`, the caller's alone; the rest as in [`panels`].
    unsafe fn run(&self, dev: &Device, form: Form, y: *mut f32) {
        // SAFETY: the caller's promise; the processor has what is asked for.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            {
                if vnni(dev) {
                    return avx512::run(self, form, y);
                }
                if dev.isa() >= Isa::Avx2 {
                    return self.plain_avx2(form, y);
                }
            }
            let _ = dev;
            self.plain(form, y);
        }
    }

    /// # Safety
    /// As [`Work::run`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn plain_avx2(&self, form: Form, y: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { self.plain(form, y) }
    }

    /// # Safety
    /// As [`Work::run`].
    #[inline(always)]
    unsafe fn plain(&self, form: Form, y: *mut f32) {
        for i in 0..self.m {
            let sums = self.plain_row(form, i);
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), y.add(i * self.ldc), self.n) };
        }
    }

    /// One row against the panel. `mul_add` calls the C library where the processor has no such instruction: slow, but the same bits.
    #[inline(always)]
    fn plain_row(&self, form: Form, row: usize) -> [f32; LANES] {
        let (grid, mut y) = (Grid { rows: self.m }, [0f32; LANES]);
        for b in 0..self.blocks {
            let bits = |step: usize| self.x[grid.quantum(b, step, row)].to_bits();
            let xs: [[i8; 4]; BLOCK / 4] = std::array::from_fn(|step| bits(step).to_le_bytes().map(|q| q as i8));
            let [dx, dx_sum, offset] = std::array::from_fn(|which| self.x[grid.scalar(b, which, row)]);
            let four = |step: usize, lane: usize| -> [i32; 4] {
                std::array::from_fn(|e| {
                    if form == Form::Q8 {
                        i32::from(self.quanta[((b * 8 + step) * LANES + lane) * 4 + e])
                    } else {
                        let byte = self.quanta[((b * 4 + step % 4) * LANES + lane) * 4 + e];
                        i32::from(byte >> (step / 4 * 4) & 0xF)
                    }
                })
            };
            let half = |at: usize| f16::from_le_bytes([self.scales[2 * at], self.scales[2 * at + 1]]).to_f32();
            let start = if form == Form::Q8 { offset.to_bits() as i32 } else { 0 };
            for lane in 0..LANES {
                let mut sum = start;
                for (step, x) in xs.iter().enumerate() {
                    sum += four(step, lane).iter().zip(x).map(|(w, &x)| w * i32::from(x)).sum::<i32>();
                }
                if form == Form::Q8 {
                    y[lane] = (sum as f32).mul_add(half(b * LANES + lane) * dx, y[lane]);
                } else {
                    let (d, m) = (half(2 * b * LANES + lane), half((2 * b + 1) * LANES + lane));
                    y[lane] = m.mul_add(dx_sum, (sum as f32).mul_add(d * dx, y[lane]));
                }
            }
        }
        y
    }
}
