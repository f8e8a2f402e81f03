//! The curve in characters: for the end of a run in a terminal.

use super::Curve;

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A line of blocks, `width` wide at most: each is the mean of a stretch of values. Values that are not finite count
/// as nothing; an empty stretch is a blank.
pub fn sparkline(values: &[f64], width: usize) -> String {
    let means = buckets(values, width);
    let finite = means.iter().copied().filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (v.min(l), v.max(h)));
    let block = |v: &f64| {
        if !v.is_finite() {
            return ' ';
        }
        let share = if high > low { (v - low) / (high - low) } else { 0.5 };
        BLOCKS[((share * 7.0).round() as usize).min(7)]
    };
    means.iter().map(block).collect()
}

/// A plot of `width` × `height` characters and its axes: `·` for the logged losses (the mean of each column), `●` for
/// evaluation. Empty where there is nothing to draw.
pub fn ascii(curve: &Curve, width: usize, height: usize) -> String {
    let (width, height) = (width.max(10), height.max(3));
    let all = || curve.train.iter().chain(&curve.eval).filter(|p| p.0.is_finite() && p.1.is_finite());
    if all().next().is_none() {
        return String::new();
    }
    let bounds = |value: fn(&(f64, f64)) -> f64| {
        all().map(value).fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (v.min(l), v.max(h)))
    };
    let (x_low, x_high) = bounds(|p| p.0);
    // Columns show means, so the axis covers means: one spike does not squeeze the rest.
    let columns = column_means(curve, x_low, x_high, width);
    let shown = columns.iter().copied().chain(curve.eval.iter().map(|p| p.1)).filter(|v| v.is_finite());
    let (y_low, y_high) = shown.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (v.min(l), v.max(h)));
    let row = |y: f64| {
        let share = if y_high > y_low { (y - y_low) / (y_high - y_low) } else { 0.5 };
        ((1.0 - share) * (height - 1) as f64).round() as usize
    };
    let mut grid = vec![vec![' '; width]; height];
    for (x, y) in columns.iter().enumerate().filter(|(_, y)| y.is_finite()) {
        grid[row(*y)][x] = '·';
    }
    for (x, y) in curve.eval.iter().filter(|p| p.1.is_finite()) {
        grid[row(*y)][column(*x, x_low, x_high, width)] = '●';
    }
    let mut out = String::new();
    for (i, cells) in grid.iter().enumerate() {
        let label = if i == 0 {
            format!("{y_high:8.3}")
        } else if i == height - 1 {
            format!("{y_low:8.3}")
        } else {
            " ".repeat(8)
        };
        out += &format!("{label} │{}\n", cells.iter().collect::<String>().trim_end());
    }
    let (first, last) = (format!("{x_low:.0}"), format!("{x_high:.0}"));
    let gap = width.saturating_sub(first.len() + last.len());
    out += &format!("{:8} └{}\n{:10}{first}{}{last}  step\n", "", "─".repeat(width), "", " ".repeat(gap));
    out
}

fn column(x: f64, low: f64, high: f64, width: usize) -> usize {
    if high > low { ((x - low) / (high - low) * (width - 1) as f64).round() as usize } else { 0 }
}

fn column_means(curve: &Curve, low: f64, high: f64, width: usize) -> Vec<f64> {
    let mut sums = vec![(0.0, 0usize); width];
    for (x, y) in curve.train.iter().filter(|p| p.0.is_finite() && p.1.is_finite()) {
        let cell = &mut sums[column(*x, low, high, width)];
        *cell = (cell.0 + y, cell.1 + 1);
    }
    sums.into_iter().map(|(sum, n)| sum / n as f64).collect()
}

fn buckets(values: &[f64], width: usize) -> Vec<f64> {
    let count = values.len().min(width);
    let mean = |i: usize| {
        let part = &values[i * values.len() / count..(i + 1) * values.len() / count];
        let finite: Vec<_> = part.iter().filter(|v| v.is_finite()).collect();
        finite.iter().copied().sum::<f64>() / finite.len() as f64
    };
    (0..count).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparklines() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 20), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[3.0, 3.0, 1.0, 1.0], 2), "█▁");
        assert_eq!(sparkline(&[1.0, f64::NAN, 2.0], 3), "▁ █");
        assert_eq!(sparkline(&[], 5), "");
        assert_eq!(sparkline(&[2.0, 2.0], 5), "▅▅");
    }

    #[test]
    fn a_falling_loss_falls() {
        let train: Vec<_> = (0..=20).map(|i| (i as f64, 4.0 - 0.1 * i as f64)).collect();
        let text = ascii(&Curve { train, eval: vec![(20.0, 3.0)], ..Curve::default() }, 21, 5);
        let expected = "   4.000 │···
         │   ·····
         │        ·····       ●
         │             ·····
   2.000 │                  ···
         └─────────────────────
          0                  20  step
";
        assert_eq!(text, expected);
        assert_eq!(ascii(&Curve::default(), 20, 5), "");
    }
}
