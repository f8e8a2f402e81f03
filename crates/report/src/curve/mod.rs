//! The loss curve of a run: one layout, drawn as SVG ([`svg`]), as PNG ([`png`]) and in a terminal
//! ([`ascii`], [`sparkline`]).
//!
//! The layout is a list of plain shapes in pixels, so that both pictures are the same picture. What is drawn: the logged
//! training losses, pale; the same smoothed, strong; the evaluation losses, with dots. A single spike does not squeeze
//! the rest into a line: the axis covers what is smoothed and all but the highest hundredth of what is raw.

mod axis;
mod raster;
mod svg;
mod terminal;

use std::path::{Path, PathBuf};

use crate::entry::Entry;
use crate::error::Result;

pub use terminal::{ascii, sparkline};

/// Width of both pictures, in pixels.
pub const WIDTH: usize = 1000;
/// Height of both pictures, in pixels.
pub const HEIGHT: usize = 600;

/// What a curve shows. Points are (step, loss), in the order of the steps; losses that are not finite leave a gap.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Curve {
    /// Title above the picture.
    pub title: String,
    /// Training losses.
    pub train: Vec<(f64, f64)>,
    /// Evaluation losses.
    pub eval: Vec<(f64, f64)>,
}

impl Curve {
    /// The losses among `entries` (`loss` and `eval_loss`).
    pub fn from_entries(title: &str, entries: &[Entry]) -> Self {
        let points = |name: &str| entries.iter().filter_map(|e| Some((e.step as f64, e.number(name)?))).collect();
        Curve { title: title.into(), train: points("loss"), eval: points("eval_loss") }
    }

    /// The training losses, smoothed.
    pub fn smoothed(&self) -> Vec<(f64, f64)> {
        smooth(&self.train)
    }
}

/// Writes `training_loss.svg` and `training_loss.png` into `dir`, each as a whole, and returns their paths.
///
/// # Errors
/// A file cannot be written.
pub fn write(curve: &Curve, dir: &Path) -> Result<[PathBuf; 2]> {
    let paths = [dir.join("training_loss.svg"), dir.join("training_loss.png")];
    phalanx_formats::atomic::write_bytes(&paths[0], svg(curve).as_bytes())?;
    phalanx_formats::atomic::write_bytes(&paths[1], &png(curve))?;
    Ok(paths)
}

/// The curve as an SVG document.
pub fn svg(curve: &Curve) -> String {
    svg::document(&layout(curve))
}

/// The curve as the bytes of a PNG file.
pub fn png(curve: &Curve) -> Vec<u8> {
    raster::file(&layout(curve))
}

/// Each point becomes the mean of all, with weights that halve every hundredth of the curve (at least every 2 points) to
/// both sides: unlike a moving average from the left, the line does not lag behind a falling loss. Gaps stay gaps.
fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let half_life = (points.len() as f64 / 100.0).max(2.0);
    let keep = 0.5f64.powf(1.0 / half_life);
    // Weighted sum and sum of weights of everything up to a point, the point included, from either side.
    let sweep = |points: &mut dyn Iterator<Item = &(f64, f64)>| -> Vec<(f64, f64)> {
        let mut state = (0.0, 0.0);
        points
            .map(|&(_, y)| {
                let (value, weight) = if y.is_finite() { (y, 1.0) } else { (0.0, 0.0) };
                state = (keep * state.0 + value, keep * state.1 + weight);
                state
            })
            .collect()
    };
    let before = sweep(&mut points.iter());
    let mut after = sweep(&mut points.iter().rev());
    after.reverse();
    let mean = |i: usize| {
        let (x, y) = points[i];
        // The point itself is in both sums.
        let sum = before[i].0 + after[i].0 - y;
        let weight = before[i].1 + after[i].1 - 1.0;
        (x, if y.is_finite() { sum / weight } else { f64::NAN })
    };
    (0..points.len()).map(mean).collect()
}

/// A colour, 8 bits a channel.
type Colour = [u8; 3];

const INK: Colour = [0x33, 0x38, 0x42];
const GREY: Colour = [0xe3, 0xe6, 0xea];
const BLUE: Colour = [0x1f, 0x6f, 0xc4];
const ORANGE: Colour = [0xe0, 0x6c, 0x1d];
const WHITE: Colour = [0xff, 0xff, 0xff];

/// Which end of a text its position is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// A rectangle: left, top, right, bottom.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Area {
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
}

/// What both pictures are made of. Positions are in pixels, y downwards.
#[derive(Debug, Clone, PartialEq)]
enum Shape {
    /// Straight lines through points, drawn inside `clip` only.
    Line { points: Vec<(f64, f64)>, width: f64, colour: Colour, opacity: f64, clip: Area },
    /// A filled circle.
    Dot { at: (f64, f64), radius: f64, colour: Colour },
    /// A line of text whose middle height is `at.1`.
    Text { at: (f64, f64), text: String, large: bool, anchor: Anchor, colour: Colour },
}

fn layout(curve: &Curve) -> Vec<Shape> {
    let plot = Area { left: 78.0, top: 62.0, right: WIDTH as f64 - 28.0, bottom: HEIGHT as f64 - 62.0 };
    let whole = Area { left: 0.0, top: 0.0, right: WIDTH as f64, bottom: HEIGHT as f64 };
    let smoothed = curve.smoothed();
    let xs = curve.train.iter().chain(&curve.eval).map(|p| p.0);
    let x_axis = axis::Axis::steps(xs, plot.left, plot.right);
    let y_axis = axis::Axis::losses(&curve.train, &smoothed, &curve.eval, plot.bottom, plot.top);
    let text =
        |x, y, text: &str, anchor| Shape::Text { at: (x, y), text: text.into(), large: false, anchor, colour: INK };

    let mut shapes = vec![];
    let mut rule = |points, colour, width| {
        shapes.push(Shape::Line { points, width, colour, opacity: 1.0, clip: whole });
    };
    for (y, _) in y_axis.ticks() {
        rule(vec![(plot.left, y), (plot.right, y)], GREY, 1.0);
    }
    rule(vec![(plot.left, plot.top), (plot.left, plot.bottom), (plot.right, plot.bottom)], INK, 1.2);
    for (x, _) in x_axis.ticks() {
        rule(vec![(x, plot.bottom), (x, plot.bottom + 5.0)], INK, 1.2);
    }
    for (x, label) in x_axis.ticks() {
        shapes.push(text(x, plot.bottom + 19.0, &label, Anchor::Middle));
    }
    for (y, label) in y_axis.ticks() {
        shapes.push(text(plot.left - 10.0, y, &label, Anchor::End));
    }
    shapes.push(text((plot.left + plot.right) / 2.0, plot.bottom + 44.0, "step", Anchor::Middle));
    shapes.push(text(plot.left, plot.top - 16.0, "loss", Anchor::Middle));
    let title = Shape::Text {
        at: (WIDTH as f64 / 2.0, 24.0),
        text: curve.title.clone(),
        large: true,
        anchor: Anchor::Middle,
        colour: INK,
    };
    shapes.push(title);

    let place = |points: &[(f64, f64)]| points.iter().map(|p| (x_axis.at(p.0), y_axis.at(p.1))).collect::<Vec<_>>();
    let line = |points, width, colour, opacity, clip| Shape::Line { points, width, colour, opacity, clip };
    shapes.push(line(place(&curve.train), 1.3, BLUE, 0.35, plot));
    shapes.push(line(place(&smoothed), 2.4, BLUE, 1.0, plot));
    if !curve.eval.is_empty() {
        shapes.push(line(place(&curve.eval), 2.4, ORANGE, 1.0, plot));
        let dots = place(&curve.eval).into_iter().filter(|p| p.1.is_finite());
        shapes.extend(dots.map(|at| Shape::Dot { at, radius: 4.0, colour: ORANGE }));
    }
    legend(curve, plot, whole, &mut shapes);
    shapes
}

/// The names of the lines, at the upper right, where a falling loss leaves room.
fn legend(curve: &Curve, plot: Area, whole: Area, shapes: &mut Vec<Shape>) {
    let mut rows = vec![("training", BLUE, 0.35, 1.3), ("training, smoothed", BLUE, 1.0, 2.4)];
    if !curve.eval.is_empty() {
        rows.push(("evaluation", ORANGE, 1.0, 2.4));
    }
    let left = plot.right - 208.0;
    for (i, (name, colour, opacity, width)) in rows.into_iter().enumerate() {
        let y = plot.top + 14.0 + 23.0 * i as f64;
        shapes.push(Shape::Line { points: vec![(left, y), (left + 30.0, y)], width, colour, opacity, clip: whole });
        if colour == ORANGE {
            shapes.push(Shape::Dot { at: (left + 15.0, y), radius: 4.0, colour });
        }
        shapes.push(Shape::Text {
            at: (left + 40.0, y),
            text: name.into(),
            large: false,
            anchor: Anchor::Start,
            colour: INK,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn falling() -> Curve {
        let train =
            (1..=200).map(|s| (s as f64, 3.0 * (-(s as f64) / 60.0).exp() + 1.5 + 0.2 * (s as f64 * 1.7).sin()));
        let eval = (1..=4).map(|i| (50.0 * i as f64, 3.1 * (-(i as f64) * 50.0 / 60.0).exp() + 1.6));
        Curve { title: "loss of a run".into(), train: train.collect(), eval: eval.collect() }
    }

    #[test]
    fn smoothing_keeps_a_constant_and_gaps() {
        let flat: Vec<_> = (0..100).map(|i| (i as f64, if i == 50 { f64::NAN } else { 2.0 })).collect();
        for (i, (_, y)) in smooth(&flat).into_iter().enumerate() {
            if i == 50 { assert!(y.is_nan()) } else { assert!((y - 2.0).abs() < 1e-12) }
        }
    }

    #[test]
    fn pictures_of_any_curve() {
        let odd = [
            falling(),
            Curve::default(),
            Curve { train: vec![(1.0, 2.0)], ..Curve::default() },
            Curve { train: vec![(1.0, f64::NAN), (2.0, f64::INFINITY)], ..Curve::default() },
            Curve { train: vec![(5.0, 0.0), (5.0, 0.0)], eval: vec![(5.0, -1e30)], ..Curve::default() },
            Curve { train: vec![(0.0, 1e300), (1e15, 1e-300)], title: "<&\"é\u{4e2d}>".into(), ..Curve::default() },
        ];
        for curve in odd {
            let svg = svg(&curve);
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert!(png(&curve).starts_with(b"\x89PNG"));
            ascii(&curve, 60, 12);
        }
    }

    #[test]
    fn a_spike_does_not_squeeze_the_rest() {
        let mut curve = falling();
        curve.train[100].1 = 1e6;
        // The smoothed line follows the spike a little; the axis must not.
        let shapes = layout(&curve);
        let labels: Vec<_> = shapes
            .iter()
            .filter_map(|s| match s {
                Shape::Text { text, .. } => text.parse::<f64>().ok(),
                _ => None,
            })
            .collect();
        assert!(labels.iter().all(|v| *v < 1000.0), "{labels:?}");
    }
}
