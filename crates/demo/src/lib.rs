//! The demo: a small language model learns to tell stories, from nothing, in about two minutes on two cores.
//!
//! # Why it is the way it is
//!
//! **It is the first thing that anybody runs**, so it needs nothing: no download, no data, no model, no configuration. The corpus
//! comes from a grammar ([`corpus`]), the tokenizer is trained on it ([`tokenizer`]), the weights are drawn.
//!
//! **It is no show.** From there on it is the ordinary path: an ordinary configuration ([`settings`], `demo.yaml`, a copy lies in
//! the folder), the ordinary trainer, a folder of Hugging Face files that `transformers` loads. The sample at the end is made by
//! the folder, opened again like any other, and not by what is still in memory. What a user reads in the demo's folder is what
//! every run leaves.
//!
//! **Before and after**, the same prompt and the same seed: noise, then a story. The stories demand that names, pronouns and things
//! agree over a hundred words, so one look at the sample shows whether attention, positions, the optimizer, saving, loading and the
//! KV cache work together.
//!
//! **It is exact.** The same seed gives the same corpus, tokenizer, losses and sample, on any number of threads. Stopped with Ctrl-C and
//! started again, it goes on as if nothing had been.
//!
//! # Example
//!
//! ```no_run
//! use std::sync::atomic::AtomicBool;
//! use phalanx_demo::{Observer, Options};
//!
//! struct Print;
//! impl phalanx_train::trainer::Observer for Print {
//!     fn message(&mut self, text: &str) {
//!         println!("{text}");
//!     }
//!     fn step(&mut self, step: &phalanx_report::Step, logged: bool) {
//!         if logged {
//!             println!("{}", step.plain());
//!         }
//!     }
//! }
//! impl Observer for Print {}
//!
//! let options = Options { minutes: Some(0.5), ..Options::default() };
//! let outcome = phalanx_demo::run(&options, &AtomicBool::new(false), &mut Print)?;
//! println!("{}", outcome.after.unwrap_or_default());
//! # Ok::<(), phalanx_demo::DemoError>(())
//! ```

pub mod corpus;
mod error;
pub mod folder;
pub mod pace;
mod run;
pub mod sample;
pub mod settings;
pub mod tokenizer;

pub use error::{DemoError, Result};
pub use run::{Existing, Observer, Options, Outcome, run};
