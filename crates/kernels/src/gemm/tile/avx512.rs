//! AVX-512: 8 × 48 in 24 of the 32 registers; three more hold the step of B, one the broadcast of A.

use super::{Src, Tile};
use half::bf16;
use std::arch::x86_64::*;

pub(crate) struct Avx512;

const MR: usize = 8;
const NR: usize = 48;

impl Tile for Avx512 {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = 16;

    unsafe fn multiply(
        mr: usize,
        nr: usize,
        k: usize,
        a: *const f32,
        b: *const f32,
        c: *mut f32,
        ldc: usize,
        from_c: bool,
    ) {
        macro_rules! rows {
            ($v:literal) => {
                match mr {
                    1 => tile::<1, $v>(nr, k, a, b, c, ldc, from_c),
                    2 => tile::<2, $v>(nr, k, a, b, c, ldc, from_c),
                    3 => tile::<3, $v>(nr, k, a, b, c, ldc, from_c),
                    4 => tile::<4, $v>(nr, k, a, b, c, ldc, from_c),
                    5 => tile::<5, $v>(nr, k, a, b, c, ldc, from_c),
                    6 => tile::<6, $v>(nr, k, a, b, c, ldc, from_c),
                    7 => tile::<7, $v>(nr, k, a, b, c, ldc, from_c),
                    _ => tile::<8, $v>(nr, k, a, b, c, ldc, from_c),
                }
            };
        }
        // SAFETY: the caller's promise, passed on with the sizes as constants.
        unsafe {
            match nr.div_ceil(16) {
                1 => rows!(1),
                2 => rows!(2),
                _ => rows!(3),
            }
        }
    }

    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => across_f32(x, ld, rows, k, width, dst),
                Src::Bf16(x) => across_bf16(x, ld, rows, k, width, dst),
            }
        }
    }

    unsafe fn pack_along(src: Src, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => along_f32(x, ld, rows, k, width, dst),
                Src::Bf16(x) => along_bf16(x, ld, rows, k, width, dst),
            }
        }
    }
}

/// The first `n` lanes (none below 0, at most 16).
#[inline(always)]
fn lanes(n: usize) -> __mmask16 {
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

/// # Safety
/// As [`Tile::pack_across`], for f32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn across_f32(src: *const f32, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    let mut i = 0;
    while i < width {
        let (have, keep) = (rows.saturating_sub(i).min(16), lanes(width - i));
        let mut p = 0;
        while p < k {
            let steps = (k - p).min(16);
            // SAFETY: rows i..i+have and steps p..p+steps lie in the source; the masked stores write this group's lanes.
            unsafe {
                let mut r = [_mm512_setzero_ps(); 16];
                if have == 16 && steps == 16 {
                    for (q, r) in r.iter_mut().enumerate() {
                        *r = _mm512_loadu_ps(src.add((i + q) * ld + p));
                    }
                } else {
                    for (q, r) in r.iter_mut().enumerate().take(have) {
                        *r = _mm512_maskz_loadu_ps(lanes(steps), src.add((i + q) * ld + p));
                    }
                }
                let t = transpose(r);
                let out = dst.add(p * width + i);
                if steps == 16 {
                    for (q, t) in t.iter().enumerate() {
                        _mm512_mask_storeu_ps(out.add(q * width), keep, *t);
                    }
                } else {
                    for (q, t) in t.iter().enumerate().take(steps) {
                        _mm512_mask_storeu_ps(out.add(q * width), keep, *t);
                    }
                }
            }
            p += steps;
        }
        i += 16;
    }
}

/// # Safety
/// As [`Tile::pack_across`], for bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn across_bf16(src: *const bf16, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    // Two neighbours along k travel as one 32-bit value through the same transpose, and part when they are widened.
    let high = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
    let mut i = 0;
    while i < width {
        let (have, keep) = (rows.saturating_sub(i).min(16), lanes(width - i));
        let mut p = 0;
        while p < k {
            let steps = (k - p).min(32);
            let in_row: __mmask32 = if steps == 32 { !0 } else { (1u32 << steps) - 1 };
            // SAFETY: rows i..i+have and steps p..p+steps lie in the source; the masked stores write this group's lanes.
            unsafe {
                let mut r = [_mm512_setzero_ps(); 16];
                for (q, r) in r.iter_mut().enumerate().take(have) {
                    *r = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(in_row, src.add((i + q) * ld + p).cast()));
                }
                let t = transpose(r);
                let out = dst.add(p * width + i);
                for (q, t) in t.iter().enumerate() {
                    let t = _mm512_castps_si512(*t);
                    if 2 * q < steps {
                        let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(t));
                        _mm512_mask_storeu_ps(out.add(2 * q * width), keep, even);
                    }
                    if 2 * q + 1 < steps {
                        let odd = _mm512_castsi512_ps(_mm512_and_si512(t, high));
                        _mm512_mask_storeu_ps(out.add((2 * q + 1) * width), keep, odd);
                    }
                }
            }
            p += steps;
        }
        i += 16;
    }
}

/// Turns 16 rows of 16 into 16 columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    let pd = |x, y, hi: bool| {
        let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
        _mm512_castpd_ps(if hi { _mm512_unpackhi_pd(x, y) } else { _mm512_unpacklo_pd(x, y) })
    };
    // 4 × 4 blocks inside each 128-bit lane: u[4g + j] holds column j (of its lane's four) of rows 4g..4g+4.
    let mut u = r;
    for g in 0..4 {
        let [a, b, c, d] = [r[4 * g], r[4 * g + 1], r[4 * g + 2], r[4 * g + 3]];
        let (ab_lo, ab_hi) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let (cd_lo, cd_hi) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        u[4 * g] = pd(ab_lo, cd_lo, false);
        u[4 * g + 1] = pd(ab_lo, cd_lo, true);
        u[4 * g + 2] = pd(ab_hi, cd_hi, false);
        u[4 * g + 3] = pd(ab_hi, cd_hi, true);
    }
    // Then a 4 × 4 transpose of the lanes themselves.
    let mut o = u;
    for j in 0..4 {
        let [a, b, c, d] = [u[j], u[4 + j], u[8 + j], u[12 + j]];
        let (ab_lo, ab_hi) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
        let (cd_lo, cd_hi) = (_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xEE>(c, d));
        o[j] = _mm512_shuffle_f32x4::<0x88>(ab_lo, cd_lo);
        o[4 + j] = _mm512_shuffle_f32x4::<0xDD>(ab_lo, cd_lo);
        o[8 + j] = _mm512_shuffle_f32x4::<0x88>(ab_hi, cd_hi);
        o[12 + j] = _mm512_shuffle_f32x4::<0xDD>(ab_hi, cd_hi);
    }
    o
}

/// # Safety
/// As [`Tile::pack_along`], for f32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn along_f32(src: *const f32, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    for p in 0..k {
        let mut i = 0;
        while i < width {
            // SAFETY: the masks keep the load inside the row and the store inside the step.
            unsafe {
                let v = _mm512_maskz_loadu_ps(lanes(rows.saturating_sub(i)), src.wrapping_add(p * ld + i));
                _mm512_mask_storeu_ps(dst.add(p * width + i), lanes(width - i), v);
            }
            i += 16;
        }
    }
}

/// # Safety
/// As [`Tile::pack_along`], for bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn along_bf16(src: *const bf16, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    for p in 0..k {
        let mut i = 0;
        while i < width {
            // SAFETY: the masks keep the load inside the row and the store inside the step.
            unsafe {
                let h = _mm256_maskz_loadu_epi16(lanes(rows.saturating_sub(i)), src.wrapping_add(p * ld + i).cast());
                let v = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(h)));
                _mm512_mask_storeu_ps(dst.add(p * width + i), lanes(width - i), v);
            }
            i += 16;
        }
    }
}
