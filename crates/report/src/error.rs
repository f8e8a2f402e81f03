//! What can go wrong while reporting: files.

use std::path::{Path, PathBuf};

/// Why a report could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}; free some space or choose another `output_dir`", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file written atomically could not be written.
    #[error(transparent)]
    Write(#[from] phalanx_formats::FormatError),
    /// A file of an earlier run does not hold what it should.
    #[error("{}:{line}: {what}; {mend}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
        /// The way out.
        mend: &'static str,
    },
}

/// A `Result` of this crate.
pub type Result<T, E = ReportError> = std::result::Result<T, E>;

impl ReportError {
    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        ReportError::Io { path: path.into(), action, source }
    }
}
