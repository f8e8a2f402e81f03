//! What can go wrong on a tape.

/// An error while recording or differentiating.
#[derive(Debug, thiserror::Error)]
pub enum AutogradError {
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::TensorError),
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] phalanx_kernels::KernelError),
    /// Backward was asked of a value that this tape has not recorded.
    #[error("backward from a value that this tape has not recorded (is everything frozen?)")]
    NotRecorded,
    /// The gradients of a fused loss were formed for another upstream factor.
    #[error("the fused loss computed its gradients for an upstream factor of {expected}, backward brought {got}")]
    Upstream {
        /// Factor at forward.
        expected: f32,
        /// Factor at backward.
        got: f32,
    },
    /// Something that a region does when it runs again failed.
    #[error("{0}")]
    Other(String),
}

/// Result of an autograd operation.
pub type Result<T, E = AutogradError> = std::result::Result<T, E>;
