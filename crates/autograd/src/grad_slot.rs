//! Where the gradient of a parameter accumulates.

use std::sync::{Arc, Mutex};

use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::Result;

/// A parameter's gradient: nothing yet, or an f32 tensor that further contributions are added to. Clones share it.
#[derive(Clone, Default)]
pub struct GradSlot(Arc<Mutex<Option<Tensor>>>);

impl GradSlot {
    /// An empty slot.
    pub fn new() -> GradSlot {
        GradSlot::default()
    }

    /// Adds a contribution: `f(buffer, fresh)` must overwrite `buffer` when `fresh` and add to it otherwise.
    ///
    /// # Errors
    /// If memory runs out or `f` fails.
    pub fn accumulate(
        &self,
        rt: &Runtime,
        shape: &[usize],
        f: impl FnOnce(&mut [f32], bool) -> phalanx_kernels::Result<()>,
    ) -> Result<()> {
        let mut slot = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let (mut grad, fresh) = match slot.take() {
            Some(g) => (g, false),
            None => (rt.empty(shape, DType::F32, Category::Gradients)?, true),
        };
        let done = f(grad.f32_mut()?, fresh);
        *slot = Some(grad);
        Ok(done?)
    }

    /// As [`GradSlot::accumulate`] for an `f` that only ever adds: a fresh buffer is zeroed first.
    ///
    /// # Errors
    /// If memory runs out or `f` fails.
    pub fn add(
        &self,
        rt: &Runtime,
        shape: &[usize],
        f: impl FnOnce(&mut [f32]) -> phalanx_kernels::Result<()>,
    ) -> Result<()> {
        self.accumulate(rt, shape, |buf, fresh| {
            if fresh {
                buf.fill(0.0);
            }
            f(buf)
        })
    }

    /// The gradient, leaving it in place; `None` if nothing has been added since the last [`GradSlot::take`].
    pub fn get(&self) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Takes the gradient out, leaving the slot empty.
    pub fn take(&self) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).take()
    }

    /// Runs `f` on the gradient in place, if there is one.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn with<R>(&self, f: impl FnOnce(&mut Tensor) -> R) -> Option<R> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).as_mut().map(f)
    }
}
