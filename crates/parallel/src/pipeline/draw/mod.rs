//! Pictures of schedules: time to the right, ranks downwards.
//!
//! ```
//! use phalanx_parallel::pipeline::{Durations, build, draw, simulate};
//! let schedule = build("1f1b".parse()?, 2, 2, None)?;
//! let time = simulate(&schedule, &Durations::new(1.0, 1.0, 1.0))?;
//! let text = draw::text(&schedule, &time, &draw::TextOptions::default());
//! assert!(text.contains("rank 0  F0 F1 ·  ·  B0━━━ ·  B1━━━"), "{text}");
//! assert!(draw::svg(&schedule, &time).starts_with("<svg"));
//! # Ok::<(), phalanx_parallel::pipeline::ScheduleError>(())
//! ```

mod svg;
mod text;

pub use svg::svg;
pub use text::{TextOptions, text};

use super::{Action, Part, Schedule, Timeline};

/// What a box in a picture stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
    InputGrad,
    WeightGrad,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Forward, Kind::Backward, Kind::InputGrad, Kind::WeightGrad];

    const fn letter(self) -> char {
        match self {
            Kind::Forward => 'F',
            Kind::Backward => 'B',
            Kind::InputGrad => 'I',
            Kind::WeightGrad => 'W',
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Kind::Forward => "forward",
            Kind::Backward => "backward",
            Kind::InputGrad => "gradient of inputs",
            Kind::WeightGrad => "gradient of weights",
        }
    }
}

/// The boxes of an action: one, or two of an overlapped pair; none of a message.
fn boxes(action: &Action) -> Vec<(Kind, Part)> {
    match *action {
        Action::Forward(p) => vec![(Kind::Forward, p)],
        Action::Backward(p) => vec![(Kind::Backward, p)],
        Action::InputGrad(p) => vec![(Kind::InputGrad, p)],
        Action::WeightGrad(p) => vec![(Kind::WeightGrad, p)],
        Action::Overlapped { forward, backward } => vec![(Kind::Forward, forward), (Kind::Backward, backward)],
        _ => vec![],
    }
}

/// Chunk of each stage, once for all boxes.
fn chunks(schedule: &Schedule) -> Vec<usize> {
    let mut next = std::collections::BTreeMap::new();
    let count = |rank: &usize| {
        let n = next.entry(*rank).or_insert(0);
        *n += 1;
        *n - 1
    };
    schedule.placement.rank_of_stage.iter().map(count).collect()
}

/// `33`, `26.25`: three places at most.
fn number(x: f64) -> String {
    let text = format!("{x:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `total 33, computing 72.7 %, idle 27.3 %`.
fn figures(time: &Timeline) -> String {
    let busy = 100.0 * time.efficiency();
    format!("total {}, computing {busy:.1} %, idle {:.1} %", number(time.total), 100.0 - busy)
}

/// `1F1B: 4 ranks, 8 micro-batches`.
fn heading(schedule: &Schedule) -> String {
    let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let ranks = plural(schedule.num_ranks(), "rank");
    let micro_batches = schedule.num_micro_batches;
    format!("{}: {ranks}, {}", schedule.name, plural(micro_batches, "micro-batch").replace("batchs", "batches"))
}
