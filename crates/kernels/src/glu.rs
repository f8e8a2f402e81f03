//! Gated linear units: out = act(gate) · up (Shazeer, arXiv 2002.05202).

use crate::error::check_len;
use crate::par::{PIECE, Parts};
use crate::profile::per_element;
use crate::simd::math::{normal, sigmoid};
use crate::simd::{Simd, simd_fn};
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
    let _span = dev.profiler().kernel("glu forward", || per_element(gate.len(), 5, 12));
    dev.team().for_chunks_mut(out, PIECE, &|i, out| {
        let r = i * PIECE..i * PIECE + out.len();
        forward_piece(dev.isa(), act, &gate[r.clone()], &up[r], out);
    });
    Ok(())
}

/// (act(x), act′(x)). No tanh is needed: GELU's ½·(1 + tanh z) is sigmoid(2z).
#[inline(always)]
fn value_and_slope<S: Simd>(s: S, act: Act, x: S::V) -> (S::V, S::V) {
    match act {
        Act::Silu => {
            let (p, q) = sigmoid(s, x);
            let value = s.mul(x, p);
            (value, s.fma(value, q, p))
        }
        Act::Gelu => {
            let (p, density) = normal(s, x);
            (s.mul(x, p), s.fma(x, density, p))
        }
        Act::GeluTanh => {
            // 2·√(2/π)·(x + 0.044715·x³) and its derivative.
            let (a, b) = (s.splat(1.595_769), s.splat(0.071_354_814));
            let square = s.mul(x, x);
            let (p, q) = sigmoid(s, s.mul(x, s.fma(b, square, a)));
            let value = s.mul(x, p);
            let inner = s.fma(s.mul(b, s.splat(3.0)), square, a);
            (value, s.fma(s.mul(value, q), inner, p))
        }
    }
}

simd_fn! {
    fn forward_piece(s, act: Act, gate: &[f32], up: &[f32], out: &mut [f32]) {
        let mut i = 0;
        while i < out.len() {
            let (value, _) = value_and_slope(s, act, s.load(gate, i));
            s.store(out, i, s.mul(value, s.load(up, i)));
            i += S::LANES;
        }
    }
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
    let _span = dev.profiler().kernel("glu backward", || per_element(gate.len(), 10, 20));
    let dup = Parts::new(dup);
    dev.team().for_chunks_mut(dgate, PIECE, &|i, dgate| {
        let r = i * PIECE..i * PIECE + dgate.len();
        // SAFETY: tasks handle different elements.
        let dup = unsafe { dup.get(r.clone()) };
        backward_piece(dev.isa(), act, &gate[r.clone()], &up[r.clone()], &dout[r], dgate, dup);
    });
    Ok(())
}

simd_fn! {
    fn backward_piece(
        s,
        act: Act,
        gate: &[f32],
        up: &[f32],
        dout: &[f32],
        dgate: &mut [f32],
        dup: &mut [f32],
    ) {
        let mut i = 0;
        while i < dgate.len() {
            let (value, slope) = value_and_slope(s, act, s.load(gate, i));
            let g = s.load(dout, i);
            s.store(dgate, i, s.mul(s.mul(g, s.load(up, i)), slope));
            s.store(dup, i, s.mul(g, value));
            i += S::LANES;
        }
    }
}
