//! Showing a run, and stopping it by Ctrl-C.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_report::{Progress, Step};
use phalanx_train::trainer::Observer;
use serde_json::{Value, json};

use crate::outcome::Result;

/// First Ctrl-C: save after the step in progress. Second: end at once.
pub fn interrupts(stop: &Arc<AtomicBool>) -> Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(stop))?;
        signal_hook::flag::register(signal, Arc::clone(stop))?;
    }
    Ok(())
}

/// Shows a run on standard error (or as JSON lines on standard output).
pub struct Watch {
    progress: Option<Progress>,
    json: bool,
    plain: bool,
    stop: Arc<AtomicBool>,
    /// Nobody reads the JSON lines any more.
    closed: bool,
}

impl Watch {
    /// `stop` is set when the reader of the JSON lines goes away (`phalanx train ... --json | head -1`): the run then
    /// ends as by Ctrl-C, with everything saved.
    pub fn new(json: bool, plain: bool, stop: Arc<AtomicBool>) -> Watch {
        Watch { progress: None, json, plain, stop, closed: false }
    }

    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Closes the progress bar.
    pub fn finish(&mut self) {
        if let Some(p) = &mut self.progress {
            p.finish();
        }
    }

    /// Writes a JSON line.
    pub fn event(&mut self, event: &Value) {
        if self.closed {
            return;
        }
        if let Err(e) = writeln!(std::io::stdout(), "{event}") {
            self.closed = true;
            self.stop.store(true, Ordering::Relaxed);
            complain(&format!("standard output: {e}; stopping, everything will be saved"));
        }
    }
}

/// A line on standard error. Where nobody reads that, a run still goes on.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

impl Observer for Watch {
    fn message(&mut self, text: &str) {
        match (&mut self.progress, self.json) {
            (_, true) => self.event(&json!({"event": "message", "text": text})),
            (Some(p), _) => p.line(text),
            (None, _) => complain(text),
        }
    }

    fn step(&mut self, step: &Step, logged: bool) {
        if self.json {
            if logged {
                self.event(
                    &json!({"event": "step", "step": step.step, "total": step.total, "epoch": step.epoch, "loss": step.loss,
                        "learning_rate": step.learning_rate, "grad_norm": step.grad_norm,
                        "tokens_per_second": step.tokens_per_second, "memory_bytes": step.memory}),
                );
            }
            return;
        }
        self.progress.get_or_insert_with(|| Progress::new(step.total, self.plain)).step(step, logged);
    }
}
