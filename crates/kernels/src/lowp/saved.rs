//! Activations kept for backward as FP8: 1 byte a value and a scale for each 128 of a row, 1.03 bytes in all instead of 4.
//!
//! E4M3 with f32 scales amax/448. What comes back differs from x by at most
//! * |x| · 2⁻⁴ (half a step of 3 bits of mantissa; and 2⁻²³ of |x| more, for the scaling) where |x| ≥ 2⁻⁶ · scale, which is
//!   amax of its 128 values / 28672 ≈ amax · 2⁻¹⁴·⁸;
//! * scale · 2⁻¹⁰ ≈ amax · 2⁻¹⁸·⁸ below that.
//!
//! NaN comes back as NaN, an infinity as NaN.

use super::{E4M3, Rounding, Scaling, Tile, dequantise, quantise};
use crate::{Device, Result};

/// Number of scales of an activation [rows, cols]; there are rows·cols codes.
pub const fn num_scales(rows: usize, cols: usize) -> usize {
    Tile::ROW_128.scales(rows, cols)
}

/// Writes `x` [rows, cols] as `codes` [rows, cols] and `scales` [rows, ⌈cols/128⌉].
///
/// # Errors
/// If a length does not fit.
pub fn compress(dev: &Device, x: &[f32], rows: usize, cols: usize, codes: &mut [u8], scales: &mut [f32]) -> Result<()> {
    quantise::<E4M3>(dev, Tile::ROW_128, Scaling::Amax, Rounding::NearestEven, x, rows, cols, codes, scales)
}

/// Writes what [`compress`] kept to `out` [rows, cols].
///
/// # Errors
/// If a length does not fit.
pub fn decompress(dev: &Device, codes: &[u8], scales: &[f32], rows: usize, cols: usize, out: &mut [f32]) -> Result<()> {
    dequantise::<E4M3>(dev, Tile::ROW_128, codes, scales, rows, cols, out)
}
