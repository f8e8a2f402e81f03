//! Generation: from a prompt to tokens, text and conversation.
//!
//! # Why the numbers are those of training
//! A sampler whose probabilities differ from the trainer's is a quiet poison for reinforcement learning, and makes every
//! evaluation a matter of batch size. Here generation runs the same modules through the same kernels as training: only the
//! context ([`phalanx_nn::Cx`]) holds a cache. The kernels compute each row by itself, so a token gets the same bits whether
//! it stands in a packed training batch, in a piece of a prompt, or alone as the newest token of one among many sequences.
//! The log-probability reported for a token is the model's own, before temperature, penalties and cuts, and equals the
//! trainer's to the bit (f32); a test shows it for every family, batch, cut and number of threads.
//!
//! # How it is built
//! - [`kv_cache`]: keys and values of the tokens seen, runs of different lengths in one storage a layer.
//! - [`Generator`]: continuous batching. Each pass takes one token of every sequence under way and pieces of new prompts;
//!   sequences leave and others take their place. It knows tokens, not text.
//! - [`sampling`]: the processors of `transformers` in their order; randomness is a function of the request's seed and the
//!   token's position, so a result does not depend on the company it is generated in.
//! - [`text`]: whole characters, stop strings across token borders. [`chat`]: a conversation, lines in and answers out.
//! - [`GenerationDefaults`]: what the model's makers recommend.
//!
//! # Example
//! ```
//! use std::ops::ControlFlow;
//! use phalanx_generate::{Generator, GeneratorOptions, Request, SamplingParams};
//! use phalanx_models::{Model, ModelConfig, initialise};
//! use phalanx_nn::{Batch, Env};
//! use phalanx_tensor::Runtime;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = serde_json::json!({"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32,
//!     "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64});
//! let rt = Runtime::new(1);
//! let model = Model::new(&ModelConfig::from_json("config.json", config)?)?;
//! initialise(&rt, &model, 1)?;
//!
//! let mut generator = Generator::new(&model, &Env::new(rt, Batch::causal(&[])), GeneratorOptions::default())?;
//! let request = |prompt: &[u32]| Request {
//!     prompt: prompt.to_vec(),
//!     max_new_tokens: 8,
//!     sampling: SamplingParams::at_temperature(0.8),
//!     seed: 7,
//!     ..Request::default()
//! };
//! let done = generator.generate(vec![request(&[1, 2, 3]), request(&[4])], &mut |token| {
//!     println!("request {}: {} ({:.2})", token.request, token.id, token.logprob);
//!     Ok(ControlFlow::Continue(()))
//! })?;
//! assert_eq!((done[0].ids.len(), done[1].finish_reason.as_str()), (8, "length"));
//! # Ok(())
//! # }
//! ```

pub mod chat;
mod defaults;
mod engine;
mod error;
pub mod kv_cache;
mod request;
mod rows;
pub mod sampling;
pub mod text;

pub use chat::{ChatOptions, ChatSession};
pub use defaults::{GenerationDefaults, SamplingChoice};
pub use engine::{Generator, GeneratorOptions};
pub use error::{GenerateError, Result};
pub use request::{Completion, FinishReason, Flow, Request, Token};
pub use sampling::SamplingParams;
pub use text::{TextCompletion, TextOptions, generate_text};
