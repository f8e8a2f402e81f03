//! What can go wrong in the demo.

use std::path::PathBuf;

/// An error of the demo.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The grammar of the stories is not well formed.
    #[error("stories.txt:{line}: {why}")]
    Grammar {
        /// Line of the grammar, from 1; 0 where it is about a whole story.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// The tokenizer could not be made.
    #[error("the tokenizer could not be made: {0}")]
    Tokenizer(String),
    /// The folder holds a demo that is done.
    #[error("{dir} holds a finished demo ({steps} steps); `--continue` trains it further, `--overwrite` starts anew, `--output_dir DIR` leaves it alone", dir = dir.display())]
    Finished {
        /// The demo's folder.
        dir: PathBuf,
        /// Steps it was trained.
        steps: u64,
    },
    /// The folder holds something else.
    #[error("{dir} is not empty and was not made by `phalanx demo`; choose another folder with `--output_dir DIR`", dir = dir.display())]
    NotADemo {
        /// The folder.
        dir: PathBuf,
    },
    /// There is nothing to go on with.
    #[error("{dir} holds no checkpoint to continue from; leave out `--continue`", dir = dir.display())]
    NothingToContinue {
        /// The demo's folder.
        dir: PathBuf,
    },
    /// An option that cannot be.
    #[error("{key}: {why}")]
    Option {
        /// The option.
        key: &'static str,
        /// What is wrong and what to do.
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
    /// A file could not be written as a whole.
    #[error(transparent)]
    Format(#[from] phalanx_formats::FormatError),
    /// Training failed.
    #[error(transparent)]
    Train(#[from] phalanx_train::TrainError),
    /// Generation failed.
    #[error(transparent)]
    Generate(#[from] phalanx_generate::GenerateError),
}

impl DemoError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> DemoError {
        let path = path.into();
        move |source| DemoError::Io { path, source }
    }

    pub(crate) fn grammar(line: usize, why: impl Into<String>) -> DemoError {
        DemoError::Grammar { line, why: why.into() }
    }
}

/// Result of the demo.
pub type Result<T, E = DemoError> = std::result::Result<T, E>;
