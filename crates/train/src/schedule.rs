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
    /// Warm-up, stable, decay (Hu et al., arXiv 2404.06395). Rises from the floor, not from 0, as in `transformers`.
    Wsd {
        /// Form of the warm-up.
        rise: Slope,
        /// Steps at the full rate.
        stable_steps: u64,
        /// Steps that decay after them.
        decay_steps: u64,
        /// Form of the decay.
        fall: Slope,
        /// Half-waves of a cosine decay; 0.5 is one fall from top to bottom.
        cycles: f64,
        /// Floor, as a share of the rate; stays after the decay.
        min_ratio: f64,
    },
}

/// How WSD goes up or down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slope {
    /// A straight line.
    Linear,
    /// A piece of a cosine.
    Cosine,
    /// 1 − √progress.
    OneMinusSqrt,
}

impl Slope {
    /// From 0 to 1.
    fn up(self, progress: f64) -> f64 {
        match self {
            Slope::Linear => progress,
            Slope::Cosine => 0.5 * (1.0 - (std::f64::consts::PI * progress).cos()),
            Slope::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
        }
    }

    /// From 1 to 0 (to wherever `cycles` end, for a cosine).
    fn down(self, progress: f64, cycles: f64) -> f64 {
        match self {
            Slope::Linear => 1.0 - progress,
            Slope::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * cycles * 2.0 * progress).cos()),
            Slope::OneMinusSqrt => 1.0 - progress.sqrt(),
        }
    }
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
            let progress = done as f64 / self.warmup_steps.max(1) as f64;
            return self.lr
                * match self.shape {
                    Shape::Wsd { rise, min_ratio, .. } => min_ratio + (1.0 - min_ratio) * rise.up(progress),
                    _ => progress,
                };
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
            Shape::Wsd { stable_steps, decay_steps, fall, cycles, min_ratio, .. } => {
                let begins = self.warmup_steps + stable_steps;
                if done < begins {
                    1.0
                } else if done < begins + decay_steps {
                    let p = (done - begins) as f64 / decay_steps.max(1) as f64;
                    (min_ratio + (1.0 - min_ratio) * fall.down(p, cycles)).max(0.0)
                } else {
                    min_ratio
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

    fn wsd(fall: Slope, min_ratio: f64) -> Shape {
        Shape::Wsd { rise: Slope::Linear, stable_steps: 11, decay_steps: 5, fall, cycles: 0.5, min_ratio }
    }

    #[test]
    fn warm_up_rises_from_zero_and_every_shape_starts_at_the_top() {
        let shapes =
            [Shape::Constant, Shape::Linear, Shape::Cosine { cycles: 0.5, min_ratio: 0.0 }, wsd(Slope::Linear, 0.0)];
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
        for decay in [Slope::Linear, Slope::Cosine, Slope::OneMinusSqrt] {
            let w = schedule(wsd(decay, 0.1));
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
