//! Progress of a run: a bar on a terminal, plain lines elsewhere.
//!
//! What is shown is made by pure functions of a [`Step`]; the bar only draws it, in two lines that fit 80 columns. Times come in as values: the trainer
//! reads its clock once a step and everybody agrees.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::units;

/// What is known after an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Step {
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps of the whole run.
    pub total: u64,
    /// Passes over the data done.
    pub epoch: f64,
    /// Mean loss of a token in this step.
    pub loss: f64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Global norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// Tokens a second, over the last steps.
    pub tokens_per_second: f64,
    /// Bytes of memory this process has now.
    pub memory: u64,
    /// The most it had.
    pub peak_memory: u64,
    /// Seconds until the end, by the pace of the last steps; NaN where unknown.
    pub seconds_left: f64,
}

impl Step {
    /// What matters most: `loss 2.3145 · epoch 0.12 · 3:05 left`.
    pub fn headline(&self) -> String {
        let mut text = format!("loss {:.4} · epoch {:.2}", self.loss, self.epoch);
        if self.seconds_left.is_finite() && self.step < self.total {
            text += &format!(" · {} left", units::duration(self.seconds_left));
        }
        text
    }

    /// The rest: `lr 3.00e-4 · grad 1.209 · 3.4 k tok/s · 1.0 GiB (peak 1.5 GiB)`.
    pub fn details(&self) -> String {
        format!(
            "lr {:.2e} · grad {:.3} · {} tok/s · {} (peak {})",
            self.learning_rate,
            self.grad_norm,
            units::count(self.tokens_per_second.round()),
            units::bytes(self.memory),
            units::bytes(self.peak_memory)
        )
    }

    /// All of it in one line, for logs.
    pub fn plain(&self) -> String {
        format!("step {}/{} · {} · {}", self.step, self.total, self.headline(), self.details())
    }
}

/// The pace of a run: tokens a second and time left, from the times of the last steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Pace {
    /// (seconds since the start of this process' run, steps done, tokens seen), newest last.
    window: std::collections::VecDeque<(f64, u64, u64)>,
}

impl Pace {
    /// Steps that count.
    const WINDOW: usize = 20;

    /// A pace that begins now: at `seconds`, with `step` steps and `tokens` tokens done (a resumed run begins in the
    /// middle).
    pub fn new(seconds: f64, step: u64, tokens: u64) -> Self {
        Pace { window: [(seconds, step, tokens)].into() }
    }

    /// Takes note of a finished step.
    pub fn update(&mut self, seconds: f64, step: u64, tokens: u64) {
        self.window.push_back((seconds, step, tokens));
        if self.window.len() > Self::WINDOW + 1 {
            self.window.pop_front();
        }
    }

    /// Takes out `seconds` that were not spent training (evaluation, saving), just before the next update.
    pub fn pause(&mut self, seconds: f64) {
        for (at, _, _) in &mut self.window {
            *at += seconds;
        }
    }

    /// Tokens a second; 0 before the first step.
    pub fn tokens_per_second(&self) -> f64 {
        let (seconds, _, tokens) = self.spans();
        if seconds > 0.0 { tokens / seconds } else { 0.0 }
    }

    /// Seconds until step `total`; NaN before the first step.
    pub fn seconds_left(&self, total: u64) -> f64 {
        let (seconds, steps, _) = self.spans();
        let done = self.window.back().map_or(0, |last| last.1);
        if steps > 0.0 { total.saturating_sub(done) as f64 * seconds / steps } else { f64::NAN }
    }

    fn spans(&self) -> (f64, f64, f64) {
        match (self.window.front(), self.window.back()) {
            (Some(a), Some(b)) => (b.0 - a.0, b.1.saturating_sub(a.1) as f64, b.2.saturating_sub(a.2) as f64),
            _ => (0.0, 0.0, 0.0),
        }
    }
}

/// Shows steps: a bar on a terminal, a plain line for each logged step elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    out: Box<dyn Write + Send>,
}

impl Progress {
    /// Progress on standard error; `plain` wants lines on a terminal too.
    pub fn new(total: u64, plain: bool) -> Self {
        let stderr = std::io::stderr();
        let bar = (stderr.is_terminal() && !plain).then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
            // A template of constants; the default bar is no worse than none.
            if let Ok(style) =
                ProgressStyle::with_template("{pos:>6}/{len} {bar:24.cyan/dim} {prefix}\n       {wide_msg}")
            {
                bar.set_style(style.progress_chars("━━─"));
            }
            bar
        });
        Progress { bar, out: Box::new(stderr) }
    }

    /// Plain lines to any writer: for tests and for `--json` runs.
    pub fn to_writer(out: Box<dyn Write + Send>) -> Self {
        Progress { bar: None, out }
    }

    /// Shows that work has begun, before the first step is done.
    pub fn begin(&mut self, step: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(step);
            bar.set_prefix("the first step is under way");
            bar.tick();
        }
    }

    /// Shows a step. Plain lines are written for `logged` steps only.
    pub fn step(&mut self, step: &Step, logged: bool) {
        match &self.bar {
            Some(bar) => {
                bar.set_length(step.total);
                bar.set_position(step.step);
                bar.set_prefix(step.headline());
                bar.set_message(step.details());
            }
            None if logged => self.write(&step.plain()),
            None => {}
        }
    }

    /// Writes a line above the bar (evaluation results, saved checkpoints, warnings).
    pub fn line(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => self.write(text),
        }
    }

    /// Ends the bar and leaves its last state on the screen.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.abandon();
        }
    }

    /// Progress must not end a run: a closed pipe is no reason to stop training.
    fn write(&mut self, text: &str) {
        let _ = writeln!(self.out, "{text}");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    fn step() -> Step {
        Step {
            step: 5,
            total: 100,
            epoch: 0.125,
            loss: 2.31449,
            learning_rate: 3e-4,
            grad_norm: 1.2091,
            tokens_per_second: 3412.4,
            memory: 1 << 30,
            peak_memory: 3 << 29,
            seconds_left: 185.0,
        }
    }

    #[test]
    fn a_line_says_it_all() {
        assert_eq!(
            step().plain(),
            "step 5/100 · loss 2.3145 · epoch 0.12 · 3:05 left · lr 3.00e-4 · grad 1.209 · 3.4 k tok/s · 1.0 GiB (peak 1.5 GiB)"
        );
        assert!(!Step { step: 100, ..step() }.plain().contains("left"));
        assert!(Step { loss: f64::NAN, ..step() }.headline().starts_with("loss NaN"));
    }

    #[test]
    fn pace_of_a_resumed_run() {
        let mut pace = Pace::new(10.0, 50, 1000);
        assert!(pace.seconds_left(60).is_nan());
        assert_eq!(pace.tokens_per_second(), 0.0);
        for i in 1..=5 {
            pace.update(10.0 + 2.0 * i as f64, 50 + i, 1000 + 300 * i);
        }
        assert_eq!(pace.tokens_per_second(), 150.0);
        assert_eq!(pace.seconds_left(60), 10.0);
        // An evaluation of a minute changes nothing.
        pace.pause(60.0);
        pace.update(82.0, 56, 2800);
        assert_eq!(pace.tokens_per_second(), 150.0);

        let mut pace = Pace::new(10.0, 50, 1000);
        for i in 1..=5 {
            pace.update(10.0 + 2.0 * i as f64, 50 + i, 1000 + 300 * i);
        }
        // The pace of the last steps counts: it slows down.
        for i in 6..=40 {
            pace.update(20.0 + 4.0 * (i - 5) as f64, 50 + i, 1000 + 300 * i);
        }
        assert_eq!(pace.tokens_per_second(), 75.0);
    }

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);
    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn plain_lines_for_logged_steps_only() {
        let shared = Shared::default();
        let mut progress = Progress::to_writer(Box::new(shared.clone()));
        progress.step(&step(), false);
        progress.line("saved out/checkpoint-5");
        progress.step(&step(), true);
        drop(progress);
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text, format!("saved out/checkpoint-5\n{}\n", step().plain()));
    }
}
