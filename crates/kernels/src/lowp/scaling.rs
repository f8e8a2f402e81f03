//! How a tile's scale follows from the greatest magnitude in it.

use super::{Element, e8m0};

/// The rule that makes a tile's scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// amax / [`Element::target`], at least f32's smallest normal value.
    Amax,
    /// The same rounded up to a power of two: scaling then rounds nothing, and what comes back is exact in f32.
    PowerOfTwo,
    /// A power of two that fits in [`e8m0`], for MX formats.
    Mx(MxExponent),
    /// This scale whatever the values are: finite and above 0. For delayed scaling.
    Fixed(f32),
}

/// Which power of two an MX tile gets, where amax lies between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MxExponent {
    /// 2^⌈log₂(amax/max)⌉, as Transformer Engine: nothing saturates.
    Up,
    /// 2^(⌊log₂ amax⌋ − ⌊log₂ max⌋), as the OCP text: the greatest values may saturate, by less than 1/8 (E4M3, E5M2: amax
    /// whose mantissa is above 1.75).
    Floor,
}

/// What was seen in a tile: magnitudes as bits, which order as the magnitudes do and NaN after infinity.
#[derive(Clone, Copy, Default)]
pub(crate) struct Seen {
    /// The greatest finite magnitude.
    pub finite: u32,
    /// The greatest magnitude of all.
    pub any: u32,
}

/// The bits of infinity; what is greater is NaN.
pub(crate) const INF: u32 = 0x7F80_0000;

/// The magnitude of `x` as bits.
#[inline(always)]
pub(crate) fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

impl Seen {
    /// What is in the values of `rows`, where the greatest of all magnitudes is known to be `any`. Looks at them only if that is
    /// not finite, which is rare: so the usual pass takes one maximum and not two.
    #[inline(always)]
    pub(crate) fn new<'a>(any: u32, rows: impl Iterator<Item = &'a [f32]>) -> Seen {
        let finite = if any < INF { any } else { finite_amax(rows) };
        Seen { finite, any }
    }
}

#[cold]
fn finite_amax<'a>(rows: impl Iterator<Item = &'a [f32]>) -> u32 {
    rows.flatten().map(|&x| magnitude(x)).filter(|&m| m < INF).max().unwrap_or(0)
}

/// The greatest magnitude of all in `x`.
#[inline(always)]
pub(crate) fn any_amax(x: &[f32]) -> u32 {
    x.iter().fold(0, |most, &x| most.max(magnitude(x)))
}

impl Scaling {
    /// Whether the values must be looked at first.
    pub(crate) fn needs_amax(self, element: Element) -> bool {
        !matches!(self, Scaling::Fixed(_)) || !element.has_non_finite()
    }

    /// The scale of a tile.
    #[inline(always)]
    pub(crate) fn scale(self, element: Element, seen: Seen) -> f32 {
        if !element.has_non_finite() && seen.any >= INF {
            return f32::NAN;
        }
        let (amax, target) = (f32::from_bits(seen.finite), element.target());
        match self {
            Scaling::Fixed(scale) => scale,
            Scaling::Mx(_) if seen.any > INF => f32::NAN,
            Scaling::Mx(_) if seen.any == INF => e8m0::decode(0xFE),
            Scaling::Mx(MxExponent::Up) => e8m0::decode(exponent_up(seen.finite, target).clamp(0, 0xFE) as u8),
            Scaling::Mx(MxExponent::Floor) => e8m0::decode(exponent_floor(seen.finite, target).clamp(0, 0xFE) as u8),
            _ if seen.finite == 0 => 1.0,
            // Below the smallest normal value a scale would have too few bits, and its codes could overflow.
            Scaling::Amax => (amax / target).max(f32::MIN_POSITIVE),
            Scaling::PowerOfTwo => f32::from_bits((exponent_up(seen.finite, target).clamp(1, 0xFE) as u32) << 23),
        }
    }
}

/// ⌊log₂(amax)⌋ − ⌊log₂(target)⌋, biased by 127. Too small for subnormal amax by what it is below the smallest normal value,
/// which the clamp after it hides.
#[inline(always)]
fn exponent_floor(amax: u32, target: f32) -> i32 {
    (amax >> 23) as i32 - (target.to_bits() >> 23) as i32 + 127
}

/// ⌈log₂(amax/target)⌉, biased by 127, without rounding the quotient: the mantissas are compared.
#[inline(always)]
fn exponent_up(amax: u32, target: f32) -> i32 {
    exponent_floor(amax, target) + i32::from(amax & 0x7F_FFFF > target.to_bits() & 0x7F_FFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(scaling: Scaling, element: Element, x: f32) -> f32 {
        scaling.scale(element, Seen::new(magnitude(x), [&[x][..]].into_iter()))
    }

    /// The values named in Transformer Engine's conversion: zero, NaN, infinity.
    #[test]
    fn special_tiles() {
        use Element::*;
        for mx in [MxExponent::Up, MxExponent::Floor].map(Scaling::Mx) {
            let code = |x| e8m0::encode_up(scale(mx, E4M3, x));
            assert_eq!([0.0, -0.0, f32::NAN, f32::INFINITY, f32::MAX].map(code)[..4], [0, 0, 0xFF, 0xFE]);
            assert_eq!(code(f32::from_bits(1)), 0);
        }
        for s in [Scaling::Amax, Scaling::PowerOfTwo] {
            for e in [E4M3, E5M2, Fp16, Int8] {
                assert_eq!(scale(s, e, -0.0), 1.0);
                assert!(scale(s, e, f32::from_bits(1)) >= f32::MIN_POSITIVE);
                let not_a_number = [f32::NAN, f32::INFINITY].map(|x| scale(s, e, x).is_nan());
                assert_eq!(not_a_number, [e == Int8; 2]);
            }
        }
    }

    #[test]
    fn powers_of_two_are_the_least_that_fit() {
        use Element::*;
        for e in [E4M3, E5M2, Fp16, Int8] {
            for k in -100..100 {
                let just = e.target() * 2f32.powi(k);
                let above = f32::from_bits(just.to_bits() + 1);
                for (x, want) in [(just, k), (-just, k), (above, k + 1)] {
                    let got = [Scaling::PowerOfTwo, Scaling::Mx(MxExponent::Up)].map(|s| scale(s, e, x));
                    assert_eq!(got, [2f32.powi(want); 2], "{e:?}: {x}");
                }
            }
        }
        // OCP rounds down: 1.9·2⁸ is past 448 and saturates.
        assert_eq!(scale(Scaling::Mx(MxExponent::Floor), E4M3, 1.9 * 256.0), 1.0);
        assert_eq!(scale(Scaling::Mx(MxExponent::Floor), E4M3, 256.0), 1.0);
        assert_eq!(scale(Scaling::Mx(MxExponent::Up), E4M3, 1.9 * 256.0), 2.0);
    }
}
