//! Standard output.
//!
//! `println!` panics when nobody reads on (`phalanx doctor | head -1`) or the disk behind a redirection is full. Here both are
//! errors, and `main` ends quietly for the first.

use std::fmt::Display;
use std::io::{self, Write};

/// Standard output does not take any more.
#[derive(Debug)]
pub struct OutError(io::Error);

impl std::fmt::Display for OutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "standard output: {}", self.0)
    }
}

impl std::error::Error for OutError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

impl OutError {
    /// Whether the reader only went away.
    pub fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Writes text as it is, at once.
///
/// # Errors
/// Nobody reads on, or the disk is full.
pub fn text(what: impl Display) -> Result<(), OutError> {
    let mut out = io::stdout().lock();
    write!(out, "{what}").and_then(|()| out.flush()).map_err(OutError)
}

/// Writes a line.
///
/// # Errors
/// As [`text`].
pub fn line(what: impl Display) -> Result<(), OutError> {
    text(format_args!("{what}\n"))
}
