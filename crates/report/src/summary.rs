//! The last thing a run prints: what came out, what it took, where it lies, how to go on.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::curve::{Curve, sparkline};
use crate::style::Style;
use crate::table::Table;
use crate::units;

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// All steps are done.
    Finished,
    /// A person (or the system) stopped it; a checkpoint was saved.
    Interrupted,
    /// It stopped itself; why.
    Stopped(String),
}

/// What a run has to say at its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// How it ended.
    pub ending: Ending,
    /// Optimizer steps done.
    pub steps: u64,
    /// Optimizer steps planned.
    pub total_steps: u64,
    /// Passes over the data done.
    pub epochs: f64,
    /// Tokens read, in all processes of the run together.
    pub tokens: u64,
    /// Tokens among them that counted in the loss.
    pub label_tokens: u64,
    /// Seconds of training, in all processes of the run together.
    pub seconds: f64,
    /// Steps skipped because something was not finite.
    pub skipped_steps: u64,
    /// Training and evaluation losses.
    pub curve: Curve,
    /// The most memory this process had, in bytes.
    pub peak_memory: u64,
    /// What had been predicted before the run, in bytes.
    pub predicted_memory: Option<u64>,
    /// What was written: what it is, and where.
    pub outputs: Vec<(String, PathBuf)>,
    /// Commands that make sense now: what for, and the command.
    pub next: Vec<(String, String)>,
}

impl Summary {
    /// The mean of the first and of the last logged losses (a twentieth of them, at least one).
    fn losses(&self) -> Option<(f64, f64)> {
        let finite: Vec<f64> = self.curve.train.iter().map(|p| p.1).filter(|y| y.is_finite()).collect();
        let n = (finite.len() / 20).max(1);
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        (!finite.is_empty()).then(|| (mean(&finite[..n]), mean(&finite[finite.len() - n..])))
    }

    /// First, best (with its step) and last evaluation loss.
    fn evaluations(&self) -> Option<(f64, (f64, f64), f64)> {
        let finite: Vec<_> = self.curve.eval.iter().copied().filter(|p| p.1.is_finite()).collect();
        let best = finite.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some((finite.first()?.1, best, finite.last()?.1))
    }

    /// The summary for a terminal.
    pub fn render(&self, style: Style) -> String {
        let title = match &self.ending {
            Ending::Finished => style.green("training finished"),
            Ending::Interrupted => style.yellow("training interrupted; everything up to the last step is saved"),
            Ending::Stopped(why) => style.red(&format!("training stopped: {why}")),
        };
        let mut table = Table::new(style, &["", ""]);
        // A run gone on with for fewer steps than it already has.
        let of = if self.steps > self.total_steps { ", where max_steps asked for" } else { " of" };
        let steps = format!("{}{of} {} ({:.2} epochs)", self.steps, self.total_steps, self.epochs);
        table.row(["  steps".to_owned(), steps]);
        table.row(["  time".to_owned(), units::duration(self.seconds)]);
        let rate = if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 };
        let share = 100.0 * self.label_tokens as f64 / self.tokens.max(1) as f64;
        let tokens = format!(
            "{} ({share:.0} % of them counted in the loss), {} tok/s",
            units::grouped(self.tokens),
            units::count(rate.round())
        );
        table.row(["  tokens".to_owned(), tokens]);
        if let Some((first, last)) = self.losses() {
            let line = sparkline(&self.curve.train.iter().map(|p| p.1).collect::<Vec<_>>(), 40);
            table.row(["  training loss".to_owned(), format!("{first:.4} → {last:.4}  {}", style.cyan(&line))]);
        }
        if let Some((first, (step, best), last)) = self.evaluations() {
            let text = format!("{first:.4} → {last:.4}, best {best:.4} (perplexity {:.2}) at step {step}", best.exp());
            table.row(["  evaluation loss".to_owned(), text]);
        }
        if self.skipped_steps > 0 {
            let text = format!("{} (loss or gradient was not finite)", self.skipped_steps);
            table.row(["  skipped steps".to_owned(), style.yellow(&text)]);
        }
        let predicted = self.predicted_memory.map(|p| format!(" (predicted {})", units::bytes(p))).unwrap_or_default();
        table.row(["  peak memory".to_owned(), format!("{}{predicted}", units::bytes(self.peak_memory))]);
        for (what, path) in &self.outputs {
            table.row([format!("  {what}"), style.cyan(&path.display().to_string())]);
        }
        let mut out = format!("{}\n{table}", style.bold(&title));
        for (what, command) in &self.next {
            out += &format!("{what}:\n  {}\n", style.bold(command));
        }
        out
    }

    /// The summary for `--json`.
    pub fn to_json(&self) -> Value {
        let (ending, why) = match &self.ending {
            Ending::Finished => ("finished", None),
            Ending::Interrupted => ("interrupted", None),
            Ending::Stopped(why) => ("stopped", Some(why.as_str())),
        };
        let losses = self.losses();
        let evaluations = self.evaluations();
        json!({
            "ending": ending,
            "why": why,
            "steps": self.steps,
            "total_steps": self.total_steps,
            "epochs": self.epochs,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "seconds": self.seconds,
            "tokens_per_second": if self.seconds > 0.0 { self.tokens as f64 / self.seconds } else { 0.0 },
            "skipped_steps": self.skipped_steps,
            "train_loss_first": losses.map(|l| l.0),
            "train_loss_last": losses.map(|l| l.1),
            "eval_loss_first": evaluations.map(|e| e.0),
            "eval_loss_best": evaluations.map(|e| e.1.1),
            "eval_loss_last": evaluations.map(|e| e.2),
            "peak_memory_bytes": self.peak_memory,
            "predicted_memory_bytes": self.predicted_memory,
            "outputs": self.outputs.iter().map(|(what, path)| json!({"what": what, "path": path})).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_says_what_came_out() {
        let summary = Summary {
            ending: Ending::Finished,
            steps: 100,
            total_steps: 100,
            epochs: 2.0,
            tokens: 1_234_567,
            label_tokens: 617_000,
            seconds: 125.0,
            skipped_steps: 1,
            curve: Curve {
                train: (1..=40).map(|i| (i as f64, 4.0 - 0.05 * i as f64)).collect(),
                eval: vec![(20.0, 3.0), (30.0, 2.5), (40.0, 2.6)],
                ..Curve::default()
            },
            peak_memory: 3 << 29,
            predicted_memory: Some(1 << 30),
            outputs: vec![("model".into(), "out/run".into())],
            next: vec![("talk to it".into(), "phalanx chat out/run".into())],
        };
        let text = summary.render(Style::new(false));
        for part in [
            "training finished",
            "100 of 100 (2.00 epochs)",
            "2:05",
            "1,234,567 (50 % of them counted in the loss), 9.9 k tok/s",
            "3.9250 → 2.0250",
            "3.0000 → 2.6000, best 2.5000 (perplexity 12.18) at step 30",
            "1.5 GiB (predicted 1.0 GiB)",
            "out/run",
            "talk to it:\n  phalanx chat out/run\n",
        ] {
            assert!(text.contains(part), "{text}\nwithout: {part}");
        }
        assert_eq!(summary.to_json()["eval_loss_best"], 2.5);
        let stopped = Summary {
            ending: Ending::Stopped("10 steps in a row were not finite".into()),
            curve: Curve::default(),
            ..summary
        };
        assert!(stopped.render(Style::new(false)).starts_with("training stopped: 10 steps in a row"));
        assert_eq!(stopped.to_json()["train_loss_last"], Value::Null);
    }
}
