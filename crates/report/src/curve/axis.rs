//! Axes: which range, and which round numbers along it.

/// Maps values to pixels.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    /// Pixel of `low` and of `high`.
    pixels: (f64, f64),
    /// Distance of the ticks.
    step: f64,
}

impl Axis {
    /// The axis of steps: from 0 or the first step to the last.
    pub(super) fn steps(xs: impl Iterator<Item = f64>, from: f64, to: f64) -> Axis {
        let (low, high) = range(xs.filter(|x| x.is_finite())).unwrap_or((0.0, 1.0));
        // A run that begins at the beginning begins at 0.
        let low = if low <= 0.1 * high { low.min(0.0) } else { low };
        let high = if high > low { high } else { low + 1.0 };
        Axis { low, high, pixels: (from, to), step: tick_step(high - low, 8.0).max(1.0) }
    }

    /// The axis of losses, widened to whole ticks.
    pub(super) fn losses(raw: &[(f64, f64)], smoothed: &[(f64, f64)], eval: &[(f64, f64)], from: f64, to: f64) -> Axis {
        let most = |points: &[(f64, f64)], share: f64| {
            let mut ys: Vec<_> = points.iter().map(|p| p.1).filter(|y| y.is_finite()).collect();
            ys.sort_by(f64::total_cmp);
            ys.truncate((ys.len() as f64 * share).ceil() as usize);
            ys
        };
        // Spikes are a few points; the smoothed line takes longer to come down from one.
        let values = [most(raw, 0.99), most(smoothed, 0.97), most(eval, 1.0)].concat();
        let (mut low, mut high) = range(values.into_iter().filter(|y| y.abs() < 1e12)).unwrap_or((0.0, 1.0));
        if high - low <= 1e-9 * high.abs() {
            let room = if low == 0.0 { 1.0 } else { 0.1 * low.abs() };
            (low, high) = (low - room, high + room);
        }
        let step = tick_step(high - low, 6.0);
        let whole = |value: f64| if (value / step).abs() < 1e9 { value } else { 0.0 };
        let (below, above) = (whole((low / step).floor() * step), whole((high / step).ceil() * step));
        Axis { low: below, high: above.max(below + step), pixels: (from, to), step }
    }

    /// The pixel of a value; NaN for NaN. Values far outside stay at a finite distance.
    pub(super) fn at(&self, value: f64) -> f64 {
        if value.is_nan() {
            return value;
        }
        let share = ((value - self.low) / (self.high - self.low)).clamp(-10.0, 10.0);
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }

    /// Pixel and label of each tick.
    pub(super) fn ticks(&self) -> Vec<(f64, String)> {
        let first = (self.low / self.step).ceil();
        let count = ((self.high - self.low) / self.step).min(50.0) as usize + 1;
        let values = (0..count).map(|i| (first + i as f64) * self.step).filter(|v| *v <= self.high + 1e-6 * self.step);
        values.map(|v| (self.at(v), label(v, self.step))).collect()
    }
}

fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, v| match range {
        None => Some((v, v)),
        Some((low, high)) => Some((v.min(low), v.max(high))),
    })
}

/// 1, 2 or 5 times a power of ten, so that about `count` of them cover `span`.
fn tick_step(span: f64, count: f64) -> f64 {
    let rough = span / count;
    let power = 10f64.powf(rough.log10().floor());
    let digit = [1.0, 2.0, 5.0, 10.0].into_iter().find(|d| d * power >= rough * 0.999).unwrap_or(10.0);
    digit * power
}

/// A number with as many places as its step has; thousands as `20k`, millions as `3M`.
fn label(value: f64, step: f64) -> String {
    let value = if value.abs() < step * 1e-6 { 0.0 } else { value };
    for (size, unit) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if step >= size * 0.999 && value.abs() >= size {
            return format!("{:.0}{unit}", value / size);
        }
    }
    let places = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.places$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_numbers() {
        assert_eq!(tick_step(10.0, 8.0), 2.0);
        assert!((tick_step(0.31, 6.0) - 0.1).abs() < 1e-12);
        assert_eq!(tick_step(900.0, 8.0), 200.0);
        assert_eq!(label(1.5, 0.5), "1.5");
        assert_eq!(label(20_000.0, 5_000.0), "20k");
        assert_eq!(label(1_500.0, 500.0), "1500");
        assert_eq!(label(500.0, 500.0), "500");
        assert_eq!(label(0.0025, 0.0005), "0.0025");
        assert_eq!(label(-1e-20, 0.5), "0.0");
    }

    #[test]
    fn ticks_lie_on_the_axis() {
        let axis = Axis::steps([1.0, 300.0].into_iter(), 0.0, 300.0);
        let labels: Vec<_> = axis.ticks().into_iter().map(|t| t.1).collect();
        assert_eq!(labels, ["0", "50", "100", "150", "200", "250", "300"]);
        assert_eq!(axis.ticks()[1].0, 50.0);
        // A short run has no half steps.
        let labels: Vec<_> = Axis::steps([1.0, 3.0].into_iter(), 0.0, 1.0).ticks().into_iter().map(|t| t.1).collect();
        assert_eq!(labels, ["1", "2", "3"]);
    }
}
