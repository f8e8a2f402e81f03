//! Values that backward needs: kept, or rebuilt from something smaller.

use std::sync::{Arc, Mutex};

use phalanx_tensor::{Runtime, Tensor};

use crate::Result;

type Build = Box<dyn Fn(&Runtime) -> Result<Tensor> + Send + Sync>;

/// How to make a value again. Shared by everything that saved the value; the rebuilt copy lives from the first use to the last.
pub struct Recipe {
    build: Build,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    users: usize,
    rebuilt: Option<Tensor>,
}

impl Recipe {
    /// A recipe; `build` must give the same bits as the forward did.
    pub fn new(build: impl Fn(&Runtime) -> Result<Tensor> + Send + Sync + 'static) -> Arc<Recipe> {
        Arc::new(Recipe { build: Box::new(build), state: Mutex::default() })
    }

    fn join(&self) {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).users += 1;
    }

    fn get(&self, rt: &Runtime) -> Result<Tensor> {
        let mut s = self.state.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(t) = &s.rebuilt {
            return Ok(t.clone());
        }
        let t = (self.build)(rt)?;
        if s.users > 1 {
            s.rebuilt = Some(t.clone());
        }
        Ok(t)
    }

    fn leave(&self) {
        let mut s = self.state.lock().unwrap_or_else(|e| e.into_inner());
        s.users -= 1;
        if s.users == 0 {
            s.rebuilt = None;
        }
    }
}

/// A value saved for backward.
pub struct Saved(Policy);

enum Policy {
    Keep(Tensor),
    Rebuild(Arc<Recipe>),
}

impl Saved {
    /// Keeps the tensor itself.
    pub fn keep(t: &Tensor) -> Saved {
        Saved(Policy::Keep(t.clone().with_node(None)))
    }

    /// Keeps only how to make it again.
    pub fn rebuild(recipe: &Arc<Recipe>) -> Saved {
        recipe.join();
        Saved(Policy::Rebuild(Arc::clone(recipe)))
    }

    /// The value.
    ///
    /// # Errors
    /// Those of rebuilding it.
    pub fn get(&self, rt: &Runtime) -> Result<Tensor> {
        match &self.0 {
            Policy::Keep(t) => Ok(t.clone()),
            Policy::Rebuild(r) => r.get(rt),
        }
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        if let Policy::Rebuild(r) = &self.0 {
            r.leave();
        }
    }
}
