//! Products with exact weights: every element is one chain over k, with the bits of [`gemm`](crate::gemm::gemm).

use std::ops::Range;

use half::bf16;

use super::{Form, LANES, Layout, Product, Rows};
use crate::{Device, Isa};

#[cfg(target_arch = "x86_64")]
mod avx512;

/// Panels that a product of `m` rows is cut at multiples of, so that most of them are multiplied several at a time.
pub(super) fn unit(m: usize) -> usize {
    if m > STREAM { BLOCK_PANELS } else { 2 }
}

/// Rows up to which weights stream from memory past all rows at once. Beyond, a stretch of a few panels is read into a cache, where blocks of
/// rows pass by.
const STREAM: usize = 8;
/// Rows of such a block.
const BLOCK_ROWS: usize = 8;
/// Panels of such a stretch: 8 × 48 sums fill the registers best.
const BLOCK_PANELS: usize = 3;
/// Steps of k in such a stretch, for the second-level cache.
const DEPTH: usize = 512;
/// Vectors of a panel (one step of f32, two of bf16) in such a stretch for two blocks of rows, for the first-level cache.
const SHALLOW: usize = 64;
/// f32 that a stretch takes when it is widened from bf16.
pub(super) const WIDENED: usize = DEPTH * BLOCK_PANELS * LANES;

/// Rows that plain code multiplies together.
const PLAIN_ROWS: usize = 4;

/// Rows that are multiplied together, when there are `m` in all.
pub(super) fn rows_at_once(dev: &Device, m: usize) -> usize {
    match dev.isa() {
        Isa::Avx512 | Isa::Amx if m <= STREAM => m.max(1),
        Isa::Avx512 | Isa::Amx => BLOCK_ROWS,
        _ => PLAIN_ROWS,
    }
}

/// Turns `rows` rows of x into a panel: for each k in turn the value of every row.
pub(super) fn pack_rows(dev: &Device, x: &[f32], rows: usize, out: &mut [f32]) {
    let k = x.len() / rows;
    #[cfg(target_arch = "x86_64")]
    if dev.isa() >= Isa::Avx512 {
        // SAFETY: `rows` rows of k values, and as many at `out`; the processor has AVX-512.
        unsafe { avx512::pack_rows(x.as_ptr(), rows, k, out.as_mut_ptr()) };
        return;
    }
    let _ = dev;
    for (p, out) in out.chunks_exact_mut(rows).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = x[i * k + p];
        }
    }
}

/// Sixteen rows in row form into a panel: for each k in turn a value of every output; bf16 in pairs of k.
pub(super) fn interleave(layout: &Layout, rows: &[u8], out: &mut [u8]) {
    for (lane, row) in rows.chunks_exact(layout.form.row_bytes(layout.k)).enumerate() {
        // Four bytes a step of f32, or of two of bf16.
        for (step, bytes) in row.chunks(4).enumerate() {
            let at = (step * LANES + lane) * 4;
            out[at..at + 4].fill(0);
            out[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// One output of a panel, widened.
pub(super) fn read_row(layout: &Layout, panel: &[u8], lane: usize, out: &mut [f32]) {
    for (p, out) in out.iter_mut().enumerate() {
        *out = value(layout.form, panel, p, lane);
    }
}

#[inline(always)]
fn value(form: Form, panel: &[u8], p: usize, lane: usize) -> f32 {
    if form == Form::F32 {
        let at = (p * LANES + lane) * 4;
        f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
    } else {
        let at = (p / 2 * LANES + lane) * 4 + p % 2 * 2;
        bf16::from_le_bytes([panel[at], panel[at + 1]]).to_f32()
    }
}

/// Adds a bias to `m` rows of as many columns.
///
/// # Safety
/// `y` has `m` rows of them at stride `ldc`, the caller's alone.
pub(super) unsafe fn add_bias(y: *mut f32, ldc: usize, m: usize, bias: &[f32]) {
    for i in 0..m {
        // SAFETY: the caller's promise.
        let row = unsafe { std::slice::from_raw_parts_mut(y.add(i * ldc), bias.len()) };
        row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
    }
}

/// Some panels of a product for all rows.
///
/// # Safety
/// The weight has its layout's bytes, aligned to 64; `rows.exact` was packed for this device in panels of [`rows_at_once`]; the columns of the panels in y
/// belong to the caller; with more than STREAM rows, WIDENED values are reserved for the worker.
pub(super) unsafe fn panels(dev: &Device, p: &Product<'_>, rows: Rows<'_>, panels: Range<usize>, worker: usize) {
    let layout = p.weight.layout;
    let columns = |panels: &Range<usize>| panels.start * LANES..layout.n.min(panels.end * LANES);
    // SAFETY: the caller's promise.
    unsafe {
        match dev.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => avx512::panels(dev, p, rows, panels.clone(), worker),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => plain_avx2(p, rows, panels.clone()),
            _ => plain::<false>(p, rows, panels.clone()),
        }
        let _ = worker;
        if let Some(bias) = p.bias {
            let columns = columns(&panels);
            add_bias(p.y.at(columns.start), layout.n, rows.m, &bias[columns]);
        }
    }
}

/// # Safety
/// As [`panels`]; the processor has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn plain_avx2(p: &Product<'_>, rows: Rows<'_>, panels: Range<usize>) {
    // SAFETY: the caller's promise.
    unsafe { plain::<true>(p, rows, panels) }
}

/// # Safety
/// As [`panels`]; where FUSED, the processor has a fused multiply-add.
#[inline(always)]
unsafe fn plain<const FUSED: bool>(p: &Product<'_>, rows: Rows<'_>, panels: Range<usize>) {
    let Layout { form, n, k } = p.weight.layout;
    for panel in panels {
        let bytes = &p.weight.bytes[panel * p.weight.layout.panel_bytes()..][..p.weight.layout.panel_bytes()];
        let (j, width) = (panel * LANES, LANES.min(n - panel * LANES));
        for i in (0..rows.m).step_by(PLAIN_ROWS) {
            let m = PLAIN_ROWS.min(rows.m - i);
            let x = &rows.exact[i * k..(i + m) * k];
            let mut sums = [[0f32; LANES]; PLAIN_ROWS];
            for (p, x) in x.chunks_exact(m).enumerate() {
                let w: [f32; LANES] = std::array::from_fn(|lane| value(form, bytes, p, lane));
                for (sums, &x) in sums.iter_mut().zip(x) {
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = if FUSED { x.mul_add(w, *sum) } else { *sum + x * w };
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate().take(m) {
                // SAFETY: these rows and columns of y belong to the caller.
                unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), p.y.at((i + r) * n + j), width) };
            }
        }
    }
}
