//! Whole slices of values to codes and back, without scales.

use std::marker::PhantomData;

use super::Format;
use super::wide::{self, Loop};
use crate::error::check_len;
use crate::par::PIECE;
use crate::{Device, Result};

/// codes[i] = the code of x[i] by [`Format::encode`].
///
/// # Errors
/// If a length does not fit.
pub fn encode<F: Format>(dev: &Device, x: &[f32], codes: &mut [F::Code]) -> Result<()> {
    check_len("lowp::encode", "codes", codes.len(), x.len())?;
    dev.team().for_chunks_mut(codes, PIECE, &|i, codes| {
        wide::run(dev.isa(), Encode::<F> { x: &x[i * PIECE..i * PIECE + codes.len()], codes });
    });
    Ok(())
}

/// out[i] = the value of codes[i].
///
/// # Errors
/// If a length does not fit.
pub fn decode<F: Format>(dev: &Device, codes: &[F::Code], out: &mut [f32]) -> Result<()> {
    check_len("lowp::decode", "out", out.len(), codes.len())?;
    dev.team().for_chunks_mut(out, PIECE, &|i, out| {
        let codes = &codes[i * PIECE..i * PIECE + out.len()];
        wide::run(dev.isa(), Decode::<F> { codes, out, format: PhantomData });
    });
    Ok(())
}

struct Encode<'a, F: Format> {
    x: &'a [f32],
    codes: &'a mut [F::Code],
}

impl<F: Format> Loop for Encode<'_, F> {
    #[inline(always)]
    fn run(self) {
        for (code, &x) in self.codes.iter_mut().zip(self.x) {
            *code = F::encode(x);
        }
    }
}

struct Decode<'a, F: Format> {
    codes: &'a [F::Code],
    out: &'a mut [f32],
    format: PhantomData<F>,
}

impl<F: Format> Loop for Decode<'_, F> {
    #[inline(always)]
    fn run(self) {
        for (out, &code) in self.out.iter_mut().zip(self.codes) {
            *out = F::decode(code);
        }
    }
}
