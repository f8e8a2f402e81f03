//! Model families: Hugging Face folders in, plain modules out.
//!
//! # How a family is laid out
//! One folder a family with the same files: `config.rs` reads its `config.json` (both the older and the newer form), `model.rs` is the
//! model as a textbook would write it. Parameter names are those of the Hugging Face file, so no table maps them. Families that are a
//! known model with a few switches turned (mistral, qwen2 and qwen3 are llama with a window, biases, q/k norms) only have a
//! `config.rs`. `docs/adding-a-model.md` walks through adding one.
//!
//! [`load_weights`] opens a folder: reads the config, refuses an unknown family with the list of known ones, checks every tensor's name and
//! shape before reading the first byte, and fills the parameters from the memory-mapped file. [`save_weights`] writes one back.
//!
//! ```no_run
//! use phalanx_models::{ModelConfig, Model, load_weights};
//! use phalanx_tensor::{DType, Runtime};
//! let rt = Runtime::new(2);
//! let config = ModelConfig::from_folder("SmolLM2-135M-Instruct")?;
//! let model = Model::new(&config)?;
//! load_weights(&rt, &model, "SmolLM2-135M-Instruct", &|_| DType::F32)?;
//! # Ok::<(), phalanx_models::ModelError>(())
//! ```

mod block;
mod causal_lm;
mod config;
mod decoder;
mod error;
mod experts;
mod known;
mod stored;
mod to_generate;
mod weights;

pub mod deepseek_v3;
pub mod llama;
pub mod mistral;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_moe;

pub use block::DecoderLayer;
pub use causal_lm::{CausalLm, Loss, Model, head_loss, logits, loss};
pub use config::{ModelConfig, StoredDType};
pub use decoder::DecoderLm;
pub use error::{ModelError, Result};
pub use experts::ExpertsConfig;
pub use known::{Family, family, known_families};
pub use to_generate::{WeightForm, lay_out, load_gguf};
pub use weights::{check_weights, initialise, load_weights, save_weights};
