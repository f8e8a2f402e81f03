//! What can go wrong when generating.

use std::path::PathBuf;

/// An error of generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A parameter has an impossible value.
    #[error("{name}: {value} {why}")]
    Parameter {
        /// The parameter, as in configurations.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is wrong with it, and what would be right.
        why: String,
    },
    /// A request without a single token to go on from.
    #[error(
        "prompt {}: it is empty; give at least one token (for a start from nothing, the tokenizer's BOS)", request + 1
    )]
    EmptyPrompt {
        /// Which request, counted from 0.
        request: usize,
    },
    /// A prompt that leaves no room for an answer.
    #[error(
        "prompt {}: it has {tokens} tokens, the model's context holds {context} for prompt and answer together; shorten the prompt to at most {} tokens", request + 1, context.saturating_sub(1)
    )]
    PromptTooLong {
        /// Which request, counted from 0.
        request: usize,
        /// Its length.
        tokens: usize,
        /// The limit.
        context: usize,
    },
    /// A token that the model has no row for.
    #[error(
        "prompt {}: {what}: id {id} at place {place} is outside the model's vocabulary of {vocab}; use the tokenizer that belongs to the model", request + 1
    )]
    UnknownToken {
        /// Which request, counted from 0.
        request: usize,
        /// `prompt` or `stop_token_ids`.
        what: &'static str,
        /// Index in it.
        place: usize,
        /// The token.
        id: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// The model predicts NaN or infinity.
    #[error(
        "prompt {}: the logits for position {position} are not finite; the weights are damaged or come from a run that diverged", request + 1
    )]
    NotFinite {
        /// Which request, counted from 0.
        request: usize,
        /// Position of the token that was to be predicted.
        position: usize,
    },
    /// `generation_config.json` holds something that cannot be used.
    #[error("{place}: {key}: {why}")]
    Defaults {
        /// The file.
        place: String,
        /// The key.
        key: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What was generated could not be written out.
    #[error("cannot write the answer: {0}")]
    Write(std::io::Error),
    /// The tokenizer or the chat template failed.
    #[error(transparent)]
    Data(#[from] phalanx_data::DataError),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] phalanx_models::ModelError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::TensorError),
}

impl GenerateError {
    pub(crate) fn parameter(name: &'static str, value: impl ToString, why: impl Into<String>) -> GenerateError {
        GenerateError::Parameter { name, value: value.to_string(), why: why.into() }
    }
}

impl From<phalanx_kernels::KernelError> for GenerateError {
    fn from(e: phalanx_kernels::KernelError) -> Self {
        GenerateError::Tensor(e.into())
    }
}

/// Result of a generation.
pub type Result<T, E = GenerateError> = std::result::Result<T, E>;
