//! What a code is: the four formats, as types for kernels and as a value for configurations.

use half::f16;

use super::minifloat::{self, Overflow};

mod sealed {
    pub trait Sealed {}
}

/// A format that quantisers write. The types are names only; they hold nothing.
pub trait Format: sealed::Sealed + Copy + Send + Sync + 'static {
    /// What a value is stored as.
    type Code: Copy + Default + PartialEq + std::fmt::Debug + Send + Sync + 'static;
    /// The same as a value.
    const ELEMENT: Element;

    /// The code of a scaled value, to nearest, ties to even; what does not fit saturates (see [`super`]).
    fn encode(x: f32) -> Self::Code;
    /// The code of a scaled value, rounded up or down at random with 32 uniform bits, so that the mean is x. Exact values do
    /// not move.
    fn encode_stochastic(x: f32, random: u32) -> Self::Code;
    /// The value of a code, exactly.
    fn decode(code: Self::Code) -> f32;
}

/// The format of a code, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// FP8 with 3 bits of mantissa: relative step 2⁻³, up to 448.
    E4M3,
    /// FP8 with 2 bits of mantissa: relative step 2⁻², up to 57344, with infinities.
    E5M2,
    /// Whole numbers −127..=127 (−128 is not used, so that negation stays within).
    Int8,
    /// IEEE half precision.
    Fp16,
}

impl Element {
    /// What a tile's greatest magnitude is scaled to.
    ///
    /// The greatest finite value of FP8 and int8, whose few steps are all wanted. For fp16 it is 16: a product kernel may then
    /// add up 128 products in fp16 (128·16² = 32768 < 65504) before it promotes the sum to f32, and below 16 there are still 18
    /// powers of two with full precision.
    pub const fn target(self) -> f32 {
        match self {
            Element::E4M3 => 448.0,
            Element::E5M2 => 57344.0,
            Element::Int8 => 127.0,
            Element::Fp16 => 16.0,
        }
    }

    /// Whether NaN and infinities have codes of their own. If not, they make the tile's scale NaN.
    pub const fn has_non_finite(self) -> bool {
        !matches!(self, Element::Int8)
    }

    /// Bytes of a code.
    pub const fn bytes(self) -> usize {
        if matches!(self, Element::Fp16) { 2 } else { 1 }
    }
}

/// [`Element::E4M3`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct E4M3;
/// [`Element::E5M2`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct E5M2;
/// [`Element::Fp16`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Fp16;
/// [`Element::Int8`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Int8;

macro_rules! small_float {
    ($format:ident, $layout:ident, $code:ty, $bits:ty, $from:expr, $to:expr) => {
        impl sealed::Sealed for $format {}
        impl Format for $format {
            type Code = $code;
            const ELEMENT: Element = Element::$format;

            #[inline(always)]
            fn encode(x: f32) -> $code {
                $from(minifloat::encode(minifloat::$layout, Overflow::SaturateFinite, x) as $bits)
            }
            #[inline(always)]
            fn encode_stochastic(x: f32, random: u32) -> $code {
                $from(minifloat::encode_stochastic(minifloat::$layout, Overflow::SaturateFinite, x, random) as $bits)
            }
            #[inline(always)]
            fn decode(code: $code) -> f32 {
                minifloat::decode(minifloat::$layout, u32::from($to(code)))
            }
        }
    };
}
small_float!(E4M3, E4M3, u8, u8, std::convert::identity, std::convert::identity);
small_float!(E5M2, E5M2, u8, u8, std::convert::identity, std::convert::identity);
small_float!(Fp16, FP16, f16, u16, f16::from_bits, f16::to_bits);

impl sealed::Sealed for Int8 {}
impl Format for Int8 {
    type Code = i8;
    const ELEMENT: Element = Element::Int8;

    #[inline(always)]
    fn encode(x: f32) -> i8 {
        code(limit(x) + SHIFT)
    }
    #[inline(always)]
    fn encode_stochastic(x: f32, random: u32) -> i8 {
        let x = limit(x);
        let nearest = x + SHIFT - SHIFT;
        let below = if nearest > x { nearest - 1.0 } else { nearest };
        // The fraction is compared and not added, else the sum would be rounded and move whole numbers. 24 bits convert exactly.
        let chance = (random >> 8) as i32 as f32 * (1.0 / 16_777_216.0);
        let up = if chance < x - below { 1.0 } else { 0.0 };
        code(below + up + SHIFT)
    }
    #[inline(always)]
    fn decode(code: i8) -> f32 {
        f32::from(code)
    }
}

/// 1.5·2²³: adding it leaves no room for a fraction, so the sum is rounded to a whole number, ties to even, which then stands in
/// its low bits.
const SHIFT: f32 = 12_582_912.0;

/// The low byte of a sum with [`SHIFT`].
#[inline(always)]
fn code(shifted: f32) -> i8 {
    shifted.to_bits() as i8
}

/// What int8 can hold. NaN becomes 0: its tile's scale says what it was.
#[inline(always)]
fn limit(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(-127.0, 127.0) }
}
