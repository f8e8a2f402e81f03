//! What a kernel call can refuse.

/// Why a kernel refused its arguments. Nothing has been written when one of these comes back.
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
}

/// Result of a kernel call.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

pub(crate) fn check_len(kernel: &'static str, what: &'static str, got: usize, want: usize) -> Result<()> {
    if got == want { Ok(()) } else { Err(KernelError::Length { kernel, what, got, want }) }
}

pub(crate) fn bad_shape<T>(kernel: &'static str, why: impl Into<String>) -> Result<T> {
    Err(KernelError::Shape { kernel, why: why.into() })
}
