//! A schedule for a terminal.

use std::fmt::Write;

use super::{Kind, boxes, chunks, figures, heading, number};
use crate::pipeline::{Part, Schedule, Timeline};

/// How a schedule is drawn as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Columns of the terminal. What does not fit is drawn with one letter a column, and broken into pieces if need be.
    pub width: usize,
    /// Whether kinds have colours (ANSI escape sequences).
    pub colour: bool,
}

impl Default for TextOptions {
    /// 120 columns, no colour.
    fn default() -> Self {
        TextOptions { width: 120, colour: false }
    }
}

/// One column a unit of time, the unit being the shortest action (or a fraction of it, when others are no multiples of it).
///
/// `F3` is the forward of micro-batch 3 and lasts as long as the `━` after it; with several stages a rank a letter says which one: `F3a` on the
/// first, `F3b` on the second. In an overlapped pair forward and backward stand together: `F5aB2b`. `·` is waiting. At the end of a line stand
/// the rank's idle share and its peak of activations in rank shares.
pub fn text(schedule: &Schedule, time: &Timeline, options: &TextOptions) -> String {
    let unit = unit(time);
    let columns = (time.total / unit).round() as usize;
    let chunked = schedule.num_stages() > schedule.num_ranks();
    let chunk = chunks(schedule);
    let longest = |part: Part| label(part, chunked, &chunk).chars().count() + 1;
    let spans = || time.ranks.iter().flat_map(|r| &r.spans);
    // A column holds the longest label of the shortest action, and a space.
    let width_of = |span: &crate::pipeline::Span| {
        let letters = 1 + boxes(&span.action).iter().map(|(_, p)| longest(*p)).sum::<usize>();
        let over = columns_of(span.start, span.end, unit).max(1);
        letters.div_ceil(over)
    };
    let wide = spans().map(width_of).max().unwrap_or(1);
    let gutter = format!("rank {}", schedule.num_ranks().saturating_sub(1)).len() + 2;
    let tail = "  100.0 %  999.99".len();
    let room = options.width.saturating_sub(gutter + tail).max(10);
    let labelled = columns.saturating_mul(wide) <= room;
    let column = if labelled { wide } else { 1 };

    let mut out = format!("{}\n{}\n", heading(schedule), figures(time));
    let peaks = time.peak_activations();
    let rows: Vec<Vec<Cell>> = time
        .ranks
        .iter()
        .map(|rank| {
            let mut row = vec![Cell { text: ' ', kind: None }; columns * column];
            for c in (0..columns).map(|c| c * column) {
                row[c].text = '·';
            }
            for span in &rank.spans {
                let from = (span.start / unit).round() as usize * column;
                let to = ((span.end / unit).round() as usize * column).min(row.len());
                let parts = boxes(&span.action);
                fill(&mut row[from.min(to)..to], &parts, labelled, chunked, &chunk);
            }
            row
        })
        .collect();
    let per_piece = if labelled { columns * column } else { room };
    let pieces = (columns * column).div_ceil(per_piece.max(1)).max(1);
    for piece in 0..pieces {
        let from = piece * per_piece;
        if pieces > 1 {
            let _ = writeln!(out, "\n{:gutter$}from {}", "", number((from / column) as f64 * unit));
        }
        if piece + 1 == pieces {
            let across = gutter + (columns * column).saturating_sub(from) + 2;
            let _ = writeln!(out, "{:across$}   idle  peak", "");
        }
        for (r, row) in rows.iter().enumerate() {
            let cells = &row[from..(from + per_piece).min(row.len())];
            let _ = write!(out, "{:<gutter$}", format!("rank {r}"));
            paint(&mut out, cells, options.colour);
            if piece + 1 == pieces {
                let idle = if time.total > 0.0 { 100.0 * time.ranks[r].idle / time.total } else { 0.0 };
                let _ = write!(out, "  {idle:5.1} %  {}", number(peaks[r]));
            }
            out.push('\n');
        }
    }
    let _ = writeln!(out, "{}", key(time, chunked, labelled));
    out
}

#[derive(Clone, Copy)]
struct Cell {
    text: char,
    kind: Option<Kind>,
}

fn label(part: Part, chunked: bool, chunk: &[usize]) -> String {
    let letter = |c: usize| char::from(b'a' + (c % 26) as u8);
    let suffix = if chunked { letter(chunk[part.stage]).to_string() } else { String::new() };
    format!("{}{suffix}", part.micro_batch)
}

fn fill(cells: &mut [Cell], parts: &[(Kind, Part)], labelled: bool, chunked: bool, chunk: &[usize]) {
    let n = cells.len();
    if !labelled {
        // The letter of the kind; of a pair both, in turn.
        for (i, cell) in cells.iter_mut().enumerate() {
            let kind = parts[i * parts.len() / n].0;
            *cell = Cell { text: kind.letter(), kind: Some(kind) };
        }
        return;
    }
    let mut at = 0;
    for &(kind, part) in parts {
        for c in std::iter::once(kind.letter()).chain(label(part, chunked, chunk).chars()) {
            if at + 1 < n || n == 1 {
                cells[at] = Cell { text: c, kind: Some(kind) };
                at += 1;
            }
        }
    }
    let kind = parts.last().map(|p| p.0);
    for cell in cells.iter_mut().take(n.saturating_sub(1)).skip(at) {
        *cell = Cell { text: '━', kind };
    }
    if let Some(cell) = cells.last_mut()
        && n > 1
    {
        *cell = Cell { text: ' ', kind: None };
    }
}

fn paint(out: &mut String, cells: &[Cell], colour: bool) {
    let code = |kind: Option<Kind>| match kind {
        Some(Kind::Forward) => "34",
        Some(Kind::Backward) => "32",
        Some(Kind::InputGrad) => "36",
        Some(Kind::WeightGrad) => "33",
        None => "2",
    };
    let mut now = None;
    for cell in cells {
        let wanted = (colour && cell.text != ' ').then(|| code(cell.kind));
        if wanted != now && (wanted.is_some() || now.is_some()) {
            out.push_str("\x1b[0m");
            if let Some(code) = wanted {
                let _ = write!(out, "\x1b[{code}m");
            }
            now = wanted;
        }
        out.push(cell.text);
    }
    if now.is_some() {
        out.push_str("\x1b[0m");
    }
}

fn key(time: &Timeline, chunked: bool, labelled: bool) -> String {
    let seen =
        |kind: Kind| time.ranks.iter().flat_map(|r| &r.spans).any(|s| boxes(&s.action).iter().any(|b| b.0 == kind));
    let mut words: Vec<String> =
        Kind::ALL.into_iter().filter(|&k| seen(k)).map(|k| format!("{} {}", k.letter(), k.words())).collect();
    words.push("· idle".into());
    if labelled {
        words.push("number: micro-batch".into());
        if chunked {
            words.push("letter after it: chunk".into());
        }
    }
    words.push("peak: activations in rank shares".into());
    words.join("   ")
}

fn columns_of(start: f64, end: f64, unit: f64) -> usize {
    ((end / unit).round() - (start / unit).round()).max(0.0) as usize
}

/// The longest time of which all boundaries are multiples, down to an eighth of the shortest action; otherwise a quarter of that action.
fn unit(time: &Timeline) -> f64 {
    let spans = || time.ranks.iter().flat_map(|r| &r.spans);
    let shortest = spans().map(|s| s.end - s.start).filter(|d| *d > 1e-9).fold(f64::INFINITY, f64::min);
    if !shortest.is_finite() {
        return 1.0;
    }
    let fits = |unit: f64| {
        let whole = |t: f64| ((t / unit) - (t / unit).round()).abs() < 1e-6 * (1.0 + t / unit);
        spans().all(|s| whole(s.start) && whole(s.end))
    };
    let unit = (1..=8).map(|k| shortest / f64::from(k)).find(|&u| fits(u)).unwrap_or(shortest / 4.0);
    // A picture of a million columns is none.
    unit.max(time.total / 20_000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Durations, ScheduleKind, build, simulate};

    fn draw(kind: ScheduleKind, p: usize, m: usize, durations: Durations, width: usize) -> String {
        let schedule = build(kind, p, m, None).unwrap();
        let time = simulate(&schedule, &durations).unwrap();
        text(&schedule, &time, &TextOptions { width, colour: false })
    }

    #[test]
    fn one_column_a_unit_of_time() {
        let text = draw(ScheduleKind::OneForwardOneBackward, 2, 2, Durations::new(1.0, 1.0, 1.0), 100);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "1F1B: 2 ranks, 2 micro-batches");
        assert_eq!(lines[1], "total 9, computing 66.7 %, idle 33.3 %");
        assert_eq!(lines[3], "rank 0  F0 F1 ·  ·  B0━━━ ·  B1━━━    33.3 %  2", "{text}");
        assert_eq!(lines[4], "rank 1  ·  F0 B0━━━ F1 B1━━━ ·  ·     33.3 %  1", "{text}");
    }

    #[test]
    fn what_is_too_wide_gets_letters_and_pieces() {
        let kind = ScheduleKind::OneForwardOneBackward;
        let text = draw(kind, 8, 32, Durations::new(1.0, 1.0, 1.0), 150);
        assert!(text.contains("rank 7  ·······FBBFBB"), "{text}");
        let text = draw(kind, 8, 32, Durations::new(1.0, 1.0, 1.0), 80);
        assert!(text.contains("from 0") && text.contains("from 5"), "{text}");
        assert!(text.lines().all(|l| l.chars().count() <= 80 || l.contains("rank shares")), "{text}");
    }

    #[test]
    fn odd_durations_do_no_harm() {
        for durations in [Durations::new(0.0, 0.0, 0.0), Durations::new(1e-3, 1e6, 7.7), Durations::new(1.0, 0.0, 0.3)]
        {
            for kind in ScheduleKind::ALL {
                assert!(draw(kind, 2, 4, durations.clone(), 0).contains("rank 1"));
            }
        }
    }
}
