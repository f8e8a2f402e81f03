//! What happens around a module that is not in the module: the seam through which parallel forms reach a model.

use std::sync::Arc;

use phalanx_autograd::functions::Across;
use phalanx_tensor::Tensor;

use crate::{Cx, Result};

/// Called by [`Cx`] around every named module, with the scope path in force ([`Cx::path`]; empty for the whole pass). On the way back through
/// the model, a hook acts by the marks that it leaves on the tape ([`phalanx_autograd::Tape::mark`]).
///
/// In a recompute region the inner modules run twice, with their hooks; the region's own run around it once.
pub trait ScopeHooks: Send + Sync {
    /// Before the module's parameters are asked for.
    ///
    /// # Errors
    /// If what it does fails.
    fn enter(&self, cx: &mut Cx) -> Result<()>;

    /// The rows that the module gets, instead of those it was called with.
    ///
    /// # Errors
    /// As [`ScopeHooks::enter`].
    fn input(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor>;

    /// The rows that the caller gets, instead of those the module made.
    ///
    /// # Errors
    /// As [`ScopeHooks::enter`].
    fn output(&self, cx: &mut Cx, y: Tensor) -> Result<Tensor>;

    /// After the module is done.
    ///
    /// # Errors
    /// As [`ScopeHooks::enter`].
    fn leave(&self, cx: &mut Cx) -> Result<()>;

    /// The ranks that hold the other slices of parameters, where those are cut.
    fn across(&self) -> Option<Arc<dyn Across>> {
        None
    }

    /// Which of all rows of a batch of `tokens` is the first on this rank where rows are dealt to ranks.
    fn first_row(&self, tokens: usize) -> usize {
        let _ = tokens;
        0
    }
}
