//! The vectors of every instruction set of this machine, and how exact their functions are.

use half::bf16;

use super::math::{exp, normal, sigmoid};
use super::simd_fn;
use crate::Isa;
use crate::glu::erf;

simd_fn! {
    fn map(s, which: u8, x: &[f32], y: &mut [f32]) {
        let mut i = 0;
        while i < x.len() {
            let v = s.load(x, i);
            s.store(y, i, match which {
                0 => exp(s, v),
                1 => sigmoid(s, v).0,
                2 => sigmoid(s, v).1,
                3 => normal(s, v).0,
                4 => normal(s, v).1,
                5 => s.round(v),
                6 => s.sqrt(v),
                _ => s.fma(s.abs(v), s.splat(2.0), s.fnma(v, v, s.splat(1.0))),
            });
            i += S::LANES;
        }
    }
}

fn apply(isa: Isa, which: u8, x: &[f32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len()];
    map(isa, which, x, &mut y);
    y
}

/// Distance in units in the last place of the reference.
fn ulps(got: f32, want: f64) -> f64 {
    let w = want as f32;
    let ulp = f64::from(f32::from_bits(w.abs().to_bits() + 1)) - f64::from(w.abs());
    (f64::from(got) - want).abs() / ulp
}

#[test]
fn exp_is_within_two_ulps_down_to_the_subnormals() {
    let x: Vec<f32> = (0..200_000).map(|i| -104.0 + i as f32 * (192.5 / 200_000.0)).collect();
    for isa in Isa::available() {
        for (x, y) in x.iter().zip(apply(isa, 0, &x)) {
            let e = ulps(y, f64::from(*x).exp());
            assert!(e < 2.0, "{isa}: e^{x} = {y}, off by {e} ulp");
        }
        let edges = [f32::NEG_INFINITY, -1e30, -105.0, 0.0, -0.0, 89.0, f32::INFINITY, f32::NAN];
        let y = apply(isa, 0, &edges);
        assert_eq!(y[..7], [0.0, 0.0, 0.0, 1.0, 1.0, f32::INFINITY, f32::INFINITY], "{isa}");
        assert!(y[7].is_nan());
    }
}

#[test]
fn sigmoid_and_normal_are_exact_in_the_tails() {
    let x: Vec<f32> = (0..40_001).map(|i| (i as f32 - 20_000.0) / 20_000.0 * 13.0).collect();
    for isa in Isa::available() {
        let y: Vec<_> = (1..5).map(|which| apply(isa, which, &x)).collect();
        for (i, &x) in x.iter().enumerate() {
            let x = f64::from(x);
            let sigmoid = 1.0 / (1.0 + (-x).exp());
            assert!(ulps(y[0][i], sigmoid) < 4.0 && ulps(y[1][i], 1.0 / (1.0 + x.exp())) < 4.0, "{isa} at {x}");
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let below = 0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2));
            // x²/2 is rounded before the exponential: relative error grows with x².
            let bound = 6e-7 + 1e-7 * x * x;
            assert!((f64::from(y[3][i]) / density - 1.0).abs() < bound, "{isa} at {x}");
            assert!((f64::from(y[2][i]) - below).abs() < bound * below + 2e-12, "{isa} at {x}: {} {below}", y[2][i]);
        }
    }
}

#[test]
fn the_last_elements_get_the_bits_of_full_registers() {
    let long: Vec<f32> = (0..64).map(|i| (i as f32 - 30.0) * 0.37).collect();
    for isa in Isa::available() {
        for which in 0..8 {
            let whole = apply(isa, which, &long);
            for start in 0..20 {
                for n in 0..20 {
                    let part = apply(isa, which, &long[start..start + n]);
                    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(
                        bits(&part),
                        bits(&whole[start..start + n]),
                        "{isa}, function {which}, {n} from {start}"
                    );
                }
            }
        }
    }
}

simd_fn! {
    fn fold(s, x: &[f32], fill: f32) -> (f32, f32) {
        let v = s.load_or(x, 0, fill);
        (s.sum(v), s.largest(v))
    }
}

simd_fn! {
    fn lanes(s) -> usize {
        let _ = s;
        S::LANES
    }
}

#[test]
fn folding_covers_every_lane_and_the_filling() {
    for isa in Isa::available() {
        let n = lanes(isa);
        for at in 0..n {
            let mut x = vec![0.0; n];
            x[at] = 3.0;
            assert_eq!(fold(isa, &x, 0.0), (3.0, 3.0), "{isa}, lane {at}");
            assert_eq!(fold(isa, &x[..at], 2.0), (2.0 * (n - at) as f32, 2.0), "{isa}, {at} values");
        }
    }
}

simd_fn! {
    fn through_bf16(s, x: &[bf16], y: &mut [bf16]) {
        let mut i = 0;
        while i < x.len() {
            s.store_bf16(y, i, s.load_bf16(x, i));
            i += S::LANES;
        }
    }
}

#[test]
fn every_bf16_survives_widening_and_rounding() {
    let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).chain([bf16::ONE; 3]).collect();
    for isa in Isa::available() {
        let mut y = vec![bf16::ZERO; all.len()];
        through_bf16(isa, &all, &mut y);
        for (x, y) in all.iter().zip(&y) {
            assert!(x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()), "{isa}: {x:?} became {y:?}");
        }
    }
}
