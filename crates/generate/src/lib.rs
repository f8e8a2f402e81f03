//! Generation: from a prompt to tokens, text and conversation.
mod defaults;
mod engine;
mod error;
pub mod kv_cache;
mod request;
mod rows;
pub mod sampling;

pub use defaults::{GenerationDefaults, SamplingChoice};
pub use engine::{Generator, GeneratorOptions};
pub use error::{GenerateError, Result};
pub use request::{Completion, FinishReason, Flow, Request, Token};
pub use sampling::SamplingParams;
