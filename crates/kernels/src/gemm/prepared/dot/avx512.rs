//! With AVX-512 VNNI: one `vpdpbusd` multiplies four values of sixteen outputs.

use std::arch::x86_64::*;

use super::{BLOCK, Form, Grid, LANES, Work, scale};

/// Rows of x at a time: as many sums of integers and of f32, and what is left holds weights and scales.
pub(super) const ROWS: usize = 12;

/// How far ahead weights are asked for, in bytes. Panels follow each other, scales first: asking at scales and at quanta leaves no gap.
const AHEAD: usize = 4096;

/// # Safety
/// As [`Work::run`]; the processor has AVX-512 VNNI.
pub(super) unsafe fn run(work: &Work<'_>, form: Form, y: *mut f32) {
    macro_rules! rows {
        ($($m:literal)*) => {
            match (work.m, form) {
                $(($m, Form::Q8) => eight::<$m>(work, y),)*
                $(($m, _) => four::<$m>(work, y),)*
                _ => unreachable!("at most {ROWS} rows"),
            }
        };
    }
    // SAFETY: the caller's promise, with the rows as a constant.
    unsafe { rows!(1 2 3 4 5 6 7 8 9 10 11 12) }
}

/// The scalars of a block of M rows.
///
/// # Safety
/// The block has M rows.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn scalar<const M: usize>(block: *const f32, which: usize, row: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_set1_ps(*block.add((BLOCK / 4 + which) * M + row)) }
}

/// # Safety
/// As [`run`], with M rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn eight<const M: usize>(work: &Work<'_>, y: *mut f32) {
    let mut sums = [_mm512_setzero_ps(); M];
    // SAFETY: `blocks` blocks of scales, quanta and rows of x, as the caller promises.
    unsafe {
        for b in 0..work.blocks {
            let block = work.x.as_ptr().add(b * M * super::ROOM);
            let quanta = work.quanta.as_ptr().add(b * BLOCK * LANES);
            let mut whole = [_mm512_setzero_si512(); M];
            for i in 0..M {
                whole[i] = _mm512_castps_si512(scalar::<M>(block, 2, i));
            }
            for step in 0..BLOCK / 4 {
                _mm_prefetch::<_MM_HINT_T0>(quanta.wrapping_add(step * 64 + AHEAD).cast());
                let w = _mm512_loadu_si512(quanta.add(step * 64).cast());
                for i in 0..M {
                    let x = _mm512_set1_epi32((*block.add(step * M + i)).to_bits() as i32);
                    whole[i] = _mm512_dpbusd_epi32(whole[i], w, x);
                }
            }
            let scales = work.scales.as_ptr().add(b * 2 * LANES);
            _mm_prefetch::<_MM_HINT_T0>(scales.wrapping_add(AHEAD).cast());
            let d = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
            for i in 0..M {
                let scale = _mm512_mul_ps(d, scalar::<M>(block, 0, i));
                sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[i]), scale, sums[i]);
            }
        }
        store(work, sums, y);
    }
}

/// # Safety
/// As [`run`], with M rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn four<const M: usize>(work: &Work<'_>, y: *mut f32) {
    let mut sums = [_mm512_setzero_ps(); M];
    let nibble = _mm512_set1_epi8(0xF);
    // SAFETY: `blocks` blocks of scales, quanta and rows of x, as the caller promises.
    unsafe {
        for b in 0..work.blocks {
            let block = work.x.as_ptr().add(b * M * super::ROOM);
            let quanta = work.quanta.as_ptr().add(b * BLOCK / 2 * LANES);
            let mut whole = [_mm512_setzero_si512(); M];
            for step in 0..BLOCK / 8 {
                _mm_prefetch::<_MM_HINT_T0>(quanta.wrapping_add(step * 64 + AHEAD).cast());
                let w = _mm512_loadu_si512(quanta.add(step * 64).cast());
                let halves = [_mm512_and_si512(w, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(w), nibble)];
                for (half, w) in halves.into_iter().enumerate() {
                    for i in 0..M {
                        let at = block.add((step + half * BLOCK / 8) * M + i);
                        whole[i] = _mm512_dpbusd_epi32(whole[i], w, _mm512_set1_epi32((*at).to_bits() as i32));
                    }
                }
            }
            let scales = work.scales.as_ptr().add(b * 4 * LANES);
            _mm_prefetch::<_MM_HINT_T0>(scales.wrapping_add(AHEAD).cast());
            let d = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
            let m = _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(2 * LANES).cast()));
            for i in 0..M {
                let scale = _mm512_mul_ps(d, scalar::<M>(block, 0, i));
                let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[i]), scale, sums[i]);
                sums[i] = _mm512_fmadd_ps(m, scalar::<M>(block, 1, i), sum);
            }
        }
        store(work, sums, y);
    }
}

/// # Safety
/// As [`run`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const M: usize>(work: &Work<'_>, sums: [__m512; M], y: *mut f32) {
    let keep: __mmask16 = if work.n >= LANES { !0 } else { (1 << work.n) - 1 };
    for (i, sum) in sums.into_iter().enumerate() {
        // SAFETY: M rows of `n` elements.
        unsafe { _mm512_mask_storeu_ps(y.add(i * work.ldc), keep, sum) };
    }
}

/// # Safety
/// The processor has AVX-512 VNNI; `out` has ROOM for every block of every row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn quantise_rows(x: &[f32], rows: usize, out: &mut [f32]) {
    let (grid, k) = (Grid { rows }, x.len() / rows);
    for row in 0..rows {
        for b in 0..k.div_ceil(BLOCK) {
            let n = (k - b * BLOCK).min(BLOCK);
            let keep: u32 = if n == BLOCK { !0 } else { (1 << n) - 1 };
            // SAFETY: the masks keep to the row.
            let (low, high) = unsafe {
                let at = x.as_ptr().add(row * k + b * BLOCK);
                (
                    _mm512_maskz_loadu_ps(keep as u16, at),
                    _mm512_maskz_loadu_ps((keep >> 16) as u16, at.wrapping_add(16)),
                )
            };
            // Of magnitudes, the bits are in the same order as the values, infinity and NaN above all.
            let bits = |v: __m512| _mm512_castps_si512(_mm512_abs_ps(v));
            let (d, inverse) = scale(f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(bits(low), bits(high)))));
            let inverse = _mm512_set1_ps(inverse);
            let whole = |v: __m512| {
                // Infinity times zero is NaN: it becomes 0, as in plain code.
                let v = _mm512_mul_ps(v, inverse);
                _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v), v)
            };
            let (low, high) = (whole(low), whole(high));
            let sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
            let mut quanta = [0u32; BLOCK / 4];
            // SAFETY: 16 bytes each, of 32.
            unsafe {
                let at = quanta.as_mut_ptr().cast::<u8>();
                _mm_storeu_si128(at.cast(), _mm512_cvtepi32_epi8(low));
                _mm_storeu_si128(at.add(16).cast(), _mm512_cvtepi32_epi8(high));
            }
            for (step, q) in quanta.into_iter().enumerate() {
                out[grid.quantum(b, step, row)] = f32::from_bits(q);
            }
            out[grid.scalar(b, 0, row)] = d;
            out[grid.scalar(b, 1, row)] = d * sum as f32;
            out[grid.scalar(b, 2, row)] = f32::from_bits((-128 * sum) as u32);
        }
    }
}
