//! Learning rate over steps, as in `transformers`' schedules.

/// The form of the schedule after warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// Stays.
    Constant,
    /// Straight to 0.
    Linear,
    /// `cycles` half-waves to `min_ratio` of the rate.
    Cosine {
        /// 0.5 is one fall from top to bottom.
        cycles: f64,
        /// Floor, as a share of the rate.
        min_ratio: f64,
    },
    /// Warm-up, stable, decay (Hu et al., arXiv 2404.06395).
    Wsd {
        /// Steps that decay at the end.
        decay_steps: u64,
        /// Floor, as a share of the rate.
        min_ratio: f64,
        /// Form of the decay.
        decay: Decay,
    },
}

/// How WSD goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// A straight line.
    Linear,
    /// Half a cosine.
    Cosine,
    /// 1 − √progress.
    OneMinusSqrt,
}

/// A schedule over a run of known length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Highest rate.
    pub lr: f64,
    /// Steps of the linear rise from 0.
    pub warmup_steps: u64,
    /// All steps of the run.
    pub total_steps: u64,
    /// What follows the warm-up.
    pub shape: Shape,
}

impl Schedule {
    /// The rate of the update that follows `done` finished updates.
    pub fn at(&self, done: u64) -> f64 {
        if done < self.warmup_steps {
            return self.lr * done as f64 / self.warmup_steps.max(1) as f64;
        }
        let after = (done - self.warmup_steps) as f64;
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = (after / span).min(1.0);
        let factor = match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear => 1.0 - progress,
            Shape::Cosine { cycles, min_ratio } => {
                let wave = 0.5 * (1.0 + (std::f64::consts::PI * cycles * 2.0 * progress).cos());
                min_ratio + (1.0 - min_ratio) * wave.max(0.0)
            }
            Shape::Wsd { decay_steps, min_ratio, decay } => {
                let begins = self.total_steps.saturating_sub(decay_steps).max(self.warmup_steps);
                if done < begins {
                    1.0
                } else {
                    let p = ((done - begins) as f64 / decay_steps.max(1) as f64).min(1.0);
                    let fall = match decay {
                        Decay::Linear => 1.0 - p,
                        Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * p).cos()),
                        Decay::OneMinusSqrt => 1.0 - p.sqrt(),
                    };
                    min_ratio + (1.0 - min_ratio) * fall
                }
            }
        };
        self.lr * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shape: Shape) -> Schedule {
        Schedule { lr: 2.0, warmup_steps: 4, total_steps: 20, shape }
    }

    #[test]
    fn warm_up_rises_from_zero_and_every_shape_starts_at_the_top() {
        let shapes = [
            Shape::Constant,
            Shape::Linear,
            Shape::Cosine { cycles: 0.5, min_ratio: 0.0 },
            Shape::Wsd { decay_steps: 5, min_ratio: 0.1, decay: Decay::Linear },
        ];
        for s in shapes {
            let s = schedule(s);
            assert_eq!((s.at(0), s.at(2), s.at(4)), (0.0, 1.0, 2.0), "{s:?}");
        }
    }

    #[test]
    fn ends_are_where_they_should_be() {
        assert_eq!(schedule(Shape::Linear).at(12), 1.0);
        assert_eq!(schedule(Shape::Linear).at(20), 0.0);
        let c = schedule(Shape::Cosine { cycles: 0.5, min_ratio: 0.25 });
        assert!((c.at(12) - 1.25).abs() < 1e-12 && (c.at(20) - 0.5).abs() < 1e-12);
        for decay in [Decay::Linear, Decay::Cosine, Decay::OneMinusSqrt] {
            let w = schedule(Shape::Wsd { decay_steps: 5, min_ratio: 0.1, decay });
            assert_eq!(w.at(14), 2.0);
            assert!(w.at(16) < 2.0 && (w.at(20) - 0.2).abs() < 1e-12, "{decay:?}");
        }
    }

    #[test]
    fn a_run_of_warm_up_only_does_not_divide_by_zero() {
        let s = Schedule { lr: 1.0, warmup_steps: 10, total_steps: 10, shape: Shape::Linear };
        assert!(s.at(10).is_finite() && s.at(9) == 0.9);
        let s = Schedule { lr: 1.0, warmup_steps: 0, total_steps: 0, shape: Shape::Linear };
        assert!(s.at(0).is_finite());
    }
}
