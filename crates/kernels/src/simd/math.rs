//! Functions of a vector: exponential, sigmoid, the normal distribution. Every lane is a function of its own value alone.

use super::Simd;

/// eˣ within 2 units in the last place, subnormal results included; e^−∞ = 0, overflow gives ∞, NaN stays NaN.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; the polynomial for e^r is a minimax fit (Remez, relative error 3e−9).
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // NaN is the second argument, which min and max keep.
    let x = s.min(s.splat(90.0), s.max(s.splat(-110.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first with few enough digits for n times it to be exact.
    let r = s.fnma(n, s.splat(355.0 / 512.0), x);
    let r = s.fnma(n, s.splat(-2.121_944_4e-4), r);
    let mut q = s.splat(1.381_436e-3);
    for c in [8.368_851e-3, 4.166_84e-2, 1.666_652e-1, 4.999_999_3e-1] {
        q = s.fma(q, r, s.splat(c));
    }
    let tail = s.fma(s.mul(r, r), q, r);
    s.scale_by_power(s.add(tail, s.splat(1.0)), n)
}

/// (sigmoid(x), 1 − sigmoid(x)), both to full relative accuracy.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let zero = s.splat(0.0);
    let e = exp(s, s.sub(zero, s.abs(x)));
    let large = s.div(s.splat(1.0), s.add(s.splat(1.0), e));
    let small = s.mul(e, large);
    (s.select_lt(x, zero, small, large), s.select_lt(x, zero, large, small))
}

/// (Φ(x), φ(x)) of the standard normal distribution.
///
/// For x < 0, Φ(x) = e^(−x²/2)·u·P(u) with u = 1/(1 + 0.35·|x|), where P is a minimax fit on |x| ≤ 14 (relative error 3e−8).
#[inline(always)]
pub(crate) fn normal<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    // Beyond 14.5 the exponential is zero.
    let a = s.min(s.splat(14.5), s.abs(x));
    let e = exp(s, s.mul(s.mul(a, a), s.splat(-0.5)));
    let u = s.div(s.splat(1.0), s.fma(a, s.splat(0.35), s.splat(1.0)));
    let mut p = s.splat(-0.029_145_878);
    for c in [
        0.143_971_47,
        -0.255_713_83,
        0.159_173_74,
        -0.023_109_587,
        0.105_507_92,
        0.119_832_89,
        0.139_861_87,
        0.139_621_4,
    ] {
        p = s.fma(p, u, s.splat(c));
    }
    let tail = s.mul(e, s.mul(u, p));
    let phi = s.mul(e, s.splat(0.398_942_3));
    (s.select_lt(x, s.splat(0.0), tail, s.sub(s.splat(1.0), tail)), phi)
}

/// Σ f(i) over the vectors that start at i = 0, LANES, 2·LANES, … < `n`, kept in four running sums that are added at the end.
/// `f` is also called with starts beyond `n` and must give zero there.
#[inline(always)]
pub(crate) fn sum_over<S: Simd>(s: S, n: usize, mut f: impl FnMut(usize, S::V) -> S::V) -> f32 {
    let zero = s.splat(0.0);
    let mut sum = [zero; 4];
    let mut i = 0;
    while i < n {
        sum[0] = f(i, sum[0]);
        sum[1] = f(i + S::LANES, sum[1]);
        sum[2] = f(i + 2 * S::LANES, sum[2]);
        sum[3] = f(i + 3 * S::LANES, sum[3]);
        i += 4 * S::LANES;
    }
    s.sum(s.add(s.add(sum[0], sum[1]), s.add(sum[2], sum[3])))
}
