//! E8M0: a power of two in one byte, 2^(code − 127), 0xFF is NaN; neither zero nor sign.
//! (OCP Microscaling Formats specification 1.0, section 5.4.1.)

/// Code of NaN.
pub const NAN: u8 = 0xFF;

/// The value of `code`: 2⁻¹²⁷ (a subnormal f32) to 2¹²⁷, or NaN.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        NAN => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// The least power of two that is not below |x|; 2¹²⁷ (0xFE) where there is none, NaN for NaN, 2⁻¹²⁷ (0) for zero.
///
/// This is how Transformer Engine rounds a scale, up. What [`decode`] gives is encoded back to its code.
#[inline(always)]
pub fn encode_up(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    let (exponent, mantissa) = (bits >> 23, bits & 0x7F_FFFF);
    // 2⁻¹²⁷ is subnormal, so code 0 reaches as far as the upper half of f32's subnormals.
    let up = if exponent == 0 { mantissa > 0x40_0000 } else { mantissa > 0 };
    if bits > 0x7F80_0000 { NAN } else { (exponent + u32::from(up)).min(0xFE) as u8 }
}

/// As [`encode_up`], but the greatest power of two that is not above |x| (2⁻¹²⁷ where there is none).
#[inline(always)]
pub fn encode_down(x: f32) -> u8 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 { NAN } else { (bits >> 23).min(0xFE) as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_stand_for_powers_of_two_and_come_back() {
        for code in 0..NAN {
            let x = decode(code);
            assert_eq!(f64::from(x), 2f64.powi(i32::from(code) - 127));
            assert_eq!((encode_up(x), encode_down(x)), (code, code));
            let above = f32::from_bits(x.to_bits() + 1);
            assert_eq!((encode_up(above), encode_down(above)), (code.saturating_add(1).min(0xFE), code));
        }
        assert!(decode(NAN).is_nan());
        for f in [encode_up, encode_down] {
            assert_eq!([f(f32::NAN), f(f32::INFINITY), f(0.0), f(f32::MIN_POSITIVE)], [NAN, 0xFE, 0, 1]);
        }
    }
}
