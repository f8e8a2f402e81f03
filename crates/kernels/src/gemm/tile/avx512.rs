//! AVX-512: 8 × 48 in 24 of the 32 registers; three more hold the step of B, one the broadcast of A.

pub(crate) mod pack;
mod stream;

use super::{Form, Panel, Src, Tile, by_size};
use std::arch::x86_64::*;

pub(crate) struct Avx512;

const MR: usize = 8;
const NR: usize = 48;

impl Tile for Avx512 {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = 16;
    const STREAM_ROWS: usize = stream::ROWS;

    unsafe fn stream(
        size: (usize, usize, usize),
        Panel { at: a, .. }: Panel,
        (b, _): (Src, usize),
        ldb: usize,
        c: *mut f32,
        ldc: usize,
        from_c: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match b {
                Src::F32(b) => stream::stream(size, a, b, ldb, c, ldc, from_c),
                Src::Bf16(b) => stream::stream(size, a, b, ldb, c, ldc, from_c),
            }
        }
    }

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        let (a, b) = (a.at, b.at);
        // SAFETY: the caller's promise, passed on with the sizes as constants.
        unsafe { by_size!(tile, mr, nr.div_ceil(16), (nr, k, a, b, c, ldc, from_c)) }
    }

    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, _: Form, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => pack::across(x, ld, rows, k, width, dst),
                Src::Bf16(x) => pack::across(x, ld, rows, k, width, dst),
            }
        }
    }

    unsafe fn pack_along(
        src: Src,
        ld: usize,
        count: usize,
        k: usize,
        panel: usize,
        lanes: usize,
        _: Form,
        dst: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => pack::along(x, ld, count, k, panel, lanes, dst),
                Src::Bf16(x) => pack::along(x, ld, count, k, panel, lanes, dst),
            }
        }
    }
}

/// The first `n` lanes (none below 0, at most 16).
#[inline(always)]
pub(super) fn lanes(n: usize) -> __mmask16 {
    if n >= 16 { !0 } else { (1u16 << n) - 1 }
}

/// # Safety
/// As [`Tile::multiply`], with `mr` = `M` and `V` = `nr` / 16 rounded up.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn tile<const M: usize, const V: usize>(
    nr: usize,
    k: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let last = lanes(nr - (V - 1) * 16);
    let mut acc = [[_mm512_setzero_ps(); V]; M];
    // SAFETY: C has M rows of nr elements, of which the mask keeps the last vector; the panels hold k steps of M and 16·V.
    unsafe {
        if from_c {
            for i in 0..M {
                for v in 0..V {
                    let keep = if v + 1 < V { !0 } else { last };
                    acc[i][v] = _mm512_maskz_loadu_ps(keep, c.add(i * ldc + v * 16));
                }
            }
        } else {
            // The stores come long after: fetch the lines meanwhile.
            for i in 0..M {
                for v in 0..V {
                    _mm_prefetch::<_MM_HINT_T0>(c.wrapping_add(i * ldc + v * 16).cast());
                }
            }
        }
        for p in 0..k {
            let mut bv = [_mm512_setzero_ps(); V];
            for v in 0..V {
                bv[v] = _mm512_loadu_ps(b.add(p * 16 * V + v * 16));
            }
            for i in 0..M {
                let av = _mm512_set1_ps(*a.add(p * M + i));
                for v in 0..V {
                    acc[i][v] = _mm512_fmadd_ps(av, bv[v], acc[i][v]);
                }
            }
        }
        for i in 0..M {
            for v in 0..V {
                let keep = if v + 1 < V { !0 } else { last };
                _mm512_mask_storeu_ps(c.add(i * ldc + v * 16), keep, acc[i][v]);
            }
        }
    }
}
