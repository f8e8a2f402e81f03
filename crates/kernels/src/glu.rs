//! Gated linear units: out = act(gate) · up (Shazeer, arXiv 2002.05202).

use crate::error::check_len;
use crate::{Device, Result};

/// The activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// x · sigmoid(x): SwiGLU.
    Silu,
    /// GELU by the error function: GeGLU as `gelu`.
    Gelu,
    /// GELU by the tanh approximation: GeGLU as `gelu_pytorch_tanh` / `gelu_new`.
    GeluTanh,
}

impl Act {
    /// act(x) and its derivative, in f64: the reference.
    pub fn value_and_slope(self, x: f64) -> (f64, f64) {
        match self {
            Act::Silu => {
                let s = 1.0 / (1.0 + (-x).exp());
                (x * s, s * (1.0 + x * (1.0 - s)))
            }
            Act::Gelu => {
                let phi = 0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2));
                (x * phi, phi + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt())
            }
            Act::GeluTanh => {
                let c = (2.0 / std::f64::consts::PI).sqrt();
                let t = (c * (x + 0.044715 * x * x * x)).tanh();
                (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x))
            }
        }
    }
}

/// The error function by its Taylor series near zero and a continued fraction beyond; |error| < 1e-12.
pub fn erf(x: f64) -> f64 {
    let a = x.abs();
    let r = if a < 2.5 {
        let (mut term, mut sum) = (a, a);
        for n in 1..60 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let mut f = 0.0;
        for k in (1..60).rev() {
            f = f64::from(k) / 2.0 / (a + f);
        }
        1.0 - (-a * a).exp() / ((a + f) * std::f64::consts::PI.sqrt())
    };
    r.copysign(x)
}

/// Forward. `gate`, `up` [n] → `out` [n].
///
/// # Errors
/// If a length does not fit.
pub fn forward(dev: &Device, act: Act, gate: &[f32], up: &[f32], out: &mut [f32]) -> Result<()> {
    check_len("glu", "up", up.len(), gate.len())?;
    check_len("glu", "out", out.len(), gate.len())?;
    let _ = dev;
    for i in 0..gate.len() {
        out[i] = (act.value_and_slope(f64::from(gate[i])).0 * f64::from(up[i])) as f32;
    }
    Ok(())
}

/// Backward. Overwrites `dgate`, `dup` [n].
///
/// # Errors
/// If a length does not fit.
pub fn backward(
    dev: &Device,
    act: Act,
    gate: &[f32],
    up: &[f32],
    dout: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
) -> Result<()> {
    for (what, got) in [("up", up.len()), ("dout", dout.len()), ("dgate", dgate.len()), ("dup", dup.len())] {
        check_len("glu backward", what, got, gate.len())?;
    }
    let _ = dev;
    for i in 0..gate.len() {
        let (v, s) = act.value_and_slope(f64::from(gate[i]));
        let g = f64::from(dout[i]);
        dgate[i] = (g * f64::from(up[i]) * s) as f32;
        dup[i] = (g * v) as f32;
    }
    Ok(())
}
