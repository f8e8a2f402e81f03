//! Sums over whole slices, split at fixed sizes.

use crate::Device;

/// Elements that one partial sum covers; fixes the order of the whole.
pub const PIECE: usize = 1 << 14;

/// Σ x² in f64, partial sums of [`PIECE`] elements added in order. Not finite if an element is not.
pub fn sum_squares(dev: &Device, x: &[f32]) -> f64 {
    let mut parts = vec![0f64; x.len().div_ceil(PIECE)];
    dev.team().for_chunks_mut(&mut parts, 1, &|i, p| {
        let piece = &x[i * PIECE..((i + 1) * PIECE).min(x.len())];
        p[0] = piece.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    });
    parts.iter().sum()
}
