//! The named recipes, and what each does to the operands of a linear layer's three products.
//!
//! Sources: delayed and current scaling with hybrid formats, Micikevicius et al. (arXiv 2209.05433) and Transformer Engine; blocks,
//! DeepSeek-V3 (arXiv 2412.19437); MX, OCP Microscaling 1.0 with Transformer Engine's exponents.

use std::fmt;
use std::str::FromStr;

use super::{Element, MxExponent, Scaling, Tile};

/// What a matrix is in a linear layer y = x·wᵀ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// x [tokens, in].
    Activation,
    /// w [out, in].
    Weight,
    /// dy [tokens, out].
    Gradient,
}

impl Operand {
    /// All of them.
    pub const ALL: [Operand; 3] = [Operand::Activation, Operand::Weight, Operand::Gradient];

    /// Its name in files.
    pub const fn name(self) -> &'static str {
        match self {
            Operand::Activation => "activation",
            Operand::Weight => "weight",
            Operand::Gradient => "gradient",
        }
    }
}

/// How one operand is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Format of its codes.
    pub element: Element,
    /// Which values share a scale.
    pub tile: Tile,
    /// Where the scale comes from.
    pub scaling: Scaling,
}

impl Spec {
    /// The same for a product that sums over the rows of the matrix instead of its columns: tiles lie along what is summed
    /// over, so they turn.
    ///
    /// The forward product sums over the columns of x and w, dx = dy·w over the columns of dy and the **rows** of w, and
    /// dw = dyᵀ·x over the **rows** of dy and x. What is not square must be quantised anew, from the unrounded values.
    pub const fn summed_over_rows(self) -> Spec {
        Spec { tile: self.tile.transposed(), ..self }
    }

    /// The same with a scale that is known: delayed scaling.
    pub const fn with_scale(self, scale: f32) -> Spec {
        Spec { scaling: Scaling::Fixed(scale), ..self }
    }
}

/// A low-precision recipe, by the name that a configuration gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// One scale a tensor, from the magnitudes of earlier steps; gradients in E5M2.
    Fp8Delayed,
    /// One scale a tensor, from its own magnitude; gradients in E5M2.
    Fp8Tensorwise,
    /// 1 × 128 activations and gradients, 128 × 128 weights, E4M3 everywhere, scales powers of two.
    Fp8Blockwise,
    /// 1 × 32 everywhere, E4M3, E8M0 scales.
    Mxfp8,
    /// 1 × 128 activations and gradients, 128 × 128 weights, int8, scales amax/127.
    Int8Block,
    /// 1 × 128 activations and gradients, 128 × 128 weights, fp16, scales powers of two that bring amax to 8 … 16.
    Fp16Block,
}

impl Recipe {
    /// All of them.
    pub const ALL: [Recipe; 6] = [
        Recipe::Fp8Delayed,
        Recipe::Fp8Tensorwise,
        Recipe::Fp8Blockwise,
        Recipe::Mxfp8,
        Recipe::Int8Block,
        Recipe::Fp16Block,
    ];

    /// The name in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Recipe::Fp8Delayed => "fp8_delayed",
            Recipe::Fp8Tensorwise => "fp8_tensorwise",
            Recipe::Fp8Blockwise => "fp8_blockwise",
            Recipe::Mxfp8 => "mxfp8",
            Recipe::Int8Block => "int8_block",
            Recipe::Fp16Block => "fp16_block",
        }
    }

    /// How an operand is quantised where its columns are summed over; see [`Spec::summed_over_rows`] for the other case.
    ///
    /// [`Recipe::Fp8Delayed`] gives the scaling of a first step, by the tensor's own magnitude; later ones put the history's in
    /// with [`Spec::with_scale`].
    pub const fn spec(self, operand: Operand) -> Spec {
        let block = match operand {
            Operand::Weight => Tile::SQUARE_128,
            Operand::Activation | Operand::Gradient => Tile::ROW_128,
        };
        let hybrid = match operand {
            Operand::Gradient => Element::E5M2,
            Operand::Activation | Operand::Weight => Element::E4M3,
        };
        let (element, tile, scaling) = match self {
            Recipe::Fp8Delayed | Recipe::Fp8Tensorwise => (hybrid, Tile::Tensor, Scaling::Amax),
            Recipe::Fp8Blockwise => (Element::E4M3, block, Scaling::PowerOfTwo),
            Recipe::Mxfp8 => (Element::E4M3, Tile::ROW_32, Scaling::Mx(MxExponent::Up)),
            Recipe::Int8Block => (Element::Int8, block, Scaling::Amax),
            Recipe::Fp16Block => (Element::Fp16, block, Scaling::PowerOfTwo),
        };
        Spec { element, tile, scaling }
    }

    /// Whether operands carry an [`AmaxHistory`](super::AmaxHistory).
    pub const fn has_history(self) -> bool {
        matches!(self, Recipe::Fp8Delayed)
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no recipe has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no low-precision recipe is called `{0}`; there are fp8_delayed, fp8_tensorwise, fp8_blockwise, mxfp8, int8_block and fp16_block"
)]
pub struct ParseRecipeError(String);

impl FromStr for Recipe {
    type Err = ParseRecipeError;

    fn from_str(s: &str) -> Result<Recipe, ParseRecipeError> {
        Recipe::ALL.into_iter().find(|r| r.name() == s).ok_or_else(|| ParseRecipeError(s.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_and_unknown_ones_are_told() {
        for r in Recipe::ALL {
            assert_eq!(r.to_string().parse(), Ok(r));
        }
        let error = "fp8".parse::<Recipe>().unwrap_err().to_string();
        assert!(Recipe::ALL.iter().all(|r| error.contains(r.name())), "{error}");
    }

    #[test]
    fn tiles_and_formats_are_those_of_the_papers() {
        use Operand::*;
        for (recipe, formats, tiles) in [
            (Recipe::Fp8Delayed, [Element::E4M3, Element::E4M3, Element::E5M2], [Tile::Tensor; 3]),
            (Recipe::Fp8Tensorwise, [Element::E4M3, Element::E4M3, Element::E5M2], [Tile::Tensor; 3]),
            (Recipe::Fp8Blockwise, [Element::E4M3; 3], [Tile::ROW_128, Tile::SQUARE_128, Tile::ROW_128]),
            (Recipe::Mxfp8, [Element::E4M3; 3], [Tile::ROW_32; 3]),
            (Recipe::Int8Block, [Element::Int8; 3], [Tile::ROW_128, Tile::SQUARE_128, Tile::ROW_128]),
            (Recipe::Fp16Block, [Element::Fp16; 3], [Tile::ROW_128, Tile::SQUARE_128, Tile::ROW_128]),
        ] {
            let specs = [Activation, Weight, Gradient].map(|o| recipe.spec(o));
            assert_eq!((specs.map(|s| s.element), specs.map(|s| s.tile)), (formats, tiles), "{recipe}");
        }
        assert_eq!(Recipe::Mxfp8.spec(Weight).summed_over_rows().tile, Tile::COLUMN_32);
        assert_eq!(Recipe::Fp8Blockwise.spec(Weight).summed_over_rows().tile, Tile::SQUARE_128);
        assert_eq!(Recipe::Fp8Blockwise.spec(Gradient).summed_over_rows().tile, Tile::COLUMN_128);
    }
}
