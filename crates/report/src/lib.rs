//! What a run tells people: files for tools, pictures and lines for eyes.
//!
//! # Why it is the way it is
//!
//! **Values in, text out.** Nothing here reads a clock, a trainer or an environment variable on its own; a trainer hands
//! over one [`Entry`] a logged step, and every writer takes that. So each writer is tested without a training run, and
//! none can slow one down or end it. (The two exceptions say so in their names: [`system::System::read`] and
//! [`system::wall_time`].)
//!
//! **A file never tells two stories.** A run that is killed and goes on from its last checkpoint does some steps again.
//! [`metrics`] takes the first telling out before the second begins, [`tensorboard`] says in the file which steps are
//! void, and [`state`] is replaced as a whole. At any moment of a kill, each file is either the old or the new one,
//! but for half a line at the end of `metrics.jsonl`, which the next run removes.
//!
//! **Names are those of transformers** (`loss`, `grad_norm`, `learning_rate`, `eval_loss`; tags `train/loss`,
//! `eval/loss`; `trainer_state.json` with `log_history`), so the tools people have read them.
//!
//! **Pictures need nothing installed.** The loss curve is laid out once and drawn twice, as SVG and as PNG with the
//! project's own few lines of drawing and a pixel font that is compiled in.
//!
//! # Example
//!
//! ```
//! use phalanx_report::{Entry, Recorder, RecorderOptions, curve, system};
//!
//! let dir = std::env::temp_dir().join(format!("phalanx-report-doc-{}", std::process::id()));
//! let mut options = RecorderOptions {
//!     events_dir: Some(dir.join("runs")),
//!     resume_step: None,
//!     wall_time: system::wall_time(),
//!     process: std::process::id(),
//! };
//! let mut recorder = Recorder::open(&dir, &options)?;
//! for step in 1..=30u64 {
//!     let entry = Entry::new(step, step as f64 / 30.0).with("loss", 4.0 / (step as f64).sqrt());
//!     recorder.log(entry, system::wall_time())?;
//! }
//! let [svg, png] = recorder.plot("a small run")?;
//! assert!(svg.exists() && png.exists());
//! println!("{}", curve::ascii(&recorder.curve(""), 60, 10));
//!
//! // The run was killed after its checkpoint of step 20 and goes on from there.
//! let log = recorder.entries().to_vec();
//! drop(recorder);
//! options.resume_step = Some(20);
//! let recorder = Recorder::open(&dir, &options)?;
//! assert_eq!(recorder.entries(), &log[..20]);
//! # std::fs::remove_dir_all(&dir).ok();
//! # Ok::<(), phalanx_report::ReportError>(())
//! ```

pub mod curve;
mod entry;
mod error;
pub mod metrics;
pub mod profile;
pub mod progress;
mod recorder;
pub mod state;
pub mod stragglers;
mod style;
pub mod summary;
pub mod system;
mod table;
pub mod tensorboard;
#[cfg(test)]
mod testing;
pub mod units;

pub use curve::Curve;
pub use entry::Entry;
pub use error::{ReportError, Result};
pub use metrics::MetricsWriter;
pub use profile::Profile;
pub use progress::{Pace, Progress, Step};
pub use recorder::{Recorder, RecorderOptions};
pub use state::TrainerState;
pub use style::{Style, display_width};
pub use summary::{Ending, Summary};
pub use system::{ProcessMemory, System};
pub use table::Table;
pub use tensorboard::EventWriter;
