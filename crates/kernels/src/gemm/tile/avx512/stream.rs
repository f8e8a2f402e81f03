//! A few rows of A against B stored along k, as in decoding: B goes from memory through a transpose in registers straight into
//! the multiply-adds, and nothing of it is written anywhere.
//!
//! Sixteen columns at a time, the whole of k: sixteen long sequential streams, which is what memory likes best.

use std::arch::x86_64::*;

use super::lanes;
use super::pack::{Element, prefetch_rows, transpose16};

/// The most rows that fit in registers beside the sixteen columns.
pub(super) const ROWS: usize = 8;

/// # Safety
/// As [`Tile::stream`].
///
/// [`Tile::stream`]: crate::gemm::tile::Tile::stream
pub(super) unsafe fn stream<E: Element>(
    (m, n, k): (usize, usize, usize),
    a: *const f32,
    b: *const E,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    for j in (0..n).step_by(16) {
        let n = (n - j).min(16);
        // SAFETY: the caller's promise, for these columns, with the number of rows as a constant.
        unsafe {
            let (b, c) = (b.add(j * ldb), c.add(j));
            match m {
                1 => columns::<E, 1>(n, k, a, b, ldb, c, ldc, from_c),
                2 => columns::<E, 2>(n, k, a, b, ldb, c, ldc, from_c),
                3 => columns::<E, 3>(n, k, a, b, ldb, c, ldc, from_c),
                4 => columns::<E, 4>(n, k, a, b, ldb, c, ldc, from_c),
                5 => columns::<E, 5>(n, k, a, b, ldb, c, ldc, from_c),
                6 => columns::<E, 6>(n, k, a, b, ldb, c, ldc, from_c),
                7 => columns::<E, 7>(n, k, a, b, ldb, c, ldc, from_c),
                _ => columns::<E, 8>(n, k, a, b, ldb, c, ldc, from_c),
            }
        }
    }
}

/// # Safety
/// As [`stream`], with `m` = `M` and `n` ≤ 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn columns<E: Element, const M: usize>(
    n: usize,
    k: usize,
    a: *const f32,
    b: *const E,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let lane_steps = 16 * E::PER_LANE;
    let mut acc = [_mm512_setzero_ps(); M];
    // SAFETY: C has M rows of n, which the mask keeps to; B has n rows of k; A is one panel of k steps of M.
    unsafe {
        if from_c {
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_maskz_loadu_ps(lanes(n), c.add(i * ldc));
            }
        }
        let mut p = 0;
        if n == 16 {
            while p + lane_steps <= k {
                prefetch_rows::<E, 16>(b, ldb, p, k);
                let mut r = [_mm512_setzero_ps(); 16];
                for (q, r) in r.iter_mut().enumerate() {
                    *r = E::raw(b.add(q * ldb + p));
                }
                let t = transpose16(r);
                for q in 0..16 {
                    for s in 0..E::PER_LANE {
                        add_step(&mut acc, a.add((p + q * E::PER_LANE + s) * M), E::part(t[q], s));
                    }
                }
                p += lane_steps;
            }
        }
        while p < k {
            let steps = (k - p).min(lane_steps);
            let mut r = [_mm512_setzero_ps(); 16];
            for (q, r) in r.iter_mut().enumerate().take(n) {
                *r = E::raw_part(b.add(q * ldb + p), steps);
            }
            let t = transpose16(r);
            for step in 0..steps {
                let v = E::part(t[step / E::PER_LANE], step % E::PER_LANE);
                add_step(&mut acc, a.add((p + step) * M), v);
            }
            p += steps;
        }
        for (i, acc) in acc.iter().enumerate() {
            _mm512_mask_storeu_ps(c.add(i * ldc), lanes(n), *acc);
        }
    }
}

/// One step of k for all rows.
///
/// # Safety
/// `a` holds M values.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_step<const M: usize>(acc: &mut [__m512; M], a: *const f32, b: __m512) {
    for (i, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *acc = _mm512_fmadd_ps(unsafe { _mm512_set1_ps(*a.add(i)) }, b, *acc);
    }
}
