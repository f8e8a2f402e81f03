//! AVX-512 BF16: 8 × 48 of C, two products of bf16 a lane and instruction (VDPBF16PS), where that is faster than f32.
//!
//! That is so on AMD's processors that have it ([`has_fast_bf16_pairs`](crate::isa::has_fast_bf16_pairs)). Operands are rounded to the nearest bf16, sums are f32. An element is one chain over pairs of k; of a pair
//! the second product is added first. Subnormals count as zero, in operands and sums.

mod pack;

use std::arch::x86_64::*;

use super::avx512::lanes;
use super::{Form, Panel, Src, Tile, by_size};

pub(crate) struct Bf16Dot;

const MR: usize = 8;
const NR: usize = 48;

impl Tile for Bf16Dot {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = 16;
    const K_UNIT: usize = 2;

    fn room(values: usize, _: usize) -> usize {
        values / 2
    }

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        let (pairs, a, b) = (k.div_ceil(2), a.at, b.at);
        // SAFETY: the caller's promise, passed on with the sizes as constants.
        unsafe { by_size!(tile, mr, nr.div_ceil(16), (nr, pairs, a, b, c, ldc, from_c)) }
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
                Src::F32(x) => pack::along(x, ld, count, k, (panel, lanes), dst),
                Src::Bf16(x) => pack::along(x, ld, count, k, (panel, lanes), dst),
            }
        }
    }
}

/// # Safety
/// As [`Tile::multiply`], with `mr` = `M`, `V` = `nr` / 16 rounded up, and k in pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn tile<const M: usize, const V: usize>(
    nr: usize,
    pairs: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let last = lanes(nr - (V - 1) * 16);
    let keep = |v: usize| if v + 1 < V { !0 } else { last };
    let mut acc = [[_mm512_setzero_ps(); V]; M];
    // SAFETY: C has M rows of nr elements, of which the mask keeps the last vector; the panels hold `pairs` steps of M and 16·V words.
    unsafe {
        for i in 0..M {
            for v in 0..V {
                let at = c.add(i * ldc + v * 16);
                if from_c {
                    acc[i][v] = _mm512_maskz_loadu_ps(keep(v), at);
                } else {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast());
                }
            }
        }
        for p in 0..pairs {
            let mut bv = [_mm512_setzero_si512(); V];
            for v in 0..V {
                bv[v] = _mm512_loadu_si512(b.add(p * 16 * V + v * 16).cast());
            }
            for i in 0..M {
                let av = _mm512_set1_epi32(a.cast::<i32>().add(p * M + i).read());
                for v in 0..V {
                    acc[i][v] = _mm512_dpbf16_ps(acc[i][v], pack::pairs(av), pack::pairs(bv[v]));
                }
            }
        }
        for i in 0..M {
            for v in 0..V {
                _mm512_mask_storeu_ps(c.add(i * ldc + v * 16), keep(v), acc[i][v]);
            }
        }
    }
}
