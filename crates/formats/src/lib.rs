//! Other people's files, in and out.
//!
//! Models reach people as Hugging Face folders (`config.json`, `*.safetensors`, `tokenizer.json`), as GGUF files of the
//! llama.cpp world, and as older formats of teaching projects. Phalanx itself knows one form only, the Hugging Face
//! folder; this crate reads and writes that form and turns the others into it. It knows files: names, element types,
//! shapes, bytes. It knows no tensors of ours and no models, and depends on no other crate of the workspace.
//!
//! # Why it is built this way
//! - **Memory-mapped, read on demand.** Opening a folder of any size costs the headers. A rank of a sharded run reads the
//!   rows it owns ([`TensorView::read_f32_at`]) and never touches the rest.
//! - **Everything checked on opening.** Files come from strangers and from interrupted downloads. Lengths, offsets,
//!   overlaps, index against shards: all of it is checked before the first value is handed out, and each refusal names the
//!   file and the mend. Malformed bytes never panic; property tests feed random and truncated files.
//! - **A file appears whole or not at all.** Every writer goes through [`atomic`]: temporary name, `fsync`, rename. A kill
//!   or a full disk leaves the previous file as it was.
//! - **Streaming out.** [`SafetensorsWriter`] knows sizes first and values later, so a tensor may be gathered, converted
//!   and written piece by piece.
//!
//! # Example
//! ```
//! use phalanx_formats::{Dtype, SafetensorsWriter, TensorSpec, WeightFolder, atomic};
//! # fn main() -> Result<(), phalanx_formats::FormatError> {
//! # let base = std::env::temp_dir().join(format!("phalanx-formats-doc-{}", std::process::id()));
//! # let _ = std::fs::remove_dir_all(&base);
//! let dir = base.join("model");
//! atomic::write_folder(&dir, |tmp| {
//!     let specs = vec![TensorSpec::new("w", Dtype::BF16, [2, 3]), TensorSpec::new("b", Dtype::F32, [2])];
//!     SafetensorsWriter::new(specs)?.write(tmp, |spec, sink| {
//!         let values: Vec<f32> = (0..spec.num_elements()).map(|i| i as f32).collect();
//!         sink.write_f32(&values)
//!     })
//! })?;
//!
//! let weights = WeightFolder::open(&dir)?;
//! assert_eq!(weights.names().collect::<Vec<_>>(), ["b", "w"]);
//! weights.check_names(&[("w".into(), vec![2, 3]), ("b".into(), vec![2])], &[])?;
//! let mut w = [0f32; 6];
//! weights.read_f32("w", &mut w)?;
//! assert_eq!(w, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
//! # std::fs::remove_dir_all(&base).ok();
//! # Ok(())
//! # }
//! ```

pub mod atomic;
pub mod convert;
mod error;
pub mod gguf;
pub mod hf_config;
pub mod hf_tokenizer;
pub mod import;
pub mod llama2c;
pub mod names;
mod safetensors_file;
pub mod safetensors_folder;
pub mod safetensors_writer;

pub use error::{FormatError, Result};
pub use import::{ImportOptions, ImportReport, Progress};
pub use safetensors::Dtype;
pub use safetensors_folder::{TensorView, WeightFolder};
pub use safetensors_writer::{SafetensorsWriter, TensorSink, TensorSpec, WrittenWeights};
