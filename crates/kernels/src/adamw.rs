//! AdamW, one pass over memory (Loshchilov & Hutter, arXiv 1711.05101; the update as `torch.optim.AdamW` does it).

use half::bf16;

use crate::error::{bad_shape, check_len};
use crate::{Device, Result};

/// Settings of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// This update's number, from 1.
    pub step: u64,
    /// Every gradient is multiplied by this first (clipping and the division by the token count).
    pub grad_scale: f32,
}

/// Updates `param`, `m`, `v` [n] with `grad` [n]; writes the rounded weights to `bf16_out` if given.
///
/// # Errors
/// If a length does not fit or `step` is 0.
pub fn step(
    dev: &Device,
    o: &AdamW,
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    bf16_out: Option<&mut [bf16]>,
) -> Result<()> {
    let n = param.len();
    check_len("adamw", "grad", grad.len(), n)?;
    check_len("adamw", "m", m.len(), n)?;
    check_len("adamw", "v", v.len(), n)?;
    if o.step == 0 {
        return bad_shape("adamw", "the first update has step 1");
    }
    let _ = dev;
    let c1 = 1.0 - f64::from(o.beta1).powf(o.step as f64);
    let c2 = 1.0 - f64::from(o.beta2).powf(o.step as f64);
    let step_size = (f64::from(o.lr) / c1) as f32;
    let inv_root_c2 = (1.0 / c2.sqrt()) as f32;
    let keep = 1.0 - o.lr * o.weight_decay;
    for i in 0..n {
        let g = grad[i] * o.grad_scale;
        m[i] = o.beta1 * m[i] + (1.0 - o.beta1) * g;
        v[i] = o.beta2 * v[i] + (1.0 - o.beta2) * g * g;
        param[i] = param[i] * keep - step_size * m[i] / (v[i].sqrt() * inv_root_c2 + o.eps);
    }
    if let Some(out) = bf16_out {
        check_len("adamw", "bf16_out", out.len(), n)?;
        out.iter_mut().zip(param.iter()).for_each(|(o, &p)| *o = bf16::from_f32(p));
    }
    Ok(())
}
