//! Where the gradient of a parameter accumulates.

use std::sync::{Arc, Mutex};

use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{AutogradError, Result};

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
    /// Those of `f`, or if memory runs out or someone still holds the gradient ([`GradSlot::get`]). What was there stays, but for
    /// what a failing `f` has already written; a fresh buffer that `f` failed on is forgotten.
    pub fn accumulate<E>(
        &self,
        rt: &Runtime,
        shape: &[usize],
        f: impl FnOnce(&mut [f32], bool) -> Result<(), E>,
    ) -> Result<()>
    where
        AutogradError: From<E>,
    {
        let mut slot = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(grad) = &mut *slot {
            return Ok(f(grad.f32_mut()?, false)?);
        }
        let mut grad = rt.empty(shape, DType::F32, Category::Gradients)?;
        f(grad.f32_mut()?, true)?;
        *slot = Some(grad);
        Ok(())
    }

    /// As [`GradSlot::accumulate`] for an `f` that only ever adds: a fresh buffer is zeroed first.
    ///
    /// # Errors
    /// As [`GradSlot::accumulate`].
    pub fn add<E>(&self, rt: &Runtime, shape: &[usize], f: impl FnOnce(&mut [f32]) -> Result<(), E>) -> Result<()>
    where
        AutogradError: From<E>,
    {
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

    /// Puts a gradient there, instead of what there was.
    pub fn put(&self, grad: Tensor) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = Some(grad);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn one(buf: &mut [f32]) -> Result<()> {
        buf.iter_mut().for_each(|x| *x += 1.0);
        Ok(())
    }

    #[test]
    fn a_failed_contribution_loses_nothing() {
        let (rt, slot) = (Runtime::new(1), GradSlot::new());
        let fail = |_: &mut [f32]| Err(AutogradError::Other("no".into()));
        assert!(slot.add(&rt, &[2], fail).is_err());
        assert!(slot.get().is_none(), "nothing was added");
        slot.add(&rt, &[2], one).unwrap();
        let held = slot.get().unwrap();
        assert!(slot.add(&rt, &[2], one).is_err(), "someone still reads it");
        drop(held);
        assert!(slot.add(&rt, &[2], fail).is_err());
        slot.add(&rt, &[2], one).unwrap();
        assert_eq!(slot.take().unwrap().f32().unwrap(), [2.0, 2.0]);
    }
}
