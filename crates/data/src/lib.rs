//! From data files to batches of token ids.
//!
//! # Why it is built this way
//!
//! Most damage that data handling does to a training run is silent: the loss falls, and the model never stops
//! talking, or has learned its own prompts, or has seen half of the data twice. So the rules that others leave to
//! convention are made structure here, each in one place:
//!
//! - **One form.** Every file format becomes a [`Conversation`] or a text ([`formats`]). What cannot be understood is an
//!   error with file and line, not a guess.
//! - **The model's own template.** Text comes from the chat template of the model folder, rendered as `transformers`
//!   does ([`template`]); what the assistant wrote is found by rendering prefixes, so no template needs special code.
//! - **Training shows what inference does**: ids(example) = ids(prompt) + ids(answer) + stop token, with the stop token
//!   trained ([`encode`]).
//! - **Targets are shifted once**, when a [`Batch`] is made, inside each document. Whoever gets a batch compares
//!   `logits[t]` with `targets[t]` and never shifts. Documents are ranges in a flat list of tokens; there is no padding
//!   that could be counted.
//! - **The order is computed, not stored.** Which row comes next follows from seed and position ([`Stream`]), which is one
//!   number; resuming, seeking, prefetching and any number of workers cannot change what comes next.
//! - **Tokenise once.** The result is mapped from a file ([`cache`]) whose name is a hash of all that went into it.
//! - **What is cut is said.** [`Prepared::messages`] tells every record left out and every token cut off, and
//!   [`check()`] looks at the data before the training does.
//!
//! The crate reads files and returns values. It prints nothing; long work reports through a callback.
//!
//! # Example
//!
//! ```
//! use phalanx_data::{ChatTemplate, DataOptions, Stream, StreamOptions, Tokenizer, prepare};
//!
//! # fn main() -> phalanx_data::Result<()> {
//! let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
//! let tokenizer = Tokenizer::from_dir(format!("{fixtures}/tiny-chatml"))?;
//! let options = DataOptions {
//!     dataset: vec!["alpaca_tiny".into()], // from dataset_info.json
//!     dataset_dir: format!("{fixtures}/data").into(),
//!     cutoff_len: 256,
//!     packing: true,
//!     ..DataOptions::default()
//! };
//! let (template, _notes) = ChatTemplate::choose(&tokenizer, &options)?;
//! let data = prepare(&options, &tokenizer, Some(&template), &|_| {})?;
//! let mut stream = Stream::new(data.train, StreamOptions::of(&options));
//! let batch = stream.next_batch(1)?;
//! assert_eq!(batch.ids.len(), batch.targets.len());
//! assert!(batch.num_targets > 0);
//! # Ok(())
//! # }
//! ```

pub mod cache;
pub mod check;
mod corpus;
pub mod encode;
mod error;
pub mod formats;
mod options;
pub mod pack;
mod permute;
mod prefetch;
mod prepare;
mod record;
mod stream;
pub mod template;
mod tokenizer;

pub use check::{CheckOptions, DataReport, check};
pub use corpus::{Batch, Corpus, IGNORED, Totals};
pub use encode::{EncodeStats, Encoder, Example};
pub use error::{DataError, Result};
pub use options::{DataOptions, MixStrategy, RewrittenHistory, Stage, TextUnit};
pub use permute::Permutation;
pub use prefetch::Prefetch;
pub use prepare::{DatasetSummary, OnProgress, Prepared, Progress, prepare, prepare_eval};
pub use record::{Conversation, Message, Role, Sample, ToolCall};
pub use stream::{Stream, StreamOptions, StreamState};
pub use template::ChatTemplate;
pub use tokenizer::{StreamDecoder, Tokenizer};
