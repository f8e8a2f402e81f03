//! AVX2 + FMA: 6 × 16 in twelve of the sixteen registers.

use super::{Form, Panel, Src, Tile, portable};
use std::arch::x86_64::*;

pub(crate) struct Avx2;

const MR: usize = 6;
const NR: usize = 16;

impl Tile for Avx2 {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = 8;

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        let (a, b) = (a.at, b.at);
        macro_rules! rows {
            ($v:literal) => {
                match mr {
                    1 => tile::<1, $v>(nr, k, a, b, c, ldc, from_c),
                    2 => tile::<2, $v>(nr, k, a, b, c, ldc, from_c),
                    3 => tile::<3, $v>(nr, k, a, b, c, ldc, from_c),
                    4 => tile::<4, $v>(nr, k, a, b, c, ldc, from_c),
                    5 => tile::<5, $v>(nr, k, a, b, c, ldc, from_c),
                    _ => tile::<6, $v>(nr, k, a, b, c, ldc, from_c),
                }
            };
        }
        // SAFETY: the caller's promise, passed on with the sizes as constants.
        unsafe { if nr <= 8 { rows!(1) } else { rows!(2) } }
    }

    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, _: Form, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => across_f32(x, ld, rows, k, width, dst),
                Src::Bf16(_) => across_any(src, ld, rows, k, width, dst),
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
        unsafe { along(src, ld, count, k, panel, lanes, dst) }
    }
}

/// # Safety
/// As [`Tile::multiply`], with `mr` = `M` and `V` = `nr` / 8 rounded up.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const M: usize, const V: usize>(
    nr: usize,
    k: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    // Masked stores are slow on some processors: only where the block is ragged.
    let (full, last) = (nr == V * 8, lane_mask(nr - (V - 1) * 8));
    let mut acc = [[_mm256_setzero_ps(); V]; M];
    // SAFETY: C has M rows of nr elements, of which the mask keeps the last vector; the panels hold k steps of M and 8·V.
    unsafe {
        if from_c {
            for i in 0..M {
                for v in 0..V {
                    let at = c.add(i * ldc + v * 8);
                    acc[i][v] = if full || v + 1 < V { _mm256_loadu_ps(at) } else { _mm256_maskload_ps(at, last) };
                }
            }
        }
        for p in 0..k {
            let mut bv = [_mm256_setzero_ps(); V];
            for v in 0..V {
                bv[v] = _mm256_loadu_ps(b.add(p * 8 * V + v * 8));
            }
            for i in 0..M {
                let av = _mm256_set1_ps(*a.add(p * M + i));
                for v in 0..V {
                    acc[i][v] = _mm256_fmadd_ps(av, bv[v], acc[i][v]);
                }
            }
        }
        for i in 0..M {
            for v in 0..V {
                let at = c.add(i * ldc + v * 8);
                if full || v + 1 < V {
                    _mm256_storeu_ps(at, acc[i][v]);
                } else {
                    _mm256_maskstore_ps(at, last, acc[i][v]);
                }
            }
        }
    }
}

/// All ones in the first `n` lanes (n ≤ 8).
#[target_feature(enable = "avx2")]
fn lane_mask(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// Writes the first `n` lanes (n ≤ 8); 8 and 6, the widths of full panels, without the slow masked store.
///
/// # Safety
/// `out` takes `n` values.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_first(out: *mut f32, v: __m256, n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            8 => _mm256_storeu_ps(out, v),
            6 => {
                _mm_storeu_ps(out, _mm256_castps256_ps128(v));
                _mm_storel_pd(out.add(4).cast(), _mm_castps_pd(_mm256_extractf128_ps::<1>(v)));
            }
            _ => _mm256_maskstore_ps(out, lane_mask(n), v),
        }
    }
}

/// # Safety
/// As [`Tile::pack_across`], for f32.
#[target_feature(enable = "avx2,fma")]
unsafe fn across_f32(src: *const f32, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    let mut i = 0;
    while i < width {
        let (have, w) = (rows.saturating_sub(i).min(8), (width - i).min(8));
        let mut p = 0;
        // SAFETY: rows i..i+have and steps p..p+8 lie in the source; the masked stores write `w` lanes of each step.
        unsafe {
            while p + 8 <= k {
                let mut r = [_mm256_setzero_ps(); 8];
                for (q, r) in r.iter_mut().enumerate().take(have) {
                    *r = _mm256_loadu_ps(src.add((i + q) * ld + p));
                }
                let t = transpose(r);
                for (q, t) in t.iter().enumerate() {
                    store_first(dst.add((p + q) * width + i), *t, w);
                }
                p += 8;
            }
            for p in p..k {
                for q in 0..w {
                    *dst.add(p * width + i + q) = if q < have { *src.add((i + q) * ld + p) } else { 0.0 };
                }
            }
        }
        i += 8;
    }
}

#[target_feature(enable = "avx2")]
fn transpose(r: [__m256; 8]) -> [__m256; 8] {
    let mut t = r;
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let mut u = t;
    for i in 0..2 {
        u[4 * i] = _mm256_shuffle_ps::<0x44>(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm256_shuffle_ps::<0xEE>(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm256_shuffle_ps::<0x44>(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm256_shuffle_ps::<0xEE>(t[4 * i + 1], t[4 * i + 3]);
    }
    let mut o = u;
    for i in 0..4 {
        o[i] = _mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]);
        o[i + 4] = _mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]);
    }
    o
}

/// # Safety
/// As [`Tile::pack_across`].
#[target_feature(enable = "avx2,fma")]
unsafe fn across_any(src: Src, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { portable::pack(src, ld, 1, rows, k, width, dst) }
}

/// # Safety
/// As [`Tile::pack_along`].
#[target_feature(enable = "avx2,fma")]
unsafe fn along(src: Src, ld: usize, count: usize, k: usize, panel: usize, lanes: usize, dst: *mut f32) {
    for p in 0..k {
        for i in (0..count).step_by(panel) {
            let rows = panel.min(count - i);
            let width = rows.next_multiple_of(lanes);
            // SAFETY: this step of one panel; masks keep loads inside the row and stores inside the step.
            unsafe {
                let (src, out) = (src.add(p * ld + i), dst.add(i * k + p * width));
                for c in (0..width).step_by(8) {
                    let have = rows.saturating_sub(c).min(8);
                    let v = match src {
                        Src::F32(x) if have == 8 => _mm256_loadu_ps(x.add(c)),
                        Src::F32(x) => _mm256_maskload_ps(x.wrapping_add(c), lane_mask(have)),
                        Src::Bf16(x) if have == 8 => {
                            let h = _mm_loadu_si128(x.add(c).cast());
                            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(h)))
                        }
                        Src::Bf16(x) => {
                            let mut v = [0f32; 8];
                            for (q, v) in v.iter_mut().enumerate().take(have) {
                                *v = (*x.add(c + q)).to_f32();
                            }
                            _mm256_loadu_ps(v.as_ptr())
                        }
                    };
                    store_first(out.add(c), v, (width - c).min(8));
                }
            }
        }
    }
}
