//! What can be wrong with a configuration, and where.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a value came from; shown by [`Config::describe`](crate::Config::describe) and at the head of every problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody wrote it: the default declared beside the key.
    Default,
    /// A line of a file (lines and columns count from 1).
    File {
        /// The path as the user gave it.
        path: Arc<str>,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        col: usize,
    },
    /// `key=value` or `--key value` on the command line.
    Override,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line, .. } => write!(f, "{path}:{line}"),
            Origin::Override => f.write_str("command line"),
        }
    }
}

/// One thing to mend: where, which key, what is wrong, and how to mend it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// File and line, or the command line. `Default` where the key was left out.
    pub origin: Origin,
    /// The key it is about.
    pub key: String,
    /// What is wrong.
    pub what: String,
    /// What to write instead.
    pub mend: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::Default => write!(f, "`{}`: {}", self.key, self.what)?,
            origin => write!(f, "{origin}: `{}`: {}", self.key, self.what)?,
        }
        if self.mend.is_empty() { Ok(()) } else { write!(f, "\n    {}", self.mend) }
    }
}

/// All problems of one configuration: a user mends a file once, not once a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0.len();
        write!(f, "the configuration has {n} problem{}:", if n == 1 { "" } else { "s" })?;
        for p in &self.0 {
            write!(f, "\n  {p}")?;
        }
        Ok(())
    }
}

/// Why a configuration was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}; give the path of a YAML or JSON file", path.display())]
    Read {
        /// The path as given.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The text is not YAML (or uses a part of YAML that configurations have no use for).
    #[error("{origin}: not valid YAML: {message}")]
    Syntax {
        /// File and line.
        origin: Origin,
        /// What the parser or the loader found.
        message: String,
    },
    /// The text is YAML, but some keys or values are wrong.
    #[error("{0}")]
    Invalid(Problems),
}

impl ConfigError {
    /// The single problems, where there are any: what `--json` prints.
    pub fn problems(&self) -> &[Problem] {
        match self {
            ConfigError::Invalid(p) => &p.0,
            _ => &[],
        }
    }
}

/// A `Result` of this crate.
pub type Result<T, E = ConfigError> = std::result::Result<T, E>;
