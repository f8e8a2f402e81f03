//! Packing with AVX-512: transposes in registers where the source runs along k, long copies where it runs across.

use half::bf16;
use std::arch::x86_64::*;

use super::lanes;

/// A storage type, widened to f32 as it is packed.
///
/// A 32-bit lane holds PER_LANE neighbours: two bf16 travel through a transpose together and part when they are widened.
///
/// # Safety of the functions
/// The elements read must be readable, and the processor must have AVX-512 F, BW and VL.
pub(in crate::gemm::tile) trait Element: Copy {
    const PER_LANE: usize;
    /// The kept lanes of 16 elements, widened; zero elsewhere.
    unsafe fn widen(at: *const Self, keep: __mmask16) -> __m512;
    /// Eight elements, widened.
    unsafe fn widen8(at: *const Self) -> __m256;
    /// 16 lanes of raw elements.
    unsafe fn raw(at: *const Self) -> __m512;
    /// The first `n` raw elements, zero behind.
    unsafe fn raw_part(at: *const Self, n: usize) -> __m512;
    /// Neighbour `which` of each lane, widened.
    unsafe fn part(lanes: __m512, which: usize) -> __m512;
}

impl Element for f32 {
    const PER_LANE: usize = 1;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen(at: *const f32, keep: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(keep, at) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen8(at: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(at) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn raw(at: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(at) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn raw_part(at: *const f32, n: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(lanes(n), at) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(lanes: __m512, _: usize) -> __m512 {
        lanes
    }
}

impl Element for bf16 {
    const PER_LANE: usize = 2;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen(at: *const bf16, keep: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        let h = unsafe { _mm256_maskz_loadu_epi16(keep, at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(h)))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn widen8(at: *const bf16) -> __m256 {
        // SAFETY: the caller's promise.
        let h = unsafe { _mm_loadu_si128(at.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(h)))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn raw(at: *const bf16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn raw_part(at: *const bf16, n: usize) -> __m512 {
        let keep: __mmask32 = if n >= 32 { !0 } else { (1u32 << n) - 1 };
        // SAFETY: the caller's promise.
        unsafe { _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(keep, at.cast())) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn part(lanes: __m512, which: usize) -> __m512 {
        let x = _mm512_castps_si512(lanes);
        _mm512_castsi512_ps(if which == 0 {
            _mm512_slli_epi32::<16>(x)
        } else {
            _mm512_and_si512(x, _mm512_set1_epi32(0xFFFF_0000u32 as i32))
        })
    }
}

/// # Safety
/// As [`Tile::pack_across`].
///
/// [`Tile::pack_across`]: crate::gemm::tile::Tile::pack_across
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn across<E: Element>(src: *const E, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    let whole = k / (16 * E::PER_LANE) * (16 * E::PER_LANE);
    // SAFETY: groups of rows of the source and of lanes of the panel, as the caller promises.
    unsafe {
        if width == 1 {
            // One row is its own panel.
            return copy_step(src, k, k, dst);
        }
        let mut i = 0;
        while i < width {
            let (from, have) = (src.wrapping_add(i * ld), rows.saturating_sub(i).min(16));
            let done = if have == 16 {
                across16(from, ld, k, whole, (width, lanes(width - i)), dst.add(i));
                whole
            } else if have == 8 && width == 8 {
                across8(from, ld, k, whole, dst);
                whole
            } else {
                0
            };
            across_part(from, ld, have, done, k, (width, lanes(width - i)), dst.add(i));
            i += 16;
        }
    }
}

/// Packs 16 rows, steps 0..`whole` of `k`.
///
/// # Safety
/// 16 rows of `k` elements, and 16 values in each of `whole` steps of `width` at `dst`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn across16<E: Element>(
    src: *const E,
    ld: usize,
    k: usize,
    whole: usize,
    (width, keep): (usize, __mmask16),
    dst: *mut f32,
) {
    for p in (0..whole).step_by(16 * E::PER_LANE) {
        prefetch_rows::<E, 16>(src, ld, p, k);
        // Masked though all lanes are kept: whole-line stores cost a quarter of the read bandwidth here (Zen 5).
        // SAFETY: the caller's promise.
        unsafe {
            let mut r = [_mm512_setzero_ps(); 16];
            for (q, r) in r.iter_mut().enumerate() {
                *r = E::raw(src.add(q * ld + p));
            }
            for (q, t) in transpose16(r).into_iter().enumerate() {
                for s in 0..E::PER_LANE {
                    _mm512_mask_storeu_ps(dst.add((p + q * E::PER_LANE + s) * width), keep, E::part(t, s));
                }
            }
        }
    }
}

/// Packs 8 rows into a panel of 8, steps 0..`whole` of `k`.
///
/// # Safety
/// 8 rows of `k` elements, and `whole` steps of 8 at `dst`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn across8<E: Element>(src: *const E, ld: usize, k: usize, whole: usize, dst: *mut f32) {
    // Pairs of 64 bits: lanes 0 and 1 (then 2 and 3) of the upper and the lower four rows, side by side.
    let pick = [_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)];
    for p in (0..whole).step_by(16 * E::PER_LANE) {
        prefetch_rows::<E, 8>(src, ld, p, k);
        // SAFETY: the caller's promise.
        unsafe {
            let row = |q: usize| E::raw(src.add(q * ld + p));
            let upper = transpose_quad([row(0), row(1), row(2), row(3)]);
            let lower = transpose_quad([row(4), row(5), row(6), row(7)]);
            for j in 0..4 {
                for (half, &pick) in pick.iter().enumerate() {
                    let (x, y) = (_mm512_castps_pd(upper[j]), _mm512_castps_pd(lower[j]));
                    let two = _mm512_castpd_ps(_mm512_permutex2var_pd(x, pick, y));
                    for s in 0..E::PER_LANE {
                        let v = E::part(two, s);
                        let at = |column: usize| dst.add((p + column * E::PER_LANE + s) * 8);
                        _mm256_storeu_ps(at(8 * half + j), _mm512_castps512_ps256(v));
                        _mm256_storeu_ps(at(8 * half + 4 + j), _mm512_extractf32x8_ps::<1>(v));
                    }
                }
            }
        }
    }
}

/// Packs up to 16 rows into the kept lanes, steps `p`..`k`: what the whole groups leave.
///
/// # Safety
/// `have` rows of `k` elements; the kept lanes of each step of `width` at `dst`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn across_part<E: Element>(
    src: *const E,
    ld: usize,
    have: usize,
    mut p: usize,
    k: usize,
    (width, keep): (usize, __mmask16),
    dst: *mut f32,
) {
    while p < k {
        let steps = (k - p).min(16 * E::PER_LANE);
        // SAFETY: the caller's promise; the masks keep to these rows, steps and lanes.
        unsafe {
            let mut r = [_mm512_setzero_ps(); 16];
            for (q, r) in r.iter_mut().enumerate().take(have) {
                *r = E::raw_part(src.add(q * ld + p), steps);
            }
            let t = transpose16(r);
            for step in 0..steps {
                let v = E::part(t[step / E::PER_LANE], step % E::PER_LANE);
                _mm512_mask_storeu_ps(dst.add((p + step) * width), keep, v);
            }
        }
        p += steps;
    }
}

/// Asks for what the rows hold some way after step `p`: of these rows, or, near their end, of as many rows below.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn prefetch_rows<E, const ROWS: usize>(rows: *const E, ld: usize, p: usize, k: usize) {
    let ahead = AHEAD_BYTES / size_of::<E>();
    let from = if p + ahead < k { p + ahead } else { ROWS * ld + (p + ahead - k).min(k) };
    for q in 0..ROWS {
        _mm_prefetch::<_MM_HINT_T0>(rows.wrapping_add(q * ld + from).cast());
    }
}

/// How far ahead in each row the transposing packing asks for memory.
const AHEAD_BYTES: usize = 512;

/// Transposes each 4 × 4 block inside the 128-bit lanes of four rows: result j holds column j of its lane's four.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_quad([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    let pd = |x, y, hi: bool| {
        let (x, y) = (_mm512_castps_pd(x), _mm512_castps_pd(y));
        _mm512_castpd_ps(if hi { _mm512_unpackhi_pd(x, y) } else { _mm512_unpacklo_pd(x, y) })
    };
    let (ab_lo, ab_hi) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let (cd_lo, cd_hi) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    [pd(ab_lo, cd_lo, false), pd(ab_lo, cd_lo, true), pd(ab_hi, cd_hi, false), pd(ab_hi, cd_hi, true)]
}

/// Turns 16 rows of 16 into 16 columns.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose16(r: [__m512; 16]) -> [__m512; 16] {
    let mut u = r;
    for g in 0..4 {
        let quad = transpose_quad([r[4 * g], r[4 * g + 1], r[4 * g + 2], r[4 * g + 3]]);
        u[4 * g..4 * g + 4].copy_from_slice(&quad);
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
/// As [`Tile::pack_along`].
///
/// [`Tile::pack_along`]: crate::gemm::tile::Tile::pack_along
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn along<E: Element>(
    src: *const E,
    ld: usize,
    count: usize,
    k: usize,
    panel: usize,
    lanes: usize,
    dst: *mut f32,
) {
    let full = count / panel * panel;
    let mut p = 0;
    while p < k {
        // Two steps at a time, so that panels 8 wide are written in whole cache lines.
        let steps = (k - p).min(2);
        let row = src.wrapping_add(p * ld);
        // The hardware does not see a pattern in steps of ld.
        for ahead in AHEAD_ROWS..AHEAD_ROWS + steps {
            for i in (0..count).step_by(64 / size_of::<E>()) {
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(ahead * ld + i).cast());
            }
        }
        // SAFETY: steps p..p+steps of every panel; the masks keep loads inside the row and stores inside the step.
        unsafe {
            if panel == 8 && steps == 2 {
                for i in (0..full).step_by(8) {
                    let (v, w) = (E::widen8(row.add(i)), E::widen8(row.add(ld + i)));
                    let v = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(v), w);
                    _mm512_storeu_ps(dst.add(i * k + p * 8), v);
                }
            } else {
                for q in 0..steps {
                    for i in (0..full).step_by(panel) {
                        copy_step(row.add(q * ld + i), panel, panel, dst.add(i * k + (p + q) * panel));
                    }
                }
            }
            if full < count {
                let (rows, width) = (count - full, (count - full).next_multiple_of(lanes));
                for q in 0..steps {
                    copy_step(row.add(q * ld + full), rows, width, dst.add(full * k + (p + q) * width));
                }
            }
        }
        p += steps;
    }
}

/// How many memory rows ahead the packing asks for.
const AHEAD_ROWS: usize = 8;

/// `dst[c] = src[c]` for c < `rows`, zero up to `width`.
///
/// # Safety
/// `src` holds `rows` elements, `dst` takes `width`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn copy_step<E: Element>(src: *const E, rows: usize, width: usize, dst: *mut f32) {
    for c in (0..width).step_by(16) {
        // SAFETY: the masks keep to what the caller promises.
        unsafe {
            let v = E::widen(src.wrapping_add(c), lanes(rows.saturating_sub(c)));
            _mm512_mask_storeu_ps(dst.add(c), lanes(width - c), v);
        }
    }
}
