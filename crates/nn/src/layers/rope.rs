//! Frequencies of rotary embeddings and their extensions to longer contexts.

use std::sync::Arc;

use phalanx_tensor::{Category, Tensor};

use crate::{Cx, Result};

/// How the frequencies are changed to reach beyond the trained context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Positions divided by a factor (Chen et al., arXiv 2306.15595).
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Long wavelengths divided, short ones kept, a ramp between (Llama 3.1).
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above original / this are divided.
        low_freq_factor: f64,
        /// Wavelengths below original / this are kept.
        high_freq_factor: f64,
        /// Trained context.
        original_max_position: f64,
    },
    /// Interpolation by parts with a temperature (Peng et al., arXiv 2309.00071).
    Yarn {
        /// Divisor of interpolated frequencies.
        factor: f64,
        /// Dimensions turning more often than this over the trained context are kept.
        beta_fast: f64,
        /// Dimensions turning less often than this are interpolated.
        beta_slow: f64,
        /// Trained context.
        original_max_position: f64,
        /// Factor of cos and sin; from `factor` if not given.
        attention_factor: f64,
        /// Whether the borders of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
}

/// What was wrong with a rotary configuration.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct RopeError(pub String);

/// A rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base θ of the frequencies.
    pub theta: f64,
    /// Rotary dimensions R, even.
    pub dim: usize,
    /// Extension.
    pub scaling: RopeScaling,
}

/// Angles of the rows of one batch, shared by all layers.
#[derive(Clone)]
pub struct RopeTables {
    config: Arc<RopeConfig>,
    /// cos [T, R/2].
    pub cos: Tensor,
    /// sin [T, R/2].
    pub sin: Tensor,
}

impl RopeConfig {
    /// The factor of cos and sin that YaRN uses when a config names none: 0.1·ln(factor) + 1.
    pub fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
        let get = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        match (mscale, mscale_all_dim) {
            (Some(a), Some(b)) if a != 0.0 && b != 0.0 => get(a) / get(b),
            _ => get(1.0),
        }
    }

    /// Angle per position of each of the R/2 pairs, and the factor of cos and sin.
    pub fn inv_freq(&self) -> (Vec<f64>, f64) {
        let half = self.dim / 2;
        let base: Vec<f64> = (0..half).map(|i| self.theta.powf(-2.0 * i as f64 / self.dim as f64)).collect();
        let two_pi = 2.0 * std::f64::consts::PI;
        match self.scaling {
            RopeScaling::Default => (base, 1.0),
            RopeScaling::Linear { factor } => (base.iter().map(|f| f / factor).collect(), 1.0),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position: old,
            } => {
                let scaled = base.iter().map(|&f| {
                    let wavelength = two_pi / f;
                    if wavelength > old / low {
                        f / factor
                    } else if wavelength < old / high {
                        f
                    } else {
                        let smooth = (old / wavelength - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                });
                (scaled.collect(), 1.0)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, truncate } => {
                let border = |turns: f64| {
                    self.dim as f64 * (original_max_position / (turns * two_pi)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (border(beta_fast), border(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(self.dim as f64 - 1.0);
                if low == high {
                    high += 0.001;
                }
                let scaled = base.iter().enumerate().map(|(i, &f)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                });
                (scaled.collect(), attention_factor)
            }
        }
    }

    /// The angles of the batch in `cx`; computed by the first layer that asks.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn tables(self: &Arc<Self>, cx: &Cx) -> Result<RopeTables> {
        let env = cx.env();
        if let Some(t) = env.rope.get().filter(|t| Arc::ptr_eq(&t.config, self)) {
            return Ok(t.clone());
        }
        let positions = &env.batch().positions;
        let half = self.dim / 2;
        let (freq, factor) = self.inv_freq();
        let mut cos = cx.rt().empty(&[positions.len(), half], phalanx_tensor::DType::F32, Category::Activations)?;
        let mut sin = cx.rt().empty(&[positions.len(), half], phalanx_tensor::DType::F32, Category::Activations)?;
        {
            let (c, s) = (cos.f32_mut()?, sin.f32_mut()?);
            for (i, &p) in positions.iter().enumerate() {
                for (j, &f) in freq.iter().enumerate() {
                    // The angle is rounded to f32 as every published model was trained with it.
                    let angle = f64::from(p as f32 * f as f32);
                    c[i * half + j] = (angle.cos() * factor) as f32;
                    s[i * half + j] = (angle.sin() * factor) as f32;
                }
            }
        }
        let tables = RopeTables { config: Arc::clone(self), cos, sin };
        // A second rotary configuration in one model computes its own each time; the first one keeps the place.
        let _ = env.rope.set(tables.clone());
        Ok(tables)
    }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::Runtime;

    use super::*;
    use crate::{Batch, Env};

    #[test]
    fn another_batch_of_the_same_length_has_its_own_angles() {
        let rope = Arc::new(RopeConfig { theta: 10000.0, dim: 4, scaling: RopeScaling::Default });
        let one = Env::new(Runtime::new(1), Batch::causal(&[4]));
        let first = rope.tables(&Cx::eval(&one)).unwrap();
        let two = rope.tables(&Cx::eval(&one.for_batch(Batch::causal(&[2, 2]), 0))).unwrap();
        let (a, b) = (first.sin.f32().unwrap(), two.sin.f32().unwrap());
        assert_eq!((&a[..4], &b[4..]), (&b[..4], &a[..4]), "both sequences begin at position 0");
        assert_ne!(a[4..], b[4..]);
    }

    #[test]
    fn linear_and_llama3_and_yarn_scale_only_what_they_should() {
        let base = RopeConfig { theta: 10000.0, dim: 16, scaling: RopeScaling::Default };
        let (f, one) = base.inv_freq();
        assert_eq!((f[0], one), (1.0, 1.0));
        let lin = RopeConfig { scaling: RopeScaling::Linear { factor: 4.0 }, ..base.clone() }.inv_freq().0;
        assert!(lin.iter().zip(&f).all(|(a, b)| a * 4.0 == *b));
        let l3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 64.0,
        };
        let l3 = RopeConfig { scaling: l3, ..base.clone() }.inv_freq().0;
        assert_eq!(l3[0], f[0]);
        assert!((l3[7] - f[7] / 8.0).abs() < 1e-15);
        let factor = RopeConfig::yarn_attention_factor(4.0, None, None);
        assert!((factor - 1.138_629_436_111_989).abs() < 1e-12);
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 2048.0,
            attention_factor: factor,
            truncate: true,
        };
        let (y, m) = RopeConfig { scaling: yarn, ..base }.inv_freq();
        assert_eq!(m, factor);
        assert_eq!(y[0], f[0]);
        assert!((y[7] - f[7] / 4.0).abs() < 1e-15);
    }
}
