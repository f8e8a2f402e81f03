//! A few rows of A against B stored along k, as in decoding: the product is made transposed, Cᵀ = Bᵀ·Aᵀ, because a row of weights then is
//! a row of a tile and needs no transpose; the few values of A, and of C at the end, are turned instead.
//!
//! Registers: tmm0–1 hold Cᵀ for 32 rows of weights and 16 rows of A (as many streams as the processor's prefetching follows; 64 rows were slower),
//! tmm4 a plane of 16 rows of weights, tmm5–7 the planes of A. While the unit works on one step, the vector units split the
//! next. Weights in bf16 are one plane and lie in memory as a tile wants them: they are not packed at all.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::Panel;
use super::super::avx512::pack::transpose16;
use super::pack::{self, AHEAD_BYTES, Element, prefetch};
use super::{STEP, TILE};

/// Tiles of weights at a time.
const TILES: usize = 2;
/// Rows of weights at a time.
pub(super) const ROWS: usize = TILES * 16;
/// Two steps of weights in their planes: one to be multiplied, one being made.
#[repr(align(64))]
struct Packed {
    _slots: [[u8; TILES * 3 * TILE]; 2],
}
/// Cᵀ: 32 rows of 16.
#[repr(align(64))]
struct Turned([f32; ROWS * 16]);

/// Up to 32 rows of weights.
struct Weights<E> {
    at: *const E,
    ld: usize,
    rows: usize,
    k: usize,
    planes: usize,
}

/// # Safety
/// As [`Tile::stream`](super::super::Tile::stream); the unit is configured.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn stream<E: Element>(
    (m, n, k): (usize, usize, usize),
    a: Panel,
    (b, planes): (*const E, usize),
    ldb: usize,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    // The panel of A has one tile a plane and step, or two; the second is another pass over the same weights, out of the near cache.
    let tiles_of_a = m.div_ceil(16);
    let mut turned = Turned([0.0; ROWS * 16]);
    for j in (0..n).step_by(ROWS) {
        let rows = ROWS.min(n - j);
        for t in 0..tiles_of_a {
            let size = (16.min(m - t * 16), rows);
            // SAFETY: these rows of B and of A, and their part of C.
            unsafe {
                let corner = c.add(t * 16 * ldc + j);
                if from_c {
                    turn_in(corner, ldc, size, &mut turned);
                }
                let weights = Weights { at: b.add(j * ldb), ld: ldb, rows, k, planes };
                let values = Panel { at: a.at.byte_add(t * TILE), ..a };
                multiply(&weights, values, tiles_of_a * TILE, &mut turned, from_c);
                turn_out(&turned, size, corner, ldc);
            }
        }
    }
}

/// Cᵀ = (Cᵀ or 0) + weights · values over all of k. `plane` is how far apart the planes of the values lie.
///
/// # Safety
/// The weights can be read; `values` holds all steps; the unit is configured.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn multiply<E: Element>(w: &Weights<E>, values: Panel, plane: usize, turned: &mut Turned, from_c: bool) {
    let mut packed = MaybeUninit::<Packed>::uninit();
    let slots: *mut [u8; TILES * 3 * TILE] = packed.as_mut_ptr().cast();
    let sums = turned.0.as_mut_ptr();
    let steps = w.k.div_ceil(STEP);
    // What is in memory as the unit wants it stays there.
    let direct = |step: usize| E::IS_PLANE && w.rows == ROWS && (step + 1) * STEP <= w.k;
    let order = order(w.planes, values.planes);
    // SAFETY: every read is of a step of the rows, as far as it goes, and of the values' planes; a slot holds two tiles of three
    // planes, the buffer two tiles of C; the unit is configured.
    unsafe {
        let steps_ahead = AHEAD_BYTES / (STEP * size_of::<E>());
        let pack = |step: usize, tile: usize| {
            let row = w.at.wrapping_add(tile * 16 * w.ld);
            // Near the end of these rows comes the beginning of the next.
            let next = step + steps_ahead;
            let ahead = if next < steps { next * STEP } else { ROWS * w.ld + (next - steps) * STEP };
            let ahead = row.wrapping_add(ahead);
            if direct(step) {
                return (0..16).for_each(|i| prefetch(ahead.wrapping_add(i * w.ld)));
            }
            let rows = w.rows.saturating_sub(tile * 16).min(16);
            let dst = slots.add(step % 2).cast::<u8>().add(tile * w.planes * TILE);
            let (at, depth) = (row.wrapping_add(step * STEP), STEP.min(w.k - step * STEP));
            pack::across(at, w.ld, rows, depth, 16, w.planes, true, ahead, dst);
        };
        begin(sums, from_c);
        (0..TILES).for_each(|tile| pack(0, tile));
        for step in 0..steps {
            let tiles = if direct(step) {
                let bytes = w.ld * size_of::<E>();
                Tiles { at: w.at.add(step * STEP).cast(), tile: 16 * bytes, row: bytes }
            } else {
                Tiles { at: slots.add(step % 2).cast(), tile: w.planes * TILE, row: 64 }
            };
            load_values(values.at.cast::<u8>().add(step * values.planes * plane), values.planes, plane);
            // A product of planes keeps the unit busy for as long as it takes to split some rows of the next step.
            let mut tile = 0;
            for (i, &(of_weights, of_values)) in order.iter().enumerate() {
                multiply_planes(&tiles, of_weights, of_values);
                // The tiles are spread over the products; with one product all of them come after it.
                let until = if i + 1 == order.len() { TILES } else { (i + 1) * TILES / order.len() };
                while step + 1 < steps && tile < until {
                    pack(step + 1, tile);
                    tile += 1;
                }
            }
        }
        end(sums);
    }
}

/// The tiles of weights: of plane w, tile t lies at `at + t·tile + w·1024`.
struct Tiles {
    at: *const u8,
    /// From tile to tile.
    tile: usize,
    /// From row to row.
    row: usize,
}

/// The products of planes (of weights, of values) in the order of [`multiply`](super::multiply) with the two sides exchanged: the same bits.
fn order(weights: usize, values: usize) -> &'static [(usize, usize)] {
    match (weights, values) {
        (1, 1) => &[(0, 0)],
        (2, 1) => &[(1, 0), (0, 0)],
        (3, 1) => &[(2, 0), (1, 0), (0, 0)],
        (1, 2) => &[(0, 1), (0, 0)],
        (2, 2) => &[(1, 0), (0, 0), (0, 1)],
        (1, 3) => &[(0, 2), (0, 1), (0, 0)],
        (3, 3) => &[(1, 1), (1, 0), (2, 0), (0, 0), (0, 1), (0, 2)],
        other => unreachable!("planes {other:?}"),
    }
}

/// Loads the sums, or sets them to zero. They stay in the registers until [`end`]: no compiled code uses those.
///
/// # Safety
/// `sums` holds two tiles; the unit is configured.
#[inline]
unsafe fn begin(sums: *mut f32, from_c: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if from_c {
            asm!(
                "tileloadd tmm0, [{c} + {s}]",
                "tileloadd tmm1, [{c} + {s} + 1024]",
                c = in(reg) sums, s = in(reg) 64usize, options(nostack),
                out("tmm0") _, out("tmm1") _
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1",
                options(nostack),
                out("tmm0") _, out("tmm1") _
            );
        }
    }
}

/// Stores the sums.
///
/// # Safety
/// As [`begin`].
#[inline]
unsafe fn end(sums: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{c} + {s}], tmm0",
            "tilestored [{c} + {s} + 1024], tmm1",
            c = in(reg) sums, s = in(reg) 64usize, options(nostack),
        );
    }
}

/// Loads the planes of A's step into tmm5, 6 and 7.
///
/// # Safety
/// `planes` tiles lie `plane` bytes apart at `x`; the unit is configured.
#[inline]
unsafe fn load_values(x: *const u8, planes: usize, plane: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloadd tmm5, [{x} + {s}]", x = in(reg) x, s = in(reg) 64usize, options(nostack), out("tmm5") _);
        if planes > 1 {
            let x = x.add(plane);
            asm!("tileloadd tmm6, [{x} + {s}]", x = in(reg) x, s = in(reg) 64usize, options(nostack), out("tmm6") _);
        }
        if planes > 2 {
            let x = x.add(2 * plane);
            asm!("tileloadd tmm7, [{x} + {s}]", x = in(reg) x, s = in(reg) 64usize, options(nostack), out("tmm7") _);
        }
    }
}

/// Adds the product of a plane of both tiles of weights and a plane of A.
///
/// # Safety
/// The tiles can be read; sums and values are in their registers.
#[inline]
unsafe fn multiply_planes(t: &Tiles, of_weights: usize, of_values: usize) {
    macro_rules! with {
        ($values:literal) => {
            asm!(
                "tileloadd tmm4, [{w0} + {r}]",
                concat!("tdpbf16ps tmm0, tmm4, ", $values),
                "tileloadd tmm4, [{w1} + {r}]",
                concat!("tdpbf16ps tmm1, tmm4, ", $values),
                w0 = in(reg) t.at.wrapping_add(of_weights * TILE),
                w1 = in(reg) t.at.wrapping_add(of_weights * TILE + t.tile),
                r = in(reg) t.row,
                options(nostack),
                out("tmm0") _, out("tmm1") _, out("tmm4") _
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match of_values {
            0 => with!("tmm5"),
            1 => with!("tmm6"),
            _ => with!("tmm7"),
        }
    }
}

/// `turned[r][i] = c[i][r]` for i < m, r < n.
///
/// # Safety
/// `c` has m rows of n values at the stride; m ≤ 16, n ≤ 32.
unsafe fn turn_in(c: *const f32, ldc: usize, (m, n): (usize, usize), turned: &mut Turned) {
    for r in 0..n {
        for i in 0..m {
            // SAFETY: the caller's promise.
            turned.0[r * 16 + i] = unsafe { *c.add(i * ldc + r) };
        }
    }
}

/// `c[i][r] = turned[r][i]` for i < m, r < n.
///
/// # Safety
/// As [`turn_in`]; the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn turn_out(turned: &Turned, (m, n): (usize, usize), c: *mut f32, ldc: usize) {
    for r in (0..n).step_by(16) {
        let keep: __mmask16 = if n - r >= 16 { !0 } else { (1 << (n - r)) - 1 };
        let mut rows = [_mm512_setzero_ps(); 16];
        // SAFETY: 16 rows of 16 in the buffer; kept lanes of rows of C.
        unsafe {
            for (q, row) in rows.iter_mut().enumerate() {
                *row = _mm512_load_ps(turned.0.as_ptr().add((r + q) * 16));
            }
            for (i, row) in transpose16(rows).into_iter().enumerate().take(m) {
                _mm512_mask_storeu_ps(c.add(i * ldc + r), keep, row);
            }
        }
    }
}
