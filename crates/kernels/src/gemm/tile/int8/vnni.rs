//! The recipe with VPDPBUSD: 24 sums of 16 in registers, beside three of B and one broadcast of A.

use std::arch::x86_64::*;

use super::{BLOCK, MR, NR, ROW, WORDS, pack, room};
use crate::gemm::tile::avx512::lanes;
use crate::gemm::tile::{Form, Panel, Src, Tile, by_size};

pub(crate) struct Vnni;

impl Tile for Vnni {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = 16;
    const K_UNIT: usize = BLOCK;

    fn room(values: usize, _: usize) -> usize {
        room(values)
    }

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        let (blocks, a, b) = (k.div_ceil(BLOCK), a.at, b.at);
        // SAFETY: the caller's promise, passed on with the sizes as constants.
        unsafe { by_size!(tile, mr, nr.div_ceil(16), (nr, blocks, a, b, c, ldc, from_c)) }
    }

    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, form: Form, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => pack::across(x, ld, rows, k, width, form, dst),
                Src::Bf16(x) => pack::across(x, ld, rows, k, width, form, dst),
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
        form: Form,
        dst: *mut f32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => pack::along(x, ld, count, k, (panel, lanes), form, dst),
                Src::Bf16(x) => pack::along(x, ld, count, k, (panel, lanes), form, dst),
            }
        }
    }
}

/// # Safety
/// As [`Tile::multiply`], with `mr` = `M`, `V` = `nr` / 16 rounded up, and k in stretches.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn tile<const M: usize, const V: usize>(
    nr: usize,
    blocks: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let last = lanes(nr - (V - 1) * 16);
    let keep = |v: usize| if v + 1 < V { !0 } else { last };
    // The f32 sums live in the first-level cache: the registers are full of int32 sums.
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    // SAFETY: C has M rows of nr elements, of which the mask keeps the last vector; the panels hold `blocks` stretches of M and 16·V.
    unsafe {
        for i in 0..M {
            for v in 0..V {
                let at = c.add(i * ldc + v * 16);
                if from_c {
                    sums[i][v] = _mm512_maskz_loadu_ps(keep(v), at);
                } else {
                    _mm_prefetch::<_MM_HINT_T0>(at.cast());
                }
            }
        }
        for block in 0..blocks {
            let (a, b) = (a.add(block * ROW * M), b.add(block * ROW * 16 * V));
            let mut raised = [_mm512_setzero_si512(); V];
            for v in 0..V {
                raised[v] = _mm512_loadu_si512(b.add((WORDS + 1) * 16 * V + v * 16).cast());
            }
            let mut acc = [raised; M];
            for w in 0..WORDS {
                let mut bv = [_mm512_setzero_si512(); V];
                for v in 0..V {
                    bv[v] = _mm512_loadu_si512(b.add(w * 16 * V + v * 16).cast());
                }
                for i in 0..M {
                    let av = _mm512_set1_epi32(a.cast::<i32>().add(w * M + i).read());
                    for v in 0..V {
                        acc[i][v] = _mm512_dpbusd_epi32(acc[i][v], av, bv[v]);
                    }
                }
            }
            let mut scale = [_mm512_setzero_ps(); V];
            for v in 0..V {
                scale[v] = _mm512_loadu_ps(b.add(WORDS * 16 * V + v * 16));
            }
            for i in 0..M {
                let a_scale = _mm512_set1_ps(*a.add(WORDS * M + i));
                for v in 0..V {
                    let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[i][v]), scale[v]);
                    sums[i][v] = _mm512_fmadd_ps(scaled, a_scale, sums[i][v]);
                }
            }
        }
        for i in 0..M {
            for v in 0..V {
                _mm512_mask_storeu_ps(c.add(i * ldc + v * 16), keep(v), sums[i][v]);
            }
        }
    }
}
