//! AdamW, one pass over memory (Loshchilov & Hutter, arXiv 1711.05101; the update as `torch.optim.AdamW` does it).

use half::bf16;

use crate::error::{bad_shape, check_len};
use crate::par::{PIECE, Parts};
use crate::profile::per_element;
use crate::simd::simd_fn;
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
/// With g = `grad`·`grad_scale` and t = `step`:
/// m ← m + (1−β₁)(g − m), v ← β₂v + (1−β₂)g², param ← param·(1 − lr·decay) − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε).
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
    if let Some(out) = bf16_out.as_deref() {
        check_len("adamw", "bf16_out", out.len(), n)?;
    }
    let written = if bf16_out.is_some() { 2 } else { 0 };
    let _span = dev.profiler().kernel("adamw", || per_element(n, 14, 28 + written));
    // In f64 and of the rounded betas, so that the correction cancels exactly what the moments were multiplied by.
    let c1 = 1.0 - f64::from(o.beta1).powf(o.step as f64);
    let c2 = 1.0 - f64::from(o.beta2).powf(o.step as f64);
    let f = Factors {
        grad: o.grad_scale,
        m: (1.0 - f64::from(o.beta1)) as f32,
        beta2: o.beta2,
        v: (1.0 - f64::from(o.beta2)) as f32,
        keep: (1.0 - f64::from(o.lr) * f64::from(o.weight_decay)) as f32,
        step_size: (f64::from(o.lr) / c1) as f32,
        root_c2: c2.sqrt() as f32,
        eps: o.eps,
    };
    let rounds = bf16_out.is_some();
    let (m, v, out) = (Parts::new(m), Parts::new(v), Parts::new(bf16_out.unwrap_or_default()));
    dev.team().for_chunks_mut(param, PIECE, &|i, param| {
        let r = i * PIECE..i * PIECE + param.len();
        let rounded = if rounds { r.clone() } else { 0..0 };
        // SAFETY: tasks handle different elements.
        let (m, v, out) = unsafe { (m.get(r.clone()), v.get(r.clone()), out.get(rounded)) };
        step_piece(dev.isa(), &f, param, &grad[r], m, v, out);
    });
    Ok(())
}

/// What every element of one update is multiplied by.
struct Factors {
    grad: f32,
    m: f32,
    beta2: f32,
    v: f32,
    keep: f32,
    step_size: f32,
    root_c2: f32,
    eps: f32,
}

simd_fn! {
    /// `out` is empty where nobody asks for rounded weights.
    fn step_piece(s, f: &Factors, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], out: &mut [bf16]) {
        let (by_grad, by_m, beta2, by_v) = (s.splat(f.grad), s.splat(f.m), s.splat(f.beta2), s.splat(f.v));
        let (keep, size, eps) = (s.splat(f.keep), s.splat(f.step_size), s.splat(f.eps));
        let root_c2 = s.splat(f.root_c2);
        let mut i = 0;
        while i < param.len() {
            let g = s.mul(s.load(grad, i), by_grad);
            let old = s.load(m, i);
            let m1 = s.fma(by_m, s.sub(g, old), old);
            let v1 = s.fma(s.mul(by_v, g), g, s.mul(beta2, s.load(v, i)));
            let denom = s.add(s.div(s.sqrt(v1), root_c2), eps);
            let p = s.fnma(size, s.div(m1, denom), s.mul(s.load(param, i), keep));
            s.store(m, i, m1);
            s.store(v, i, v1);
            s.store(param, i, p);
            if !out.is_empty() {
                s.store_bf16(out, i, p);
            }
            i += S::LANES;
        }
    }
}
