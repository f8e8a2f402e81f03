//! f32 to a float of 8 or 16 bits and back, by whole-number arithmetic that compilers turn into vector code.
//!
//! Layouts: OCP 8-bit Floating Point Specification (OFP8) 1.0 for E4M3 and E5M2, IEEE 754 binary16 for fp16.

/// Where the bits of a small float lie, and which codes are special.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bits of the mantissa, without the hidden one.
    pub mantissa: u32,
    /// What the stored exponent is greater by than the true one.
    pub bias: u32,
    /// Bits without the sign, which is the next bit.
    pub magnitude_bits: u32,
    /// Code of the greatest finite value.
    pub max: u32,
    /// Code that stands for infinity, which is NaN where the format has no infinity.
    pub infinity: u32,
    /// Code of NaN; every code from here on is one.
    pub nan: u32,
}

/// FP8 E4M3 ("E4M3FN"): 448 … 2⁻⁶, subnormals to 2⁻⁹, no infinity, NaN = S.1111.111.
pub const E4M3: Layout = Layout { mantissa: 3, bias: 7, magnitude_bits: 7, max: 0x7E, infinity: 0x7F, nan: 0x7F };
/// FP8 E5M2: 57344 … 2⁻¹⁴, subnormals to 2⁻¹⁶, infinity 0x7C; NaN is written as 0x7F.
pub const E5M2: Layout = Layout { mantissa: 2, bias: 15, magnitude_bits: 7, max: 0x7B, infinity: 0x7C, nan: 0x7F };
/// IEEE half precision: 65504 … 2⁻¹⁴, subnormals to 2⁻²⁴; NaN is written as 0x7E00.
pub const FP16: Layout =
    Layout { mantissa: 10, bias: 15, magnitude_bits: 15, max: 0x7BFF, infinity: 0x7C00, nan: 0x7E00 };

/// What becomes of a magnitude past the greatest finite value. NaN is NaN in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// The greatest finite value, also for infinities (OFP8's saturating conversion).
    Saturate,
    /// The greatest finite value; infinities stay what they are, or become NaN where the format has none. Quantisers do this:
    /// a scale a little too small costs precision only, and an infinity is not hidden.
    SaturateFinite,
    /// Infinity, or NaN where the format has none (OFP8's non-saturating conversion). A value counts as past the range when it
    /// would round to the next step: 464, halfway, still becomes E4M3's 448 (ties to even), and 61440 E5M2's infinity.
    NonSaturating,
}

/// The code of `x`, to nearest, ties to even.
#[inline(always)]
pub fn encode(l: Layout, overflow: Overflow, x: f32) -> u32 {
    let (m, down, exponent) = significand(l, x);
    // 25 bits shift out all of the 24 and leave less than half a step: zero.
    let shift = (23 - l.mantissa + down).min(25);
    let tie = (m >> shift) & 1;
    let rounded = (m + (1 << (shift - 1)) - 1 + tie) >> shift;
    finish(l, overflow, x, rounded + (exponent << l.mantissa))
}

/// The code of `x` rounded up or down at random, so that the mean over all `random` is x.
///
/// `random`: 32 uniform bits. A value that the format has does not move. Past the greatest finite value `overflow` rules, as
/// always. Values below 2⁻⁷ of the smallest step are rounded as if cut to 31 bits after the point, a bias below 2⁻³¹ steps.
#[inline(always)]
pub fn encode_stochastic(l: Layout, overflow: Overflow, x: f32, random: u32) -> u32 {
    let (m, down, exponent) = significand(l, x);
    let wanted = 23 - l.mantissa + down;
    let shift = wanted.min(31);
    let m = m >> (wanted - shift).min(31);
    let rounded = (m + (random & ((1 << shift) - 1))) >> shift;
    finish(l, overflow, x, rounded + (exponent << l.mantissa))
}

/// (24-bit significand, bits that it lies below the normal range by, exponent above the smallest normal one).
#[inline(always)]
fn significand(l: Layout, x: f32) -> (u32, u32, u32) {
    let magnitude = x.to_bits() & 0x7FFF_FFFF;
    let exponent = magnitude >> 23;
    let lowest = 128 - l.bias;
    let used = exponent.max(lowest);
    // f32's own subnormals and zero get a hidden bit that they do not have: so far down, it is shifted out.
    ((magnitude & 0x7F_FFFF) | 0x80_0000, used - exponent, used - lowest)
}

/// Puts limits, special codes and the sign to a rounded magnitude.
///
/// A carry out of the mantissa has stepped the exponent up by itself, which is the right value; and the hidden bit of a normal
/// value has added 1 to the exponent, which is how a stored exponent tells normal from subnormal.
#[inline(always)]
fn finish(l: Layout, overflow: Overflow, x: f32, rounded: u32) -> u32 {
    const INF: u32 = 0x7F80_0000;
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let (finite, infinite) = match overflow {
        Overflow::Saturate => (rounded.min(l.max), l.max),
        Overflow::SaturateFinite => (rounded.min(l.max), l.infinity),
        Overflow::NonSaturating => (rounded.min(l.infinity), l.infinity),
    };
    let code = if magnitude < INF { finite } else { infinite };
    let code = if magnitude > INF { l.nan } else { code };
    code | (bits >> 31) << l.magnitude_bits
}

/// The value of `code`, exactly.
#[inline(always)]
pub fn decode(l: Layout, code: u32) -> f32 {
    let sign = (code >> l.magnitude_bits) << 31;
    let magnitude = code & ((1 << l.magnitude_bits) - 1);
    let normal = (magnitude << (23 - l.mantissa)) + ((127 - l.bias) << 23);
    // Subnormals are whole multiples of the smallest step. (Through i32, which vector units convert in one instruction.)
    let step = f32::from_bits((128 - l.bias - l.mantissa) << 23);
    let subnormal = (magnitude as i32 as f32 * step).to_bits();
    let finite = if magnitude >> l.mantissa == 0 { subnormal } else { normal };
    let special = if magnitude == l.infinity && l.infinity != l.nan { 0x7F80_0000 } else { 0x7FC0_0000 };
    f32::from_bits(sign | if magnitude <= l.max { finite } else { special })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn fp16_equals_the_half_crate() {
        for code in 0..=u16::MAX {
            let (ours, theirs) = (decode(FP16, code.into()), f16::from_bits(code).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{code:#06x}");
        }
        // A stride through all f32 that meets every exponent and many low bits.
        for i in 0..2_000_000u32 {
            let x = f32::from_bits(i.wrapping_mul(2_147_483));
            let (ours, theirs) = (encode(FP16, Overflow::NonSaturating, x), f16::from_f32(x));
            assert!(ours == theirs.to_bits().into() || x.is_nan() && theirs.is_nan(), "{x:e}");
        }
    }

    #[test]
    fn ends_of_the_ranges() {
        use Overflow::*;
        let inf = f32::INFINITY;
        for (x, saturate, finite, non) in
            [(464.0, 0x7E, 0x7E, 0x7E), (464.1, 0x7E, 0x7E, 0x7F), (1e38, 0x7E, 0x7E, 0x7F), (inf, 0x7E, 0x7F, 0x7F)]
        {
            let all = [Saturate, SaturateFinite, NonSaturating].map(|o| encode(E4M3, o, x));
            assert_eq!(all, [saturate, finite, non], "{x}");
            assert_eq!(encode(E4M3, NonSaturating, -x), non | 0x80);
        }
        for (x, saturate, finite, non) in [
            (61439.0, 0x7B, 0x7B, 0x7B),
            (61440.0, 0x7B, 0x7B, 0x7C),
            (1e38, 0x7B, 0x7B, 0x7C),
            (inf, 0x7B, 0x7C, 0x7C),
        ] {
            assert_eq!(
                [Saturate, SaturateFinite, NonSaturating].map(|o| encode(E5M2, o, x)),
                [saturate, finite, non],
                "{x}"
            );
        }
        for l in [E4M3, E5M2, FP16] {
            let sign = 1 << l.magnitude_bits;
            for o in [Saturate, SaturateFinite, NonSaturating] {
                assert_eq!(encode(l, o, f32::NAN), l.nan);
                assert_eq!(encode(l, o, -f32::NAN), l.nan | sign);
                assert_eq!((encode(l, o, 0.0), encode(l, o, -0.0)), (0, sign));
                // Half the smallest step is a tie with zero; the next f32 above it is not.
                let half = decode(l, 1) / 2.0;
                assert_eq!((encode(l, o, half), encode(l, o, f32::from_bits(half.to_bits() + 1))), (0, 1));
                assert_eq!(encode(l, o, f32::from_bits(1)), 0);
                for random in [0, 1, 1 << 31, u32::MAX] {
                    assert_eq!(encode_stochastic(l, o, f32::NAN, random), l.nan);
                    assert_eq!(encode_stochastic(l, o, -0.0, random), sign);
                    assert_eq!(encode_stochastic(l, o, f32::from_bits(1), random), 0);
                    assert_eq!(encode_stochastic(l, o, inf, random), encode(l, o, inf));
                }
            }
        }
    }
}
