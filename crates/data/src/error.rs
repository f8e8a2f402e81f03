//! The one error type of this crate: what was wrong, where, and what mends it.

use std::path::{Path, PathBuf};

/// Result with this crate's error.
pub type Result<T> = std::result::Result<T, DataError>;

/// What can go wrong between a data file and a batch of token ids.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb: "read", "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The token cache could not be written.
    #[error(transparent)]
    Cache(#[from] phalanx_formats::FormatError),
    /// A data file is not what its format demands.
    #[error("{}:{place}: {detail}", path.display())]
    Record {
        /// The data file.
        path: PathBuf,
        /// "line 7" for line formats, "record 7" for arrays and tables (both counted from 1).
        place: String,
        /// What is wrong with it and how to mend it.
        detail: String,
    },
    /// A file as a whole is unusable (unknown format, broken header ...).
    #[error("{}: {detail}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and how to mend it.
        detail: String,
    },
    /// `dataset_info.json` is wrong, or says something that cannot be done.
    #[error("{}, data set \"{name}\": {detail}", path.display())]
    Info {
        /// The `dataset_info.json`.
        path: PathBuf,
        /// The entry.
        name: String,
        /// What is wrong with it and how to mend it.
        detail: String,
    },
    /// A chat template failed or cannot be used.
    #[error("chat template {name}: {detail}")]
    Template {
        /// Where the template came from: a file or the name of a built-in one.
        name: String,
        /// What went wrong, with the template's own message.
        detail: String,
    },
    /// An option (a key of the user's configuration) has an impossible value.
    #[error("{key}: {detail}")]
    Option {
        /// The configuration key.
        key: &'static str,
        /// Why the value cannot be, and what could.
        detail: String,
    },
    /// Nothing to train or evaluate on is left.
    #[error("no samples: {0}")]
    Empty(String),
    /// A saved position of the sample stream does not belong to this data.
    #[error("cannot resume the sample stream: {0}")]
    Resume(String),
}

impl DataError {
    pub(crate) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn file(path: &Path, detail: impl Into<String>) -> Self {
        Self::File { path: path.to_path_buf(), detail: detail.into() }
    }

    pub(crate) fn record(path: &Path, place: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Record { path: path.to_path_buf(), place: place.into(), detail: detail.into() }
    }

    pub(crate) fn option(key: &'static str, detail: impl Into<String>) -> Self {
        Self::Option { key, detail: detail.into() }
    }
}

/// Of `known`, the name closest to `wanted` (edit distance at most a third of its length, at least 2), for messages.
pub(crate) fn nearest<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (wanted.chars().count() / 3).max(2);
    known.into_iter().map(|k| (strsim::levenshtein(wanted, k), k)).filter(|(d, _)| *d <= limit).min().map(|(_, k)| k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_a_typo_and_refuses_a_stranger() {
        assert_eq!(nearest("alpaca_dmo", ["alpaca_demo", "identity"]), Some("alpaca_demo"));
        assert_eq!(nearest("zzzzzz", ["alpaca_demo", "identity"]), None);
    }
}
