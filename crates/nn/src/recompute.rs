//! A region that is forgotten in forward and run again in backward (Chen et al., arXiv 1604.06174).
//!
//! The second run sees the same input, environment and randomness, so its values have the same bits.

use std::sync::Arc;

use phalanx_autograd::{AutogradError, Function, Saved, Tape};
use phalanx_tensor::{Runtime, Tensor};

use crate::{BalancePass, Cx, Env, Module, Result};

pub(crate) fn forward<M: Module>(cx: &mut Cx, module: &Arc<M>, x: Tensor) -> Result<Tensor> {
    let tape = cx.tape.take();
    let y = module.forward(cx, x.clone().with_node(None));
    cx.tape = tape;
    let y = y?;
    let module: Arc<dyn Module> = Arc::<M>::clone(module);
    // Nothing trains inside and nothing is tracked outside: then there is nothing to differentiate.
    let mut trains = crate::parameters(module.as_ref()).iter().any(crate::Parameter::trainable);
    let inside = format!("{}.", cx.path());
    trains |= cx.env().adapters.by_path.keys().any(|p| p.starts_with(&inside) || p == cx.path());
    let (env, path, balance) = (Arc::clone(cx.env()), cx.path().to_owned(), cx.balance());
    let Some(tape) = &mut cx.tape else { return Ok(y) };
    let region = Region { module, input: tape.save(&x), needs_dx: tape.tracks(&x), env, path, balance };
    Ok(tape.record(&[&x], trains, y, region, None))
}

struct Region {
    module: Arc<dyn Module>,
    input: Saved,
    needs_dx: bool,
    env: Arc<Env>,
    path: String,
    balance: Option<Arc<BalancePass>>,
}

impl Function for Region {
    fn name(&self) -> &'static str {
        "recompute"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> phalanx_autograd::Result<Vec<Option<Tensor>>> {
        let mut tape = Tape::new();
        // Only read where backward is profiled.
        tape.set_scope(rt.device().profiler().is_on().then(|| self.path.as_str().into()));
        let saved = self.input.get(rt)?;
        let x = if self.needs_dx { tape.input(saved) } else { saved };
        let mut cx = Cx::at(self.env, self.path, Some(tape), self.balance);
        let y = self.module.forward(&mut cx, x.clone()).map_err(|e| AutogradError::Other(e.to_string()))?;
        let Some(tape) = cx.into_tape() else { return Ok(vec![None]) };
        let mut grads = tape.backward(rt, &y, grad)?;
        Ok(vec![grads.take(&x)])
    }
}
