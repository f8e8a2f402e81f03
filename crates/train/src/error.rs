//! What can go wrong in a training run.

use std::path::PathBuf;

/// An error of training, evaluation, export or verification.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting that cannot be.
    #[error("{key}: {why}")]
    Setting {
        /// The key.
        key: String,
        /// What is wrong and what to do.
        why: String,
    },
    /// The plan does not fit the model.
    #[error("{}", .0.iter().map(|c| c.to_string()).collect::<Vec<_>>().join("\n"))]
    Plan(Vec<phalanx_parallel::Conflict>),
    /// The loss or the gradients stopped being numbers.
    #[error(
        "step {step}: the loss or the gradient norm was not finite {skipped} times in a row; last checkpoint: {checkpoint}. Lower learning_rate, raise warmup_steps, or check the data with `phalanx data check`"
    )]
    NotFinite {
        /// Step of the last attempt.
        step: u64,
        /// Updates skipped in a row.
        skipped: u64,
        /// Where to go on from.
        checkpoint: String,
    },
    /// A checkpoint that cannot be used.
    #[error("{path}: {why}", path = path.display())]
    Checkpoint {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong and what to do.
        why: String,
    },
    /// An adapter that cannot be used.
    #[error("{path}: {why}", path = path.display())]
    Adapter {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong and what to do.
        why: String,
    },
    /// A golden case that cannot be read.
    #[error("{case}: {why}")]
    Golden {
        /// The case.
        case: String,
        /// What is wrong.
        why: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The configuration was refused.
    #[error(transparent)]
    Config(#[from] phalanx_config::ConfigError),
    /// The data was refused.
    #[error(transparent)]
    Data(#[from] phalanx_data::DataError),
    /// A file is not what it should be.
    #[error(transparent)]
    Format(#[from] phalanx_formats::FormatError),
    /// A report could not be written.
    #[error(transparent)]
    Report(#[from] phalanx_report::ReportError),
    /// The model was refused.
    #[error(transparent)]
    Model(#[from] phalanx_models::ModelError),
    /// A module failed.
    #[error(transparent)]
    Nn(#[from] phalanx_nn::NnError),
    /// A tape operation failed.
    #[error(transparent)]
    Autograd(#[from] phalanx_autograd::AutogradError),
    /// A rank failed.
    #[error("{layout}: rank {rank}: {error}")]
    Rank {
        /// The layout.
        layout: String,
        /// The rank.
        rank: usize,
        /// What went wrong there.
        error: Box<TrainError>,
    },
    /// A model on a mesh failed.
    #[error(transparent)]
    Distributed(#[from] phalanx_parallel::DistributedError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::TensorError),
}

impl TrainError {
    /// A setting that cannot be.
    pub fn setting(key: &str, why: impl Into<String>) -> TrainError {
        TrainError::Setting { key: key.into(), why: why.into() }
    }
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> TrainError {
        let path = path.into();
        move |source| TrainError::Io { path, source }
    }
}

/// Result of training.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;
