//! What can go wrong in a module.

/// An error of a layer or of the context.
#[derive(Debug, thiserror::Error)]
pub enum NnError {
    /// An operation failed; the scope says where.
    #[error("{scope}: {source}")]
    At {
        /// Scope path, as in the weights file.
        scope: String,
        /// What failed.
        source: Box<NnError>,
    },
    /// A tape operation failed.
    #[error(transparent)]
    Autograd(#[from] phalanx_autograd::AutogradError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::TensorError),
    /// A parameter has no value.
    #[error("parameter {0} has no value yet; load or initialise the model first")]
    NoValue(String),
    /// A parameter is laid out for inference, and something else was asked of it.
    #[error(
        "parameter {name} is laid out for inference ({form}): it can generate, but not be trained, merged or saved; load the model without laying it out"
    )]
    Prepared {
        /// Parameter.
        name: String,
        /// How its values are stored.
        form: String,
    },
    /// A value of the wrong shape was given to a parameter.
    #[error("parameter {name} has shape {want:?}, a value of shape {got:?} was given")]
    Shape {
        /// Parameter.
        name: String,
        /// Declared.
        want: Vec<usize>,
        /// Given.
        got: Vec<usize>,
    },
    /// The working value of a parameter is not here: its rows lie on several ranks.
    #[error("parameter {0} is sharded and not gathered here; it can be used only while the module that owns it runs")]
    NotGathered(String),
    /// A part was named that is none, or too late.
    #[error(
        "parameter {name} {shape:?} cannot be placed as {placement}: the part must lie inside it and be named before it has a value"
    )]
    Placement {
        /// Parameter.
        name: String,
        /// Its whole shape.
        shape: Vec<usize>,
        /// The part.
        placement: String,
    },
    /// What a plan does around modules failed.
    #[error("{0}")]
    Parallel(String),
    /// The generation cache refused.
    #[error("{0}")]
    Cache(String),
}

impl NnError {
    /// Names the scope that the error came from, once (the innermost one stays).
    #[must_use]
    pub fn at(self, scope: &str) -> NnError {
        match self {
            e @ NnError::At { .. } => e,
            e => NnError::At { scope: scope.to_owned(), source: Box::new(e) },
        }
    }
}

/// Result of a module.
pub type Result<T, E = NnError> = std::result::Result<T, E>;
