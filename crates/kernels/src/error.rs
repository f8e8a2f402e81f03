//! What a kernel call can refuse.

/// Why a kernel did not run. Nothing has been written when it refused its arguments; when memory ran out, an output may be
/// half written.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KernelError {
    /// A slice has not the length that the shape asks for.
    #[error("{kernel}: {what} holds {got} elements, its shape needs {want}")]
    Length {
        /// The kernel called.
        kernel: &'static str,
        /// The argument.
        what: &'static str,
        /// Elements found.
        got: usize,
        /// Elements needed.
        want: usize,
    },
    /// A size or option that the kernel cannot work with.
    #[error("{kernel}: {why}")]
    Shape {
        /// The kernel called.
        kernel: &'static str,
        /// What is wrong, with the numbers.
        why: String,
    },
    /// The system has no memory for a working buffer.
    #[error(
        "no memory for a kernel's working buffer of {bytes} bytes ({why}). Lower the batch or cutoff_len, or use fewer threads"
    )]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        why: String,
    },
    /// The system refused to start a thread.
    #[error(
        "{wanted} threads were asked for, the system started {started} and refused the next ({why}). Ask for at most {started} threads, or raise the limit on processes (ulimit -u)"
    )]
    Threads {
        /// Threads asked for, the caller included.
        wanted: usize,
        /// Threads there were, the caller included.
        started: usize,
        /// What the system said.
        why: String,
    },
}

/// Result of a kernel call.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

pub(crate) fn check_len(kernel: &'static str, what: &'static str, got: usize, want: usize) -> Result<()> {
    if got == want { Ok(()) } else { Err(KernelError::Length { kernel, what, got, want }) }
}

pub(crate) fn bad_shape<T>(kernel: &'static str, why: impl Into<String>) -> Result<T> {
    Err(KernelError::Shape { kernel, why: why.into() })
}
