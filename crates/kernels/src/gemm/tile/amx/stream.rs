//! A few rows of A against B stored along k, as in decoding: the product is made transposed, Cᵀ = Bᵀ·Aᵀ, because a row of weights then is
//! a row of a tile and needs no transpose; the few values of A, and of C at the end, are turned instead.
//!
//! Registers: tmm0–3 hold Cᵀ for 64 rows of weights and 16 rows of A (four sums in flight, so that the unit need not wait for one to be
//! finished), tmm4 a plane of 16 rows of weights, tmm5–7 the planes of A. While the unit works on one step, the vector units split the
//! next. Weights in bf16 are one plane and lie in memory as a tile wants them: they are not packed at all.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::Panel;
use super::super::avx512::pack::transpose16;
use super::pack::{self, Element};
use super::{STEP, TILE};

/// Tiles of weights at a time.
const TILES: usize = 4;
/// Rows of weights at a time.
const ROWS: usize = TILES * 16;
/// From one plane of packed weights to the next.
const PLANE: usize = TILES * TILE;

/// Two steps of weights in their planes: one to be multiplied, one being made.
#[repr(align(64))]
struct Packed([[u8; 3 * PLANE]; 2]);
/// Cᵀ: 64 rows of 16.
#[repr(align(64))]
struct Turned([f32; ROWS * 16]);

/// Up to 64 rows of weights.
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
    let mut packed = Packed([[0; 3 * PLANE]; 2]);
    let sums = turned.0.as_mut_ptr();
    // What is in memory as the unit wants it stays there.
    let direct = E::IS_PLANE && w.rows == ROWS;
    let steps = w.k.div_ceil(STEP);
    let mut pack = |step: usize| -> Tiles {
        let (p, slot) = (step * STEP, &mut packed.0[step % 2]);
        // SAFETY: a step of the rows, as far as it goes; the slot holds four tiles of three planes.
        unsafe {
            let at = w.at.add(p);
            if direct && p + STEP <= w.k {
                prefetch_rows(at, w.ld);
                return Tiles { at: at.cast(), tile: 16 * w.ld * size_of::<E>(), row: w.ld * size_of::<E>() };
            }
            pack::across(at, w.ld, w.rows, STEP.min(w.k - p), ROWS, w.planes, true, slot.as_mut_ptr());
        }
        Tiles { at: slot.as_ptr(), tile: TILE, row: 64 }
    };
    // SAFETY: the buffer holds four tiles of C; every step of the values has all its planes; the unit is configured.
    unsafe {
        begin(sums, from_c);
        let mut ready = pack(0);
        for step in 0..steps {
            let x = values.at.cast::<u8>().add(step * values.planes * plane);
            add_step(&ready, w.planes, x, values.planes, plane);
            if step + 1 < steps {
                ready = pack(step + 1);
            }
        }
        end(sums);
    }
}

/// Four tiles of weights.
struct Tiles {
    at: *const u8,
    /// From tile to tile.
    tile: usize,
    /// From row to row.
    row: usize,
}

/// How far ahead in each row memory is asked for.
const AHEAD_BYTES: usize = 512;

#[inline]
fn prefetch_rows<E>(at: *const E, ld: usize) {
    for i in 0..ROWS {
        // SAFETY: a hint; the address need not exist.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(i * ld).wrapping_byte_add(AHEAD_BYTES).cast()) };
    }
}

/// Loads the sums, or sets them to zero. They stay in the registers until [`end`]: no compiled code uses those.
///
/// # Safety
/// `sums` holds four tiles; the unit is configured.
#[inline]
unsafe fn begin(sums: *mut f32, from_c: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if from_c {
            asm!(
                "tileloadd tmm0, [{c} + {s}]",
                "tileloadd tmm1, [{c} + {s} + 1024]",
                "tileloadd tmm2, [{c} + {s} + 2048]",
                "tileloadd tmm3, [{c} + {s} + 3072]",
                c = in(reg) sums, s = in(reg) 64usize, options(nostack),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                options(nostack),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _
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
            "tilestored [{c} + {s} + 2048], tmm2",
            "tilestored [{c} + {s} + 3072], tmm3",
            c = in(reg) sums, s = in(reg) 64usize, options(nostack),
        );
    }
}

/// Adds the products of one step: `[planes of A] [(plane of weights, plane of A) ...]`.
macro_rules! products {
    ([$($load:literal $from:ident),*], [$(($w:literal $x:literal)),*], $t:expr, $x0:expr, $plane:expr) => {
        asm!(
            $(concat!("tileloadd ", $load, ", [{", stringify!($from), "} + {s}]"),)*
            $(
                concat!("tileloadd tmm4, [{w0} + {r} + 4096*", $w, "]"),
                concat!("tdpbf16ps tmm0, tmm4, ", $x),
                concat!("tileloadd tmm4, [{w1} + {r} + 4096*", $w, "]"),
                concat!("tdpbf16ps tmm1, tmm4, ", $x),
                concat!("tileloadd tmm4, [{w2} + {r} + 4096*", $w, "]"),
                concat!("tdpbf16ps tmm2, tmm4, ", $x),
                concat!("tileloadd tmm4, [{w3} + {r} + 4096*", $w, "]"),
                concat!("tdpbf16ps tmm3, tmm4, ", $x),
            )*
            "# {x0} {x1} {x2}",
            w0 = in(reg) $t.at,
            w1 = in(reg) $t.at.wrapping_add($t.tile),
            w2 = in(reg) $t.at.wrapping_add(2 * $t.tile),
            w3 = in(reg) $t.at.wrapping_add(3 * $t.tile),
            r = in(reg) $t.row,
            x0 = in(reg) $x0,
            x1 = in(reg) $x0.wrapping_add($plane),
            x2 = in(reg) $x0.wrapping_add(2 * $plane),
            s = in(reg) 64usize,
            options(nostack),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _
        )
    };
}

/// One step of 32 of k. The order of the planes is that of [`multiply`](super::multiply) with the two sides exchanged: the same bits.
///
/// # Safety
/// The tiles and the planes of A can be read; the sums are in their registers.
#[inline]
unsafe fn add_step(t: &Tiles, planes: usize, x: *const u8, x_planes: usize, plane: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match (planes, x_planes) {
            (1, 1) => products!(["tmm5" x0], [(0 "tmm5")], t, x, plane),
            (2, 1) => products!(["tmm5" x0], [(1 "tmm5"), (0 "tmm5")], t, x, plane),
            (3, 1) => products!(["tmm5" x0], [(2 "tmm5"), (1 "tmm5"), (0 "tmm5")], t, x, plane),
            (1, 2) => products!(["tmm5" x0, "tmm6" x1], [(0 "tmm6"), (0 "tmm5")], t, x, plane),
            (2, 2) => products!(["tmm5" x0, "tmm6" x1], [(1 "tmm5"), (0 "tmm5"), (0 "tmm6")], t, x, plane),
            (1, 3) => products!(
                ["tmm5" x0, "tmm6" x1, "tmm7" x2],
                [(0 "tmm7"), (0 "tmm6"), (0 "tmm5")], t, x, plane
            ),
            (3, 3) => products!(
                ["tmm5" x0, "tmm6" x1, "tmm7" x2],
                [(1 "tmm6"), (1 "tmm5"), (2 "tmm5"), (0 "tmm5"), (0 "tmm6"), (0 "tmm7")], t, x, plane
            ),
            other => unreachable!("planes {other:?}"),
        }
    }
}

/// `turned[r][i] = c[i][r]` for i < m, r < n.
///
/// # Safety
/// `c` has m rows of n values at the stride; m ≤ 16, n ≤ 64.
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
