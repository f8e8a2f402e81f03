//! `phalanx demo`

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use phalanx_demo::{Existing, Observer, Options};
use phalanx_train::trainer::Observer as _;
use serde_json::json;

use super::preparing::Bar;
use super::watch::{Watch, interrupts};
use crate::args::Demo;
use crate::outcome::{Outcome, Result};

/// The demo talks in headings and blocks besides messages and steps.
struct Show {
    watch: Watch,
    /// There while the stories are tokenised.
    bar: Option<Bar>,
}

impl phalanx_train::trainer::Observer for Show {
    fn message(&mut self, text: &str) {
        self.bar = None;
        self.watch.message(text);
    }
    fn begins(&mut self, step: u64, total: u64) {
        self.watch.begins(step, total);
    }
    fn step(&mut self, step: &phalanx_report::Step, logged: bool) {
        self.watch.step(step, logged);
    }
}

impl Observer for Show {
    fn preparing(&mut self, p: phalanx_data::Progress<'_>) {
        let json = self.watch.is_json();
        self.bar.get_or_insert_with(|| Bar::new(json)).data(p);
    }
    fn heading(&mut self, text: &str) {
        self.bar = None;
        if self.watch.is_json() {
            self.watch.message(text);
        } else {
            eprintln!("\n{}", super::style().bold(text));
        }
    }
    fn block(&mut self, text: &str) {
        self.bar = None;
        if self.watch.is_json() {
            self.watch.message(text);
        } else {
            eprintln!("{}", text.trim_end_matches('\n'));
        }
    }
    fn trained(&mut self) {
        self.watch.finish();
    }
}

pub fn run(a: &Demo) -> Result<Outcome> {
    let existing = match (a.go_on, a.overwrite) {
        (true, _) => Existing::Continue,
        (_, true) => Existing::Overwrite,
        _ => Existing::Keep,
    };
    let options = Options {
        output_dir: a.output_dir.clone(),
        minutes: a.minutes,
        steps: a.steps,
        seed: a.seed,
        threads: a.threads,
        existing,
        ..Options::default()
    };
    let stop = Arc::new(AtomicBool::new(false));
    interrupts(&stop)?;
    let mut show = Show { watch: Watch::new(a.json, false, Arc::clone(&stop)), bar: None };
    let done = phalanx_demo::run(&options, &stop, &mut show)?;
    if a.json {
        show.watch.event(&json!({"event": "outcome", "outcome": done}));
    }
    Ok(if done.interrupted.is_some() { Outcome::Interrupted } else { Outcome::Done })
}
