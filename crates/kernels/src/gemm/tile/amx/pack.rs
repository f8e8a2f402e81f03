//! Packing into tiles of bf16 planes.
//!
//! A tile of A is 16 rows of 32 steps of k; a tile of B is 16 pairs of steps of k, each pair 16 columns wide. Seen as 32-bit words (a
//! pair of steps), one is the transpose of the other; so whichever way the source lies, words are made from what lies together in
//! memory, and transposed if the tile wants them the other way.

use half::bf16;
use std::arch::x86_64::*;

use super::super::avx512::pack::transpose16;
use super::{STEP, TILE};

/// Words of one tile of each plane: `[plane][row]`.
type Words<const P: usize> = [[__m512i; 16]; P];

/// A storage type, split into bf16 planes.
///
/// # Safety of the functions
/// The elements read must be readable, and the processor must have AVX-512 F, BW, VL and BF16.
pub(super) trait Element: Copy {
    /// Whether a value is one plane as it lies in memory.
    const IS_PLANE: bool;
    /// 32 steps of one row (the first `n`, zero behind): a word vector of each plane.
    unsafe fn run<const P: usize>(at: *const Self, n: usize) -> [__m512i; P];
    /// 16 rows at an even step and the next (which may be missing), the first `n` of them: a word vector of each plane.
    unsafe fn pair<const P: usize>(even: *const Self, odd: Option<*const Self>, n: usize) -> [__m512i; P];
}

#[inline]
fn mask16(n: usize) -> __mmask16 {
    if n >= 16 { !0 } else { (1u16 << n) - 1 }
}

#[inline]
fn mask32(n: usize) -> __mmask32 {
    if n >= 32 { !0 } else { (1u32 << n) - 1 }
}

/// The leading bf16 of each value (rounded half away from zero) as f32 bits, and what is left, exactly.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn lead(x: __m512) -> (__m512i, __m512) {
    let rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    let top = _mm512_and_si512(rounded, _mm512_set1_epi32(0xFFFF_0000u32 as i32));
    (top, _mm512_sub_ps(x, _mm512_castsi512_ps(top)))
}

/// Planes of two vectors, joined to words: of neighbours in a vector (`RUN`), or of the same lane in both.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn split<const P: usize, const RUN: bool>(mut x: __m512, mut y: __m512) -> [__m512i; P] {
    let mut planes = [_mm512_setzero_si512(); P];
    for (i, plane) in planes.iter_mut().enumerate() {
        // The third is what is left, and fits.
        let (top_x, top_y) = if i == 2 {
            (_mm512_castps_si512(x), _mm512_castps_si512(y))
        } else {
            let ((top_x, rest_x), (top_y, rest_y)) = (lead(x), lead(y));
            (x, y) = (rest_x, rest_y);
            (top_x, top_y)
        };
        *plane = if RUN { one_after_another(top_x, top_y) } else { side_by_side(top_x, top_y) };
    }
    planes
}

/// Upper halves of x, then of y.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn one_after_another(x: __m512i, y: __m512i) -> __m512i {
    const UPPER: [u16; 32] = {
        let mut at = [0; 32];
        let mut i = 0;
        while i < 32 {
            at[i] = 2 * i as u16 + 1;
            i += 1;
        }
        at
    };
    // SAFETY: 32 indices are one vector.
    let at = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    _mm512_permutex2var_epi16(x, at, y)
}

/// Upper halves of x below those of y, lane by lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn side_by_side(x: __m512i, y: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(x), y)
}

impl Element for f32 {
    const IS_PLANE: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run<const P: usize>(at: *const f32, n: usize) -> [__m512i; P] {
        // SAFETY: the caller's promise; masked lanes are not read.
        let (x, y) = unsafe {
            (
                _mm512_maskz_loadu_ps(mask16(n), at),
                _mm512_maskz_loadu_ps(mask16(n.saturating_sub(16)), at.wrapping_add(16)),
            )
        };
        if P == 1 {
            // SAFETY: both are 512 bits.
            return [unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(y, x)) }; P];
        }
        split::<P, true>(x, y)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pair<const P: usize>(even: *const f32, odd: Option<*const f32>, n: usize) -> [__m512i; P] {
        // SAFETY: the caller's promise; masked lanes are not read.
        let (x, y) = unsafe {
            (
                _mm512_maskz_loadu_ps(mask16(n), even),
                odd.map_or(_mm512_setzero_ps(), |odd| _mm512_maskz_loadu_ps(mask16(n), odd)),
            )
        };
        if P == 1 {
            // SAFETY: both are 256 bits.
            let narrow = |v| unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v)) };
            return [zipped(narrow(x), narrow(y)); P];
        }
        split::<P, false>(x, y)
    }
}

/// Words of 16 even and 16 odd halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn zipped(even: __m256i, odd: __m256i) -> __m512i {
    _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd)))
}

/// One plane, whatever P: a bf16 is never split.
impl Element for bf16 {
    const IS_PLANE: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn run<const P: usize>(at: *const bf16, n: usize) -> [__m512i; P] {
        // SAFETY: the caller's promise; masked lanes are not read.
        [unsafe { _mm512_maskz_loadu_epi16(mask32(n), at.cast()) }; P]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pair<const P: usize>(even: *const bf16, odd: Option<*const bf16>, n: usize) -> [__m512i; P] {
        // SAFETY: the caller's promise; masked lanes are not read.
        let (x, y) = unsafe {
            (
                _mm256_maskz_loadu_epi16(mask16(n), even.cast()),
                odd.map_or(_mm256_setzero_si256(), |odd| _mm256_maskz_loadu_epi16(mask16(n), odd.cast())),
            )
        };
        [zipped(x, y); P]
    }
}

/// One tile a plane from `have` rows of words (the others are zero): as they lie if the tile wants them so, else
/// transposed.
///
/// # Safety
/// `dst` takes a tile at each multiple of `plane_stride`; the processor has AVX-512.
#[inline(always)]
unsafe fn store<const P: usize, const TRANSPOSED: bool>(
    have: usize,
    words: impl Fn(usize) -> [__m512i; P],
    plane_stride: usize,
    dst: *mut u8,
) {
    // SAFETY: rows of the planes' tiles.
    unsafe {
        let zero = _mm512_setzero_si512();
        if !TRANSPOSED {
            for i in 0..have {
                for (plane, word) in words(i).into_iter().enumerate() {
                    _mm512_store_si512(dst.add(plane * plane_stride + i * 64).cast(), word);
                }
            }
            for i in have..16 {
                (0..P).for_each(|plane| _mm512_store_si512(dst.add(plane * plane_stride + i * 64).cast(), zero));
            }
            return;
        }
        let mut all: Words<P> = [[zero; 16]; P];
        for i in 0..have {
            for (plane, word) in words(i).into_iter().enumerate() {
                all[plane][i] = word;
            }
        }
        for (plane, words) in all.iter().enumerate() {
            let mut rows = [_mm512_setzero_ps(); 16];
            for i in 0..16 {
                rows[i] = _mm512_castsi512_ps(words[i]);
            }
            for (i, row) in transpose16(rows).into_iter().enumerate() {
                _mm512_store_ps(dst.add(plane * plane_stride + i * 64).cast(), row);
            }
        }
    }
}

/// Calls `$f` with the number of planes and the direction as constants.
macro_rules! with_constants {
    ($f:ident::<$e:ty>($planes:expr, $transposed:expr)($($arg:expr),*)) => {
        match ($planes, $transposed) {
            (1, false) => $f::<$e, 1, false>($($arg),*),
            (1, true) => $f::<$e, 1, true>($($arg),*),
            (2, false) => $f::<$e, 2, false>($($arg),*),
            (2, true) => $f::<$e, 2, true>($($arg),*),
            (_, false) => $f::<$e, 3, false>($($arg),*),
            (_, true) => $f::<$e, 3, true>($($arg),*),
        }
    };
}

/// Packs a panel of a few tiles whose source runs along k: row i at i·`ld`. `by_rows`: tiles of A. While the step at p is packed, what lies p
/// behind `ahead` is asked for.
///
/// # Safety
/// The source covers `rows` rows of `k` elements; `dst` takes `width` (a multiple of 16) times `k` rounded up to 32, in all planes,
/// and is aligned to 64 bytes; the processor has AVX-512 with BF16.
pub(super) unsafe fn across<E: Element>(
    src: *const E,
    ld: usize,
    rows: usize,
    k: usize,
    width: usize,
    planes: usize,
    by_rows: bool,
    ahead: *const E,
    dst: *mut u8,
) {
    // SAFETY: the caller's promise.
    unsafe { with_constants!(across_planes::<E>(planes, !by_rows)(src, ld, rows, k, width, ahead, dst)) }
}

/// # Safety
/// As [`across`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn across_planes<E: Element, const P: usize, const TRANSPOSED: bool>(
    src: *const E,
    ld: usize,
    rows: usize,
    k: usize,
    width: usize,
    ahead: *const E,
    dst: *mut u8,
) {
    let tiles = width / 16;
    let (plane_stride, step_stride) = (tiles * TILE, P * tiles * TILE);
    for tile in 0..tiles {
        let have = rows.saturating_sub(tile * 16).min(16);
        let from = src.wrapping_add(tile * 16 * ld);
        for (step, p) in (0..k).step_by(STEP).enumerate() {
            let row = |i: usize| {
                // SAFETY: row i of the source, steps p.. as far as there are.
                unsafe {
                    prefetch(ahead.wrapping_add((tile * 16 + i) * ld + p));
                    E::run::<P>(from.add(i * ld + p), k - p)
                }
            };
            let at = step * step_stride + tile * TILE;
            // SAFETY: this tile's place in each plane of this step.
            unsafe { store::<P, TRANSPOSED>(have, row, plane_stride, dst.add(at)) };
        }
    }
}

/// How far ahead in each row memory is asked for.
pub(super) const AHEAD_BYTES: usize = 512;

/// So far ahead in the same row.
pub(super) fn ahead<E>(at: *const E) -> *const E {
    at.wrapping_byte_add(AHEAD_BYTES)
}

/// Asks for the 32 elements at `at`, which need not exist.
#[inline]
pub(super) fn prefetch<E>(at: *const E) {
    for line in 0..STEP * size_of::<E>() / 64 {
        // SAFETY: a hint only.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_byte_add(line * 64).cast()) };
    }
}

/// Packs a block whose source runs across the panels: step p at p·`ld`.
///
/// # Safety
/// As [`across`], for `count` rows in panels of `panel`, the last one rounded up to `lanes`.
pub(super) unsafe fn along<E: Element>(
    src: *const E,
    ld: usize,
    count: usize,
    k: usize,
    panel: usize,
    lanes: usize,
    planes: usize,
    by_rows: bool,
    dst: *mut u8,
) {
    // SAFETY: the caller's promise.
    unsafe { with_constants!(along_planes::<E>(planes, by_rows)(src, ld, count, k, panel, lanes, dst)) }
}

/// # Safety
/// As [`along`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn along_planes<E: Element, const P: usize, const TRANSPOSED: bool>(
    src: *const E,
    ld: usize,
    count: usize,
    k: usize,
    panel: usize,
    lanes: usize,
    dst: *mut u8,
) {
    let padded = k.next_multiple_of(STEP);
    for (step, p) in (0..k).step_by(STEP).enumerate() {
        for i in (0..count).step_by(16) {
            let first = i / panel * panel;
            let width = panel.min(count - first).next_multiple_of(lanes);
            let tiles = width / 16;
            let both = |pair: usize| {
                // SAFETY: two steps of the source, as far as there are; columns i.. as far as there are.
                unsafe {
                    let even = src.add((p + 2 * pair) * ld + i);
                    let odd = (p + 2 * pair + 1 < k).then(|| even.add(ld));
                    _mm_prefetch::<_MM_HINT_T0>(even.wrapping_add(STEP * ld).cast());
                    _mm_prefetch::<_MM_HINT_T0>(even.wrapping_add((STEP + 1) * ld).cast());
                    E::pair::<P>(even, odd, count - i)
                }
            };
            let pairs = (k - p).min(STEP).div_ceil(2);
            // Two bytes a value and plane; the panels before are whole.
            let at = 2 * P * first * padded + step * P * tiles * TILE + (i - first) / 16 * TILE;
            // SAFETY: this tile's place in each plane of this step.
            unsafe { store::<P, TRANSPOSED>(pairs, both, tiles * TILE, dst.add(at)) };
        }
    }
}
