//! Rotary position embedding, half-split form as in Hugging Face llama (Su et al., arXiv 2104.09864).
//!
//! Pair (x[i], x[i + R/2]) of each head is turned by the angle of its position and of frequency i; R is the rotary dimension.

use crate::error::{bad_shape, check_len};
use crate::{Device, Result};

/// Turns `x` [T,N,D] in place. `cos`, `sin` [T,R/2]: one row a token (already looked up by position). `inverse` turns back,
/// which is the backward of the forward. R ≤ D; elements beyond R are left alone.
///
/// # Errors
/// If a length does not fit.
pub fn apply(
    dev: &Device,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    inverse: bool,
) -> Result<()> {
    let t = x.len() / (heads * head_dim).max(1);
    check_len("rope", "x", x.len(), t * heads * head_dim)?;
    check_len("rope", "sin", sin.len(), cos.len())?;
    if t == 0 {
        return Ok(());
    }
    let half = cos.len() / t;
    check_len("rope", "cos", cos.len(), t * half)?;
    if 2 * half > head_dim {
        return bad_shape("rope", format!("{} rotary dimensions in a head of {head_dim}", 2 * half));
    }
    let _ = dev;
    for i in 0..t {
        for h in 0..heads {
            let row = &mut x[(i * heads + h) * head_dim..][..2 * half];
            for j in 0..half {
                let (c, s) = (cos[i * half + j], if inverse { -sin[i * half + j] } else { sin[i * half + j] });
                let (a, b) = (row[j], row[j + half]);
                row[j] = a * c - b * s;
                row[j + half] = b * c + a * s;
            }
        }
    }
    Ok(())
}
