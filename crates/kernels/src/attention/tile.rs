//! The tile level: small products held in registers.
//!
//! All five products of attention have one form: C[m, w] += A[m, len] · B[len, w], where C and B are read in vectors along w and
//! A is broadcast value by value from wherever it lies (two strides). Every element is one chain of multiply-adds over len in
//! order, whatever tile it falls into.

use crate::simd::Simd;

/// A in a product: element (i, l) is at `ptr + i·row + l·step`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) ptr: *const f32,
    pub(super) row: usize,
    pub(super) step: usize,
}

/// What the chains start from.
#[derive(Clone, Copy)]
pub(super) enum Start {
    /// Zero: C is overwritten.
    Zero,
    /// C.
    Sum,
    /// C times a factor for each column.
    Scaled(*const f32),
}

/// C[m, N·LANES] from A[m, len] and B[len, N·LANES]; rows of B and C are `ldb` and `ldc` apart.
///
/// # Safety
/// All of A, B and C (and the factors) must be there.
#[inline(always)]
pub(super) unsafe fn product<S: Simd, const N: usize>(
    s: S,
    m: usize,
    len: usize,
    a: Left,
    (b, ldb): (*const f32, usize),
    (c, ldc): (*mut f32, usize),
    start: Start,
) {
    let mut i = 0;
    // SAFETY: every tile lies within the first m rows, which the caller promises.
    unsafe {
        macro_rules! tiles {
            ($($rows:literal),*) => {{$(
                while m - i >= $rows {
                    let a = Left { ptr: a.ptr.add(i * a.row), ..a };
                    tile::<S, $rows, N>(s, len, a, (b, ldb), (c.add(i * ldc), ldc), start);
                    i += $rows;
                }
            )*}};
        }
        // As many rows as the registers hold beside a row of B and one value of A.
        match (S::LANES, N) {
            (16, 1) => tiles!(16, 4, 1),
            (16, 2) => tiles!(12, 4, 1),
            (16, 3) => tiles!(8, 4, 1),
            (16, _) => tiles!(6, 2, 1),
            (_, 1) => tiles!(8, 4, 1),
            (_, 2) => tiles!(6, 2, 1),
            (_, 3) => tiles!(4, 1),
            (_, _) => tiles!(3, 1),
        }
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, const M: usize, const N: usize>(
    s: S,
    len: usize,
    a: Left,
    (b, ldb): (*const f32, usize),
    (c, ldc): (*mut f32, usize),
    start: Start,
) {
    let mut acc = [[s.splat(0.0); N]; M];
    // SAFETY: the caller of `product` promises A, B and C.
    unsafe {
        match start {
            Start::Zero => {}
            Start::Sum => {
                for i in 0..M {
                    for n in 0..N {
                        acc[i][n] = s.load_ptr(c.add(i * ldc + n * S::LANES));
                    }
                }
            }
            Start::Scaled(factor) => {
                for n in 0..N {
                    let f = s.load_ptr(factor.add(n * S::LANES));
                    for i in 0..M {
                        acc[i][n] = s.mul(s.load_ptr(c.add(i * ldc + n * S::LANES)), f);
                    }
                }
            }
        }
        let (mut pa, mut pb) = (a.ptr, b);
        for _ in 0..len {
            let mut row = [s.splat(0.0); N];
            for n in 0..N {
                row[n] = s.load_ptr(pb.add(n * S::LANES));
            }
            for i in 0..M {
                let v = s.splat(*pa.add(i * a.row));
                for n in 0..N {
                    acc[i][n] = s.fma(v, row[n], acc[i][n]);
                }
            }
            pa = pa.wrapping_add(a.step);
            pb = pb.wrapping_add(ldb);
        }
        for i in 0..M {
            for n in 0..N {
                s.store_ptr(c.add(i * ldc + n * S::LANES), acc[i][n]);
            }
        }
    }
}

/// As [`product`] for `columns` (a multiple of LANES) of any number, four vectors at a time.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn wide_product<S: Simd>(
    s: S,
    m: usize,
    len: usize,
    a: Left,
    (b, ldb): (*const f32, usize),
    (c, ldc): (*mut f32, usize),
    columns: usize,
    start: Start,
) {
    let mut j = 0;
    // SAFETY: columns j.. of B and C are there as the caller promises.
    unsafe {
        macro_rules! strips {
            ($($n:literal),*) => {{$(
                while columns - j >= $n * S::LANES {
                    product::<S, $n>(s, m, len, a, (b.add(j), ldb), (c.add(j), ldc), start);
                    j += $n * S::LANES;
                }
            )*}};
        }
        strips!(4, 2, 1);
    }
}
