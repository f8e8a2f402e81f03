//! Products of a low-precision recipe on a machine that has no such arithmetic: operands rounded, then an f32 product.
//!
//! A product of two E4M3 or E5M2 values is exact in f32 ([`lowp`](crate::lowp)); sums are f32 as everywhere.

use std::borrow::Cow;

use super::{Arithmetic, Blocking, Gemm, Role, gemm_blocked};
use crate::lowp::{Recipe, Rounding, Spec, fake_quantise};
use crate::{Device, Mat, Result, elementwise};

/// [`gemm_blocked`](super::gemm_blocked) with operands rounded as `recipe` says.
///
/// # Errors
/// If there is no memory for the rounded operands.
pub(super) fn gemm(dev: &Device, g: &Gemm<'_>, recipe: Recipe, c: &mut [f32], by: &Blocking) -> Result<()> {
    let [mut a, mut b] = [dev.scratch().rounded(0).take(g.a.len())?, dev.scratch().rounded(1).take(g.b.len())?];
    let (a, b) = (a.as_mut_slice(), b.as_mut_slice());
    // A is summed over its columns unless it is stored transposed, B the other way round.
    let a_rows = if g.a_trans { g.k } else { g.m };
    let b_rows = if g.b_trans { g.n } else { g.k };
    let spec = |i: usize| {
        let spec = recipe.spec(g.roles[i]);
        // A recipe without history has tiles of its own, which one known scale would not fit.
        g.scales[i].filter(|_| recipe.has_history()).map_or(spec, |scale| spec.with_scale(scale))
    };
    let rounding = |i: usize| match g.gradient_noise {
        Some(seed) if g.roles[i] == Role::Gradient => Rounding::Stochastic { seed, first: 0 },
        _ => Rounding::NearestEven,
    };
    round(dev, &g.a, spec(0), rounding(0), (a_rows, !g.a_trans), a)?;
    round(dev, &g.b, spec(1), rounding(1), (b_rows, g.b_trans), b)?;
    gemm_blocked(dev, &Gemm { a: Mat::F32(a), b: Mat::F32(b), arithmetic: Arithmetic::F32, ..*g }, c, by)
}

fn round(
    dev: &Device,
    x: &Mat<'_>,
    spec: Spec,
    rounding: Rounding,
    (rows, over_columns): (usize, bool),
    out: &mut [f32],
) -> Result<()> {
    let spec = if over_columns { spec } else { spec.summed_over_rows() };
    let wide = match x {
        Mat::F32(x) => Cow::Borrowed(*x),
        Mat::Bf16(x) => {
            let mut wide = vec![0.0; x.len()];
            elementwise::from_bf16(dev, x, &mut wide)?;
            Cow::Owned(wide)
        }
    };
    fake_quantise(dev, &spec, rounding, &wide, rows, x.len() / rows, out)
}
