//! How exactly products are made.

use std::fmt;

use crate::lowp::Recipe;

/// The exactness that a product must have. It permits, it does not oblige: where a processor has no faster way than f32,
/// products are made in f32 whatever is permitted; only a block recipe is a recipe everywhere. Faster ways: `Bf16x2` and `Bf16` on AMX tiles, `Bf16` with
/// the pairs of AVX-512 BF16 on AMD. Sums are f32 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Like f32: 24 bits of each operand count.
    #[default]
    F32,
    /// 16 bits of each operand count (two bf16): an error of about 2⁻¹⁶ a product, a hundredth of bf16's.
    Bf16x2,
    /// Operands are rounded to bf16, 8 bits, as PyTorch's bf16 does.
    Bf16,
    /// Codes of 8 bits with a scale for each 128 steps of k (a weight: for each block of 128 × 128), multiplied as integers. The same bits
    /// on every machine.
    Int8Block,
    /// Operands are rounded as the recipe says and multiplied in f32: what a machine with such arithmetic would compute, but for the order of
    /// its sums. For finding out what a recipe does to a model; slower than f32.
    Simulated(Recipe),
}

impl Arithmetic {
    /// Whether it is a recipe for the blocks of a model, which leaves the head alone.
    pub fn is_block_recipe(self) -> bool {
        matches!(self, Arithmetic::Int8Block | Arithmetic::Simulated(_))
    }

    /// Whether its scales come from the magnitudes of earlier steps.
    pub fn has_history(self) -> bool {
        matches!(self, Arithmetic::Simulated(recipe) if recipe.has_history())
    }

    /// bf16 parts of an f32 operand.
    pub(crate) fn planes(self) -> usize {
        match self {
            Arithmetic::F32 | Arithmetic::Simulated(_) => 3,
            Arithmetic::Bf16x2 => 2,
            Arithmetic::Bf16 | Arithmetic::Int8Block => 1,
        }
    }
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16x2 => "bf16x2",
            Arithmetic::Bf16 => "bf16",
            Arithmetic::Int8Block => "int8_block",
            Arithmetic::Simulated(recipe) => recipe.name(),
        })
    }
}
