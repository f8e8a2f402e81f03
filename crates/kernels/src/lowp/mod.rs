//! Low-precision numbers in software: FP8, MXFP8, fp16 and int8 with scales, exact to the bit.
//!
//! A processor without FP8 instructions can still train as if it had them: operands are rounded to the low-precision grid
//! and multiplied in f32, where the product of two FP8 values is exact. So a run on CPUs shows what a recipe does to a model.
//!
//! | file | its idea |
//! |---|---|
//! | [`minifloat`] | f32 to a small float and back, by whole-number arithmetic |
//! | [`e8m0`] | a power of two in one byte: the scales of MX formats |
//! | [`Format`] | what a code is: E4M3, E5M2, int8 or fp16, as a type and as a value ([`Element`]) |
//! | [`Tile`] | which values share a scale |
//! | [`Scaling`] | how a tile's scale follows from its greatest magnitude |
//! | [`Rounding`] | to nearest even, or at random by a counter |
//! | [`quantise()`], [`dequantise`], [`fake_quantise`] | the kernels |
//! | [`AmaxHistory`] | delayed scaling: a scale from earlier steps |
//! | [`Recipe`] | the named recipes of a configuration, and what they do to each operand |
//! | [`saved`] | activations kept for backward in 1.03 bytes a value |
//!
//! # The one rule
//! `code = round(x / scale)` and `x ≈ code · scale`, with a true division. Everything else is a choice of scale. (Some
//! libraries store the reciprocal; a scale here is always what a code is multiplied by.)
//!
//! # Not a number, infinite, too large
//! * E4M3, E5M2, fp16: NaN stays NaN, an infinity becomes an infinity (E4M3, which has none: NaN); neither counts for the
//!   tile's greatest magnitude, so the values beside it keep their precision. A finite value past the format's range, which only
//!   a [`Scaling::Fixed`] or rounded-down scale can bring about, becomes the greatest finite one.
//! * int8 has no code for them: the tile's scale becomes NaN, hence every value of the tile. Nothing is lost in silence.
//! * MX scales follow Transformer Engine: a NaN in the tile gives the scale NaN (0xFF), an infinity 2¹²⁷ (0xFE).
//! * A tile of zeros has scale 1 (MX: 2⁻¹²⁷, code 0) and codes of zero, with the sign that they had.
//!
//! Results do not depend on the instruction set, nor on the number of threads: only on the values, the shape and the seed.

mod amax;
mod codec;
pub mod e8m0;
mod format;
pub mod minifloat;
pub mod plain;
mod quantise;
mod recipe;
mod rounding;
pub mod saved;
mod scaling;
mod tile;
mod wide;

pub use amax::{AmaxChoice, AmaxHistory, Delayed, amax, amax_of};
pub use codec::{decode, encode};
pub use format::{E4M3, E5M2, Element, Format, Fp16, Int8};
pub use quantise::{dequantise, fake_quantise, quantise};
pub use recipe::{Operand, ParseRecipeError, Recipe, Spec};
pub(crate) use rounding::{Keys, mix};
pub use rounding::{Rounding, random_bits};
pub use scaling::{MxExponent, Scaling};
pub use tile::Tile;
