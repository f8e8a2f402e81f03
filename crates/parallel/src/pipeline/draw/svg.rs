//! A schedule as SVG.

use std::fmt::Write;

use super::{Kind, boxes, chunks, figures, heading, number};
use crate::pipeline::{Schedule, Timeline};

const LEFT: f64 = 74.0;
const TOP: f64 = 92.0;
const ROW: f64 = 32.0;
const GAP: f64 = 6.0;
const RIGHT: f64 = 132.0;
const BOTTOM: f64 = 48.0;
const INK: &str = "#1f2430";
const WEAK: &str = "#6b7280";

type Colour = [f64; 3];

/// Forward blue, backward green, its halves teal and amber.
const fn colour(kind: Kind) -> Colour {
    match kind {
        Kind::Forward => [62.0, 110.0, 204.0],
        Kind::Backward => [42.0, 137.0, 88.0],
        Kind::InputGrad => [20.0, 148.0, 160.0],
        Kind::WeightGrad => [222.0, 150.0, 38.0],
    }
}

/// A whole SVG document: a row for each rank, a box for each action with the number of its micro-batch (lighter for later chunks), idle time
/// grey; to the right each rank's idle share and peak of activations in rank shares. A box says on hovering what it is and when.
pub fn svg(schedule: &Schedule, time: &Timeline) -> String {
    let chunk = chunks(schedule);
    let num_chunks = chunk.iter().max().map_or(1, |c| c + 1);
    let spans = || time.ranks.iter().flat_map(|r| &r.spans);
    let shortest = spans().map(|s| s.end - s.start).filter(|d| *d > 0.0).fold(f64::INFINITY, f64::min);
    let total = if time.total > 0.0 { time.total } else { 1.0 };
    // All numbers in one size: that of the longest.
    let digits = schedule.num_micro_batches.saturating_sub(1).to_string().len();
    let plot = (total / shortest * 22.0).clamp(620.0, 2600.0);
    let per_unit = plot / total;
    let rows = time.ranks.len() as f64 * (ROW + GAP) - GAP;
    let (width, height) = (LEFT + plot + RIGHT, TOP + rows + BOTTOM);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    text(&mut out, LEFT, 28.0, 18.0, "start", INK, "bold", &heading(schedule));
    text(&mut out, LEFT, 48.0, 13.0, "start", WEAK, "normal", &figures(time));
    legend(&mut out, time, num_chunks);
    axis(&mut out, total, per_unit, TOP + rows);

    let right = LEFT + plot;
    text(&mut out, right + 62.0, TOP - 10.0, 12.0, "end", WEAK, "normal", "idle");
    text(&mut out, right + 120.0, TOP - 10.0, 12.0, "end", WEAK, "normal", "peak");
    let peaks = time.peak_activations();
    for (r, rank) in time.ranks.iter().enumerate() {
        let y = TOP + r as f64 * (ROW + GAP);
        let middle = y + ROW / 2.0 + 4.5;
        text(&mut out, LEFT - 12.0, middle, 13.0, "end", INK, "normal", &format!("rank {r}"));
        let _ = writeln!(out, "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{plot:.2}\" height=\"{ROW}\" fill=\"#eceef2\"/>");
        for span in &rank.spans {
            let parts = boxes(&span.action);
            let (x, w) = (LEFT + span.start * per_unit, (span.end - span.start) * per_unit);
            let h = ROW / parts.len().max(1) as f64;
            let _ = write!(
                out,
                "<g><title>{}: {} to {}</title>",
                span.action.to_string().replace('+', " + "),
                number(span.start),
                number(span.end)
            );
            for (i, (kind, part)) in parts.into_iter().enumerate() {
                let fill = shade(colour(kind), chunk[part.stage], num_chunks);
                block(&mut out, x, y + i as f64 * h, w, h, fill, &part.micro_batch.to_string(), digits);
            }
            out += "</g>\n";
        }
        let idle = 100.0 * rank.idle / total;
        text(&mut out, right + 62.0, middle, 12.0, "end", INK, "normal", &format!("{idle:.1} %"));
        text(&mut out, right + 120.0, middle, 12.0, "end", INK, "normal", &number(peaks[r]));
    }
    out += "</svg>\n";
    out
}

/// A box with a number, if there is room for one.
fn block(out: &mut String, x: f64, y: f64, w: f64, h: f64, fill: Colour, label: &str, digits: usize) {
    // A hair of white between neighbours, where there is room for it.
    let hair = if w > 6.0 { 0.5 } else { 0.0 };
    let _ = write!(
        out,
        "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{:.2}\" rx=\"{}\" fill=\"{}\"/>",
        x + hair,
        y + hair,
        (w - 2.0 * hair).max(0.0),
        h - 2.0 * hair,
        if w > 10.0 { 2 } else { 0 },
        hex(fill)
    );
    let size = (h * 0.78).min(13.0).min((w - 3.0) / (0.58 * digits as f64));
    if size >= 6.0 {
        let bright = 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2];
        let ink = if bright > 150.0 { INK } else { "#ffffff" };
        text(out, x + w / 2.0, y + h / 2.0 + 0.36 * size, size, "middle", ink, "normal", label);
    }
}

fn legend(out: &mut String, time: &Timeline, num_chunks: usize) {
    let all = || time.ranks.iter().flat_map(|r| &r.spans).map(|s| boxes(&s.action));
    let (mut x, y) = (LEFT, 62.0);
    for kind in Kind::ALL {
        if all().flatten().any(|(k, _)| k == kind) {
            let words = format!("{} {}", kind.letter(), kind.words());
            let _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{}\"/>",
                hex(colour(kind))
            );
            text(out, x + 17.0, y + 10.5, 12.0, "start", INK, "normal", &words);
            x += 34.0 + 6.4 * words.len() as f64;
        }
    }
    let _ = writeln!(out, "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"#dfe2e8\"/>");
    text(out, x + 17.0, y + 10.5, 12.0, "start", INK, "normal", "idle");
    x += 54.0;
    let mut notes = vec!["peak: activations held, in rank shares"];
    if num_chunks > 1 {
        notes.push("lighter: later chunk");
    }
    if all().any(|b| b.len() > 1) {
        notes.push("split box: both at once");
    }
    text(out, x, y + 10.5, 12.0, "start", WEAK, "normal", &notes.join("; "));
}

fn axis(out: &mut String, total: f64, per_unit: f64, y: f64) {
    let rough = 70.0 / per_unit;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|d| d * power).find(|s| *s >= rough * 0.999).unwrap_or(10.0 * power);
    for i in 0..=(total / step + 1e-6).min(1000.0) as usize {
        let t = i as f64 * step;
        let x = LEFT + t * per_unit;
        let _ = writeln!(out, "<path d=\"M{x:.2} {:.2}v5\" stroke=\"{WEAK}\"/>", y + 3.0);
        text(out, x, y + 21.0, 11.0, "middle", WEAK, "normal", &number(t));
    }
    text(out, LEFT + total * per_unit / 2.0, y + 40.0, 12.0, "middle", WEAK, "normal", "time");
}

fn text(out: &mut String, x: f64, y: f64, size: f64, anchor: &str, fill: &str, weight: &str, words: &str) {
    let clean: String = words.chars().filter(|c| !c.is_control()).collect();
    let clean = clean.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size:.1}\" text-anchor=\"{anchor}\" fill=\"{fill}\" font-weight=\"{weight}\">{clean}</text>"
    );
}

/// Towards white with every chunk.
fn shade(colour: Colour, chunk: usize, num_chunks: usize) -> Colour {
    let share = if num_chunks > 1 { 0.62 * chunk as f64 / (num_chunks - 1) as f64 } else { 0.0 };
    colour.map(|c| c + (255.0 - c) * share)
}

fn hex(colour: Colour) -> String {
    let [r, g, b] = colour.map(|c| c.round() as u8);
    format!("#{r:02x}{g:02x}{b:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Durations, ScheduleKind, build, simulate};

    #[test]
    fn every_box_is_there() {
        for kind in ScheduleKind::ALL {
            let schedule = build(kind, 4, 8, None).unwrap();
            let time = simulate(&schedule, &Durations::new(1.0, 1.0, 1.0)).unwrap();
            let picture = svg(&schedule, &time);
            let actions = schedule.ranks.iter().flatten().count();
            assert_eq!(picture.matches("<title>").count(), actions, "{kind}");
            assert!(picture.contains("8 micro-batches") && picture.ends_with("</svg>\n"));
            assert!(!picture.contains("NaN") && !picture.contains("inf"));
        }
    }

    #[test]
    fn names_are_escaped_and_nothing_takes_time() {
        let mut schedule = build(ScheduleKind::GPipe, 1, 1, None).unwrap();
        schedule.name = "<b>&".into();
        let time = simulate(&schedule, &Durations::new(0.0, 0.0, 0.0)).unwrap();
        let picture = svg(&schedule, &time);
        assert!(picture.contains("&lt;b&gt;&amp;: 1 rank, 1 micro-batch<"), "{picture}");
        assert!(!picture.contains("NaN"));
    }
}
