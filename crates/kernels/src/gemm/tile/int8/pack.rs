//! Quantising while packing, with AVX-512: sixteen rows at a time, scales and codes in one visit.

use std::arch::x86_64::*;

use super::{BLOCK, ROW, TINY, WORDS, raised};
use crate::gemm::tile::avx512::lanes;
use crate::gemm::tile::avx512::pack::{Element, transpose16};
use crate::gemm::tile::{Form, Noise, Side};
use crate::lowp::Keys;

/// Codes of sixteen rows of a stretch.
#[repr(align(64))]
struct Codes([[u8; BLOCK]; 16]);

/// # Safety
/// As [`Tile::pack_across`].
///
/// [`Tile::pack_across`]: crate::gemm::tile::Tile::pack_across
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn across<E: Element>(
    src: *const E,
    ld: usize,
    rows: usize,
    k: usize,
    width: usize,
    form: Form,
    dst: *mut f32,
) {
    let mut codes = Codes([[0; BLOCK]; 16]);
    for (block, p0) in (0..k).step_by(BLOCK).enumerate() {
        let steps = BLOCK.min(k - p0);
        let panel = Stretch { at: dst.wrapping_add(block * ROW * width), width, side: form.side };
        for i in (0..width).step_by(16) {
            let have = rows.saturating_sub(i).min(16);
            let mut amax = [0f32; 16];
            for q in 0..have {
                // SAFETY: row i + q of the source, of which the masks keep `steps` values.
                unsafe {
                    let row = src.add((i + q) * ld + p0);
                    prefetch(row, ld * width.min(16), p0, k);
                    let mut x = [_mm512_setzero_ps(); BLOCK / 16];
                    for (v, x) in x.iter_mut().enumerate() {
                        *x = E::widen(row.wrapping_add(16 * v), lanes(steps.saturating_sub(16 * v)));
                    }
                    amax[q] = match form.scales {
                        Some(s) => s.amax(i + q, p0),
                        None => {
                            let most = x.iter().fold(_mm512_setzero_si512(), |most, &x| greater(most, x));
                            f32::from_bits(_mm512_reduce_max_epu32(most))
                        }
                    };
                    let to_code = _mm512_set1_ps(super::factors(amax[q]).0);
                    for (v, &x) in x.iter().enumerate() {
                        let x = _mm512_mul_ps(x, to_code);
                        let code = match form.noise {
                            None => _mm512_cvtps_epi32(x),
                            Some(n) => {
                                let at = n.at + (i + q) * ld + p0 + 16 * v;
                                _mm512_maskz_mov_epi32(lanes(steps.saturating_sub(16 * v)), at_random(x, n.keys, at))
                            }
                        };
                        _mm_storeu_si128(codes.0[q].as_mut_ptr().add(16 * v).cast(), _mm512_cvtepi32_epi8(code));
                    }
                }
            }
            codes.0[have..].iter_mut().for_each(|row| row.fill(0));
            // SAFETY: lanes i..i+16 of the panel's stretch, as far as it is wide.
            unsafe {
                let (_, scale) = factors(_mm512_loadu_ps(amax.as_ptr()));
                let mut sum = _mm512_setzero_si512();
                if width == 8 {
                    // Both halves of eight rows go through one transpose.
                    let mut r = [_mm512_setzero_ps(); 16];
                    for (q, r) in r.iter_mut().enumerate() {
                        *r = _mm512_load_ps(codes.0[q % 8].as_ptr().add(q / 8 * 64).cast());
                    }
                    for (w, t) in transpose16(r).into_iter().enumerate() {
                        let t = _mm512_castps_si512(t);
                        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), t);
                        panel.store8(w, 0, _mm512_castsi512_si256(t));
                        panel.store8(w + 16, 0, _mm512_extracti64x4_epi64::<1>(t));
                    }
                    let both = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64::<1>(sum));
                    panel.finish(0, 0xFF, scale, _mm512_castsi256_si512(both));
                    continue;
                }
                for half in 0..2 {
                    let mut r = [_mm512_setzero_ps(); 16];
                    for (q, r) in r.iter_mut().enumerate() {
                        *r = _mm512_load_ps(codes.0[q].as_ptr().add(half * 64).cast());
                    }
                    for (w, t) in transpose16(r).into_iter().enumerate() {
                        let t = _mm512_castps_si512(t);
                        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), t);
                        panel.store(half * 16 + w, i, lanes(width - i), t);
                    }
                }
                panel.finish(i, lanes(width - i), scale, sum);
            }
        }
    }
}

/// Asks for what comes one stretch later in this row, or, at its end, in the row `below` elements on.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<E>(row: *const E, below: usize, p0: usize, k: usize) {
    let from = if p0 + BLOCK < k { row.wrapping_add(BLOCK) } else { row.wrapping_add(below).wrapping_sub(p0) };
    for line in 0..BLOCK * size_of::<E>() / 64 {
        _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(64 * line));
    }
}

/// # Safety
/// As [`Tile::pack_along`].
///
/// [`Tile::pack_along`]: crate::gemm::tile::Tile::pack_along
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn along<E: Element>(
    src: *const E,
    ld: usize,
    count: usize,
    k: usize,
    (panel, multiple): (usize, usize),
    form: Form,
    dst: *mut f32,
) {
    let stretches = k.div_ceil(BLOCK);
    // Columns in strips of sixteen that no panel's edge cuts, but for full panels of eight, which come in pairs.
    let strips = |from: usize, to: usize, visit: &mut dyn FnMut(usize, usize)| {
        let mut i = from;
        while i < to {
            let end = if panel == 8 && i + 16 <= count { i + 16 } else { count.min((i / panel + 1) * panel) };
            visit(i, end.min(i + 16));
            i = end.min(i + 16);
        }
    };
    for (block, p0) in (0..k).step_by(BLOCK).enumerate() {
        let steps = BLOCK.min(k - p0);
        for from in (0..count).step_by(GROUP) {
            let to = count.min(from + GROUP);
            let mut amax = [0f32; GROUP];
            // SAFETY: rows p0..p0+steps of columns from..to, and the panels' stretches of those columns.
            unsafe {
                let rows = src.add(p0 * ld);
                match form.scales {
                    Some(s) => (from..to).for_each(|i| amax[i - from] = s.amax(i, p0)),
                    None => greatest(rows.add(from), ld, to - from, steps, &mut amax),
                }
                strips(from, to, &mut |i, end| {
                    let first = i / panel * panel;
                    let width = if first + panel <= count { panel } else { (count - first).next_multiple_of(multiple) };
                    let at = |first: usize| dst.wrapping_add(ROW * (first * stretches + block * width));
                    let stretch = Stretch { at: at(first), width, side: form.side };
                    let keep = lanes(end - i);
                    let amax = _mm512_maskz_loadu_ps(keep, amax.as_ptr().add(i - from));
                    let (to_code, scale) = factors(amax);
                    let pair = (panel == 8 && end - i == 16).then(|| Stretch { at: at(first + 8), ..stretch });
                    let mut sum = _mm512_setzero_si512();
                    let noise = |p: usize| form.noise.map(|n| Noise { at: n.at + (p0 + p) * ld + i, ..n });
                    for w in 0..WORDS {
                        let mut word = _mm512_setzero_si512();
                        if 4 * w + 4 <= steps {
                            word = codes_of(rows.add(4 * w * ld + i), ld, 4, keep, to_code, noise(4 * w));
                        } else if 4 * w < steps {
                            word = codes_of(rows.add(4 * w * ld + i), ld, steps - 4 * w, keep, to_code, noise(4 * w));
                        }
                        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), word);
                        match &pair {
                            Some(second) => {
                                stretch.store8(w, 0, _mm512_castsi512_si256(word));
                                second.store8(w, 0, _mm512_extracti64x4_epi64::<1>(word));
                            }
                            None => stretch.store(w, i - first, lanes(width - (i - first)), word),
                        }
                    }
                    match &pair {
                        Some(second) => {
                            stretch.finish(0, 0xFF, scale, sum);
                            let high = _mm512_castps256_ps512(_mm512_extractf32x8_ps::<1>(scale));
                            let high_sum = _mm512_castsi256_si512(_mm512_extracti64x4_epi64::<1>(sum));
                            second.finish(0, 0xFF, high, high_sum);
                        }
                        None => stretch.finish(i - first, lanes(width - (i - first)), scale, sum),
                    }
                });
            }
        }
    }
}

/// Columns whose greatest magnitudes are found together, so that memory rows are read in long pieces: four panels of 48.
const GROUP: usize = 192;

/// The greatest magnitude of each of `count` columns over `steps` rows.
///
/// # Safety
/// The source has them; count ≤ GROUP.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn greatest<E: Element>(src: *const E, ld: usize, count: usize, steps: usize, amax: &mut [f32; GROUP]) {
    let mut most = [_mm512_setzero_si512(); GROUP / 16];
    for p in 0..steps {
        let row = src.wrapping_add(p * ld);
        for (v, most) in most.iter_mut().enumerate().take(count.div_ceil(16)) {
            _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(8 * ld + 16 * v).cast());
            // SAFETY: the mask keeps to the row's columns.
            *most = greater(*most, unsafe { E::widen(row.wrapping_add(16 * v), lanes(count - 16 * v)) });
        }
    }
    for (v, most) in most.into_iter().enumerate() {
        // SAFETY: sixteen places of the array.
        unsafe { _mm512_storeu_si512(amax.as_mut_ptr().add(16 * v).cast(), most) };
    }
}

/// Raises `amax` to the greatest magnitude of each block of a row.
///
/// # Safety
/// The row has `columns` elements, `amax` a place for each block; the processor has AVX-512 F, BW, VL and DQ.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn greatest_of_blocks<E: Element>(row: *const E, columns: usize, amax: &mut [f32]) {
    for (block, amax) in amax.iter_mut().enumerate() {
        let mut most = _mm512_setzero_si512();
        for i in (block * BLOCK..columns.min((block + 1) * BLOCK)).step_by(16) {
            // SAFETY: the mask keeps to the row.
            most = greater(most, unsafe { E::widen(row.wrapping_add(i), lanes(columns - i)) });
        }
        *amax = f32::from_bits(amax.to_bits().max(_mm512_reduce_max_epu32(most)));
    }
}

/// The greater magnitude in each lane, by the bits, so that NaN is the greatest.
#[inline]
#[target_feature(enable = "avx512f")]
fn greater(most: __m512i, x: __m512) -> __m512i {
    _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFF_FFFF)))
}

/// [`factors`](super::factors) of sixteen.
#[inline]
#[target_feature(enable = "avx512f")]
fn factors(amax: __m512) -> (__m512, __m512) {
    let tiny = _mm512_castps_si512(_mm512_set1_ps(TINY));
    let amax = _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(amax), tiny));
    let most = _mm512_set1_ps(127.0);
    (_mm512_div_ps(most, amax), _mm512_div_ps(amax, most))
}

/// The codes of up to four rows of sixteen, a word a lane.
///
/// # Safety
/// `rows` rows at stride `ld`, of which the mask keeps to what may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn codes_of<E: Element>(
    src: *const E,
    ld: usize,
    rows: usize,
    keep: __mmask16,
    to_code: __m512,
    noise: Option<Noise>,
) -> __m512i {
    let byte = _mm512_set1_epi32(0xFF);
    let mut word = _mm512_setzero_si512();
    for q in (0..rows).rev() {
        // SAFETY: the caller's promise.
        let x = unsafe { E::widen(src.add(q * ld), keep) };
        let x = _mm512_mul_ps(x, to_code);
        let code = match noise {
            None => _mm512_cvtps_epi32(x),
            Some(n) => _mm512_maskz_mov_epi32(keep, at_random(x, n.keys, n.at + q * ld)),
        };
        // (word << 8) | (code & 0xFF)
        word = _mm512_ternarylogic_epi32::<0xF8>(_mm512_slli_epi32::<8>(word), code, byte);
    }
    word
}

/// Rounds sixteen scaled values, from place `at` on, up or down at random: [`Keys::share`] in vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn at_random(x: __m512, keys: Keys, at: usize) -> __m512i {
    let mix = |x: __m512i| {
        let x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32::<16>(x)), _mm512_set1_epi32(0x21F0_AAAD));
        let x = _mm512_xor_si512(x, _mm512_srli_epi32::<15>(x));
        let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0xD35A_2D97_u32 as i32));
        _mm512_xor_si512(x, _mm512_srli_epi32::<15>(x))
    };
    let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let place = _mm512_add_epi32(_mm512_set1_epi32(at as i32), lane);
    let upper = _mm512_set1_epi32(crate::lowp::mix(keys.1) as i32);
    let bits = mix(_mm512_xor_si512(mix(_mm512_xor_si512(place, _mm512_set1_epi32(keys.0 as i32))), upper));
    let share = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32::<16>(bits)), _mm512_set1_ps(1.0 / 65536.0));
    let x = _mm512_min_ps(_mm512_roundscale_ps::<0x09>(_mm512_add_ps(x, share)), _mm512_set1_ps(127.0));
    _mm512_cvtps_epi32(x)
}

/// A stretch of a panel, being written.
#[derive(Clone, Copy)]
struct Stretch {
    at: *mut f32,
    width: usize,
    side: Side,
}

impl Stretch {
    /// Word `w` of the kept rows from `i` on.
    ///
    /// # Safety
    /// They lie in the panel.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(&self, w: usize, i: usize, keep: __mmask16, word: __m512i) {
        let word = _mm512_xor_si512(word, _mm512_set1_epi8(raised(self.side) as i8));
        // SAFETY: the caller's promise.
        unsafe { _mm512_mask_storeu_epi32(self.at.add(w * self.width + i).cast(), keep, word) }
    }

    /// Word `w` of eight rows from `i` on.
    ///
    /// # Safety
    /// They lie in the panel.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl")]
    unsafe fn store8(&self, w: usize, i: usize, word: __m256i) {
        let word = _mm256_xor_si256(word, _mm256_set1_epi8(raised(self.side) as i8));
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(self.at.add(w * self.width + i).cast(), word) }
    }

    /// Scales and sums of the kept rows from `i` on.
    ///
    /// # Safety
    /// They lie in the panel.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn finish(&self, i: usize, keep: __mmask16, scale: __m512, sum: __m512i) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm512_mask_storeu_ps(self.at.add(WORDS * self.width + i), keep, scale);
            let back = _mm512_slli_epi32::<7>(_mm512_sub_epi32(_mm512_setzero_si512(), sum));
            _mm512_mask_storeu_epi32(self.at.add((WORDS + 1) * self.width + i).cast(), keep, back);
        }
    }
}
