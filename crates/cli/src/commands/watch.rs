//! Showing a run, and stopping it by Ctrl-C.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use phalanx_report::{Progress, Step};
use phalanx_train::trainer::Observer;
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::outcome::Result;

/// The signal that asked for the end, 0 before.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Exit code of a run that was stopped, as shells give it: 128 and the signal (Ctrl-C where only the reader went away).
pub fn exit_code_of_signal() -> u8 {
    128 + match SIGNAL.load(Ordering::Relaxed) {
        0 => SIGINT as u8,
        signal => signal as u8,
    }
}

/// First signal: save after the step in progress. A second Ctrl-C or SIGTERM: end at once. (A closed terminal may hang up twice, which
/// must not cost the run.)
pub fn interrupts(stop: &Arc<AtomicBool>) -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let stop = Arc::clone(stop);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if SIGNAL.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                stop.store(true, Ordering::Relaxed);
                // The bar draws itself anew over its own two lines: leave it an empty one.
                complain("\nstopping when this step is done, and saving; once more ends at once and saves nothing\n");
            } else if signal != SIGHUP {
                complain("\nended at once; what was done since the last checkpoint is lost");
                signal_hook::low_level::exit(128 + signal);
            }
        }
    })?;
    Ok(())
}

/// For commands that write and cannot be gone on with: a signal ends them at once, and nothing half-written stays behind.
pub fn abandon_on_signal() -> Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            phalanx_formats::atomic::abandon();
            complain("\nstopped; nothing was written");
            signal_hook::low_level::exit(128 + signal);
        }
    })?;
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

    fn begins(&mut self, step: u64, total: u64) {
        if !self.json {
            self.progress.get_or_insert_with(|| Progress::new(total, self.plain)).begin(step, total);
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
