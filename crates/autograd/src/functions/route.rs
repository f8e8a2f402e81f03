//! The router of a mixture of experts.

use std::sync::Arc;

use phalanx_kernels::moe::{Balance, Route, route as kernel};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Saved, Tape};

/// What a balancing loss adds to the gradient of the probabilities. It enters in the router's backward and not through the tape: it depends
/// on the choices of all tokens (and of all layers, where those are pooled), which are known when the forward is over.
pub struct BalanceSlopes {
    /// Derivative by the probability of each expert [G, E].
    pub slopes: Vec<f32>,
    /// The group of each token [T].
    pub group_of: Arc<[u32]>,
}

/// Asked once, in backward.
pub type AskSlopes = Box<dyn FnOnce() -> BalanceSlopes + Send>;

/// What was chosen.
pub struct Chosen {
    /// The experts of each token [T·k], the best first.
    pub experts: Arc<[u32]>,
    /// Their weights [T, k]; recorded.
    pub weights: Tensor,
    /// The scores as shares that sum to 1 [T, E], if they were asked for.
    pub probabilities: Option<Vec<f32>>,
}

/// logits [T, E] → the k experts of each token. `bias` [E] counts for choosing only. `balance`: keep the probabilities for a balancing loss,
/// and ask it for its slopes in backward.
///
/// # Errors
/// If the form is not possible, shapes do not fit or memory runs out.
pub fn route(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    logits: &Tensor,
    form: Route,
    bias: Option<&Tensor>,
    balance: Option<AskSlopes>,
) -> Result<Chosen> {
    let (t, k) = (logits.dim(0), form.top_k);
    let mut experts = vec![0; t * k];
    let mut weights = rt.empty(&[t, k], DType::F32, Category::Activations)?;
    let mut probabilities = balance.is_some().then(|| vec![0f32; logits.len()]);
    let bias = bias.map(Tensor::f32).transpose()?;
    let shares = probabilities.as_deref_mut();
    kernel::forward(rt.device(), &form, logits.f32()?, bias, &mut experts, weights.f32_mut()?, shares)?;
    let experts: Arc<[u32]> = experts.into();
    if let Some(tape) = tape {
        let f = Router { logits: tape.save(logits), form, experts: Arc::clone(&experts), balance };
        weights = tape.record(&[logits], false, weights, f, None);
    }
    Ok(Chosen { experts, weights, probabilities })
}

struct Router {
    logits: Saved,
    form: Route,
    experts: Arc<[u32]>,
    balance: Option<AskSlopes>,
}

impl Function for Router {
    fn name(&self) -> &'static str {
        "route"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let logits = self.logits.get(rt)?;
        let asked = self.balance.map(|ask| ask());
        let balance = asked.as_ref().map(|b| Balance { slopes: &b.slopes, group_of: &b.group_of });
        let mut d = rt.empty(logits.shape(), DType::F32, Category::Activations)?;
        let (l, g) = (logits.f32()?, grad.f32()?);
        kernel::backward(rt.device(), &self.form, l, &self.experts, g, balance, d.f32_mut()?)?;
        Ok(vec![Some(d)])
    }
}
