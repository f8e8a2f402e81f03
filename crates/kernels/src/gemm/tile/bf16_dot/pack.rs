//! Packing pairs of bf16: a word holds two steps of k of one row.

use half::bf16;
use std::arch::x86_64::*;

use crate::gemm::tile::avx512::lanes;
use crate::gemm::tile::avx512::pack::transpose16;

/// Words of two bf16, as the instructions want them named.
#[inline]
pub(super) fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without invalid values.
    unsafe { std::mem::transmute(words) }
}

/// The opposite of [`pairs`].
#[inline]
fn words(pairs: __m512bh) -> __m512i {
    // SAFETY: as there.
    unsafe { std::mem::transmute(pairs) }
}

/// A storage type as it becomes pairs.
///
/// # Safety of the functions
/// The elements read must be readable, and the processor must have AVX-512 F, BW, VL and BF16.
pub(super) trait Source: Copy {
    /// The first `n` of 32 neighbours along k, zero behind: sixteen words.
    unsafe fn neighbours(at: *const Self, n: usize) -> __m512i;
    /// The kept ones of sixteen elements here, and of those `ld` elements on if `second`: a word each.
    unsafe fn two_rows(at: *const Self, ld: usize, second: bool, keep: __mmask16) -> __m512i;
}

impl Source for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn neighbours(at: *const f32, n: usize) -> __m512i {
        // SAFETY: the masks keep to n elements.
        unsafe {
            let low = _mm512_maskz_loadu_ps(lanes(n), at);
            let high = _mm512_maskz_loadu_ps(lanes(n.saturating_sub(16)), at.wrapping_add(16));
            words(_mm512_cvtne2ps_pbh(high, low))
        }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn two_rows(at: *const f32, ld: usize, second: bool, keep: __mmask16) -> __m512i {
        // SAFETY: the masks keep to what the caller promises.
        unsafe {
            let low = _mm512_maskz_loadu_ps(keep, at);
            let high = _mm512_maskz_loadu_ps(if second { keep } else { 0 }, at.wrapping_add(ld));
            interleave(words(_mm512_cvtne2ps_pbh(high, low)))
        }
    }
}

impl Source for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn neighbours(at: *const bf16, n: usize) -> __m512i {
        let keep: __mmask32 = if n >= 32 { !0 } else { (1u32 << n) - 1 };
        // SAFETY: the mask keeps to n elements.
        unsafe { _mm512_maskz_loadu_epi16(keep, at.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn two_rows(at: *const bf16, ld: usize, second: bool, keep: __mmask16) -> __m512i {
        // SAFETY: the masks keep to what the caller promises.
        unsafe {
            let low = _mm256_maskz_loadu_epi16(keep, at.cast());
            let high = _mm256_maskz_loadu_epi16(if second { keep } else { 0 }, at.wrapping_add(ld).cast());
            interleave(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high))
        }
    }
}

/// Sixteen values of one row followed by sixteen of the next become sixteen words of two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(rows: __m512i) -> __m512i {
    let mut order = [0i16; 32];
    for (i, o) in order.iter_mut().enumerate() {
        *o = (i / 2 + i % 2 * 16) as i16;
    }
    // SAFETY: 64 bytes.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    _mm512_permutexvar_epi16(order, rows)
}

/// # Safety
/// As [`Tile::pack_across`].
///
/// [`Tile::pack_across`]: crate::gemm::tile::Tile::pack_across
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn across<S: Source>(src: *const S, ld: usize, rows: usize, k: usize, width: usize, dst: *mut f32) {
    let row = |i: usize| src.wrapping_add(i * ld);
    if width == 8 && rows == 8 {
        // Eight rows, 64 steps: both halves go through one transpose.
        for p in (0..k).step_by(64) {
            prefetch::<S, 8>(src, ld, p, k);
            let mut r = [_mm512_setzero_ps(); 16];
            for (q, r) in r.iter_mut().enumerate() {
                let from = p + q / 8 * 32;
                // SAFETY: the mask keeps to the row.
                *r = _mm512_castsi512_ps(unsafe {
                    S::neighbours(row(q % 8).wrapping_add(from), k.saturating_sub(from))
                });
            }
            let pairs = (k - p).div_ceil(2);
            for (w, t) in transpose16(r).into_iter().enumerate() {
                // SAFETY: steps of eight words, as many as the panel has.
                unsafe {
                    if w < pairs {
                        _mm256_storeu_ps(dst.add((p / 2 + w) * 8), _mm512_castps512_ps256(t));
                    }
                    if w + 16 < pairs {
                        _mm256_storeu_ps(dst.add((p / 2 + w + 16) * 8), _mm512_extractf32x8_ps::<1>(t));
                    }
                }
            }
        }
        return;
    }
    for i in (0..width).step_by(16) {
        let have = rows.saturating_sub(i).min(16);
        for p in (0..k).step_by(32) {
            prefetch::<S, 16>(row(i), ld, p, k);
            let mut r = [_mm512_setzero_ps(); 16];
            for (q, r) in r.iter_mut().enumerate().take(have) {
                // SAFETY: the mask keeps to the row.
                *r = _mm512_castsi512_ps(unsafe { S::neighbours(row(i + q).wrapping_add(p), k - p) });
            }
            let pairs = (k - p).div_ceil(2).min(16);
            for (w, t) in transpose16(r).into_iter().enumerate().take(pairs) {
                // SAFETY: the mask keeps to the step's width.
                unsafe { _mm512_mask_storeu_ps(dst.add((p / 2 + w) * width + i), lanes(width - i), t) };
            }
        }
    }
}

/// Asks for what the rows hold some way after step `p`: of these rows, or, near their end, of as many rows below.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<S, const ROWS: usize>(rows: *const S, ld: usize, p: usize, k: usize) {
    let ahead = 512 / size_of::<S>();
    let from = if p + ahead < k { p + ahead } else { ROWS * ld + (p + ahead - k).min(k) };
    for q in 0..ROWS {
        let at = rows.cast::<i8>().wrapping_add((q * ld + from) * size_of::<S>());
        _mm_prefetch::<_MM_HINT_T0>(at);
        if size_of::<S>() == 4 {
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(64));
        }
    }
}

/// # Safety
/// As [`Tile::pack_along`].
///
/// [`Tile::pack_along`]: crate::gemm::tile::Tile::pack_along
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn along<S: Source>(
    src: *const S,
    ld: usize,
    count: usize,
    k: usize,
    (panel, multiple): (usize, usize),
    dst: *mut f32,
) {
    let padded = k.next_multiple_of(2);
    for p in (0..k).step_by(2) {
        let row = src.wrapping_add(p * ld);
        for ahead in 8..10 {
            for i in (0..count).step_by(64 / size_of::<S>()) {
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(ahead * ld + i).cast());
            }
        }
        let second = p + 1 < k;
        let mut i = 0;
        while i < count {
            let first = i / panel * panel;
            let at = |first: usize, width: usize| dst.wrapping_add((first * padded + p * width) / 2);
            // SAFETY: columns of this row, words of this step of the panel; masks keep to both.
            unsafe {
                if panel == 8 && i + 16 <= count {
                    // Two panels at once.
                    let word = S::two_rows(row.add(i), ld, second, !0);
                    _mm256_storeu_si256(at(i, 8).cast(), _mm512_castsi512_si256(word));
                    _mm256_storeu_si256(at(i + 8, 8).cast(), _mm512_extracti64x4_epi64::<1>(word));
                    i += 16;
                    continue;
                }
                let width = if first + panel <= count { panel } else { (count - first).next_multiple_of(multiple) };
                let end = count.min(first + panel).min(i + 16);
                let word = S::two_rows(row.add(i), ld, second, lanes(end - i));
                let rest = width - (i - first);
                _mm512_mask_storeu_epi32(at(first, width).add(i - first).cast(), lanes(rest), word);
                i = end;
            }
        }
    }
}
