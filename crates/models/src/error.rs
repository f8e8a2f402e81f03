//! What can go wrong with a model folder.

use std::path::PathBuf;

/// An error of a model's config or weights.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A family that is not here.
    #[error("{place}: model_type \"{found}\" is not supported; known families: {known}")]
    UnknownFamily {
        /// The file.
        place: String,
        /// What it says.
        found: String,
        /// What there is.
        known: String,
    },
    /// A folder is not there, or is no model's.
    #[error(
        "{dir}: config.json is missing: give a Hugging Face model folder (config.json, *.safetensors, tokenizer.json)",
        dir = dir.display()
    )]
    NoConfig {
        /// The folder.
        dir: PathBuf,
    },
    /// A key of `config.json` is missing or has a value that cannot be used.
    #[error("{place}: {key}: {why}")]
    Config {
        /// The file.
        place: String,
        /// The key.
        key: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// A weight is not a number.
    #[error(
        "{file}: tensor {tensor} holds a value that is not finite at element {index}; the file is damaged or comes from a run that diverged"
    )]
    NotFinite {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// First such element.
        index: usize,
    },
    /// A file could not be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error(transparent)]
    Format(#[from] phalanx_formats::FormatError),
    /// A module failed.
    #[error(transparent)]
    Nn(#[from] phalanx_nn::NnError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::TensorError),
    /// A tape operation failed.
    #[error(transparent)]
    Autograd(#[from] phalanx_autograd::AutogradError),
}

/// Result of a model operation.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
