//! The execution context: what a module may ask for besides its input.

use std::sync::{Arc, OnceLock};

use phalanx_autograd::Tape;
use phalanx_autograd::functions::{self, PassScales};
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Runtime, Tensor};

use crate::layers::RopeTables;
use crate::recompute;
use crate::{
    AdapterSet, Arithmetic, BalancePass, Batch, ContextParallel, DelayedScales, KvCache, LowRank, Module, NnError,
    ResolvedPlan, Result, RouterLog, Routing, ScopeHooks,
};

/// What stays the same during one forward and backward pass.
#[derive(Clone)]
pub struct Env {
    /// Device and memory.
    pub rt: Runtime,
    /// Private, because the angles in `rope` belong to it.
    batch: Batch,
    /// The resolved plan.
    pub plan: Arc<ResolvedPlan>,
    /// Low-rank adapters in force.
    pub adapters: Arc<AdapterSet>,
    /// Delayed scales of linear layers, for a plan with `fp8_delayed`.
    pub scales: Arc<DelayedScales>,
    /// What the routers of experts go by.
    pub routing: Routing,
    /// What they did since the last step.
    pub routers: Arc<RouterLog>,
    /// Whether dropout is on.
    pub training: bool,
    /// Seed of all randomness of the pass.
    pub seed: u64,
    /// Tells micro-batches apart, so that each draws its own randomness.
    pub moment: u64,
    /// Bytes that the logits of one chunk of tokens may take in the fused loss.
    pub logits_chunk_bytes: usize,
    /// What happens around modules: the parallel forms of the plan.
    pub hooks: Option<Arc<dyn ScopeHooks>>,
    /// How micro-batches are dealt to several ranks, where they are.
    pub context: Option<Arc<dyn ContextParallel>>,
    /// Angles of the rows of `batch`, once a layer has asked for them.
    pub(crate) rope: Arc<OnceLock<RopeTables>>,
}

impl Env {
    /// Default budget for the logits of one chunk: 220 rows of a vocabulary of 152 thousand. Each chunk packs the head's weight twice and goes over its
    /// gradient once, so few rows are dear; more than this costs memory for little.
    pub const LOGITS_CHUNK_BYTES: usize = 128 << 20;

    /// Evaluation: no adapters, no plan, no dropout.
    pub fn new(rt: Runtime, batch: Batch) -> Env {
        Env {
            rt,
            batch,
            plan: Arc::default(),
            adapters: Arc::default(),
            scales: Arc::default(),
            routing: Routing::default(),
            routers: Arc::default(),
            training: false,
            seed: 0,
            moment: 0,
            logits_chunk_bytes: Env::LOGITS_CHUNK_BYTES,
            hooks: None,
            context: None,
            rope: Arc::default(),
        }
    }

    /// Where the sequences lie.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// The same surroundings for another batch.
    pub fn for_batch(&self, batch: Batch, moment: u64) -> Env {
        Env { batch, moment, rope: Arc::default(), ..self.clone() }
    }
}

/// Carries a forward pass through a model.
pub struct Cx {
    env: Arc<Env>,
    path: String,
    /// Where operations are recorded; `None` when nothing is to be differentiated.
    pub(crate) tape: Option<Tape>,
    /// Keys and values of earlier tokens, when generating.
    kv_cache: Option<Box<dyn KvCache>>,
    /// Whether the pass is part of a training step, also where it goes without a tape.
    trains: bool,
    /// The balancing loss of the pass, if there is one.
    balance: Option<Arc<BalancePass>>,
    /// Whether this is the second run of a recompute region, whose routers have been heard.
    again: bool,
}

impl Cx {
    /// A pass that records nothing.
    pub fn eval(env: &Env) -> Cx {
        Cx {
            env: Arc::new(env.clone()),
            path: String::new(),
            tape: None,
            kv_cache: None,
            trains: false,
            balance: None,
            again: false,
        }
    }

    /// A pass that is recorded for backward.
    pub fn train(env: &Env) -> Cx {
        Cx { tape: Some(Tape::new()), trains: true, ..Cx::eval(env) }
    }

    /// A pass over new tokens whose predecessors lie in a cache. [`Cx::into_kv_cache`] gives it back.
    pub fn generate(env: &Env, cache: Box<dyn KvCache>) -> Cx {
        Cx { kv_cache: Some(cache), ..Cx::eval(env) }
    }

    /// The second run of a recompute region, somewhere inside a training step.
    pub(crate) fn at(env: Arc<Env>, path: String, tape: Option<Tape>, balance: Option<Arc<BalancePass>>) -> Cx {
        Cx { env, path, tape, kv_cache: None, trains: true, balance, again: true }
    }

    /// The cache, after the pass.
    pub fn into_kv_cache(self) -> Option<Box<dyn KvCache>> {
        self.kv_cache
    }

    /// The tape, after the pass.
    pub fn into_tape(self) -> Option<Tape> {
        self.tape
    }

    /// What stays the same during the pass.
    pub fn env(&self) -> &Arc<Env> {
        &self.env
    }

    /// Device and memory.
    pub fn rt(&self) -> &Runtime {
        &self.env.rt
    }

    /// The scope path: the parameter prefix in the weights file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The tape, while the pass is recorded.
    pub fn tape(&mut self) -> Option<&mut Tape> {
        self.tape.as_mut()
    }

    /// Whether the pass is part of a training step.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// The balancing loss that routers tell their choices, if there is one.
    pub fn balance(&self) -> Option<Arc<BalancePass>> {
        self.balance.clone()
    }

    /// Gives the pass a balancing loss.
    pub fn set_balance(&mut self, balance: Option<Arc<BalancePass>>) {
        self.balance = balance;
    }

    /// Notes what the router in scope chose [T·k], with the probabilities [T, E] if a balancing loss asked for them.
    pub(crate) fn hear_router(&self, experts: usize, chosen: &[u32], probabilities: Option<&[f32]>, dropped: usize) {
        if self.again {
            return;
        }
        if let (Some(pass), Some(p)) = (&self.balance, probabilities) {
            pass.hear(&self.path, experts, chosen, p);
        }
        if self.trains {
            self.env.routers.add(&self.path, experts, chosen, dropped);
        }
    }

    /// Splits into what functions take.
    pub fn parts(&mut self) -> (&Runtime, Option<&mut Tape>) {
        (&self.env.rt, self.tape.as_mut())
    }

    /// The low-rank adapter of the module in scope, if any.
    pub fn adapter(&self) -> Option<Arc<LowRank>> {
        self.env.adapters.by_path.get(&self.path).cloned()
    }

    /// How exact the products of the module in scope must be.
    pub fn arithmetic(&self) -> Arithmetic {
        self.env.plan.arithmetic(&self.path)
    }

    /// The seed for rounding the gradients of the module in scope at random, if the plan wants that.
    pub fn gradient_noise(&self) -> Option<u64> {
        let wanted = self.env.plan.modules.get(&self.path).is_some_and(|m| m.stochastic_gradients);
        wanted.then(|| {
            let [low, high, ..] = self.stream("gradient_rounding").block(0);
            u64::from(low) | u64::from(high) << 32
        })
    }

    /// The delayed scales of the module in scope, if it has any.
    pub fn scales(&self) -> Option<PassScales> {
        let layer = self.env.scales.by_path.get(&self.path)?;
        Some(PassScales { layer: Arc::clone(layer), observe: self.trains })
    }

    /// Randomness of the module in scope in this micro-batch.
    pub fn stream(&self, what: &str) -> Stream {
        Stream::new(self.env.seed, &format!("{}.{what}", self.path)).at(self.env.moment)
    }

    /// Where rows that a module of this scope sees begin among those of the batch: all are there, or this rank's share of them.
    pub(crate) fn first_row(&self, rows: usize) -> usize {
        let all = self.env.batch.tokens();
        match &self.env.hooks {
            Some(hooks) if rows < all => hooks.first_row(all),
            _ => 0,
        }
    }

    /// The generation cache, if there is one, with the scope it is asked from.
    pub(crate) fn kv_cache(&mut self) -> Option<(&mut dyn KvCache, &str)> {
        match &mut self.kv_cache {
            Some(c) => Some((c.as_mut(), &self.path)),
            None => None,
        }
    }

    /// Runs `module` as child `name`. Here the plan acts.
    ///
    /// # Errors
    /// Those of the module, with its scope named.
    pub fn call<M: Module>(&mut self, name: &str, module: &Arc<M>, x: Tensor) -> Result<Tensor> {
        self.around(name, |cx, hooks| {
            let x = match hooks {
                Some(hooks) => hooks.input(cx, x)?,
                None => x,
            };
            let y = if cx.tape.is_some() && cx.env.plan.recompute(&cx.path) {
                recompute::forward(cx, module, x)
            } else {
                module.forward(cx, x)
            }?;
            match hooks {
                Some(hooks) => hooks.output(cx, y),
                None => Ok(y),
            }
        })
    }

    /// Runs `f`, which makes rows of something else than rows (an embedding of ids), as child `name`.
    ///
    /// # Errors
    /// Those of `f`, with its scope named.
    pub fn source(&mut self, name: &str, f: impl FnOnce(&mut Cx) -> Result<Tensor>) -> Result<Tensor> {
        self.around(name, |cx, hooks| {
            let y = f(cx)?;
            match hooks {
                Some(hooks) => hooks.output(cx, y),
                None => Ok(y),
            }
        })
    }

    /// Runs `f`, which makes something else than rows (a loss), as child `name` on the rows `x`.
    ///
    /// # Errors
    /// Those of `f`, with its scope named.
    pub fn sink<T>(&mut self, name: &str, x: Tensor, f: impl FnOnce(&mut Cx, Tensor) -> Result<T>) -> Result<T> {
        self.around(name, |cx, hooks| {
            let x = match hooks {
                Some(hooks) => hooks.input(cx, x)?,
                None => x,
            };
            f(cx, x)
        })
    }

    /// Runs `f` as the whole pass: what belongs to no module alone is there from its start to its end, also on the way back.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn whole<T, E: From<NnError>>(&mut self, f: impl FnOnce(&mut Cx) -> Result<T, E>) -> Result<T, E> {
        let Some(hooks) = self.env.hooks.clone() else { return f(self) };
        hooks.enter(self)?;
        let y = f(self)?;
        hooks.leave(self)?;
        Ok(y)
    }

    /// Runs `f` in the scope of child `name`, between what the hooks do before and after.
    fn around<T>(&mut self, name: &str, f: impl FnOnce(&mut Cx, Option<&dyn ScopeHooks>) -> Result<T>) -> Result<T> {
        self.within(name, |cx| {
            let Some(hooks) = cx.env.hooks.clone() else { return f(cx, None) };
            hooks.enter(cx)?;
            let y = f(cx, Some(hooks.as_ref()))?;
            hooks.leave(cx)?;
            Ok(y)
        })
    }

    /// Runs `f` in the scope of child `name`.
    pub(crate) fn within<T>(&mut self, name: &str, f: impl FnOnce(&mut Cx) -> Result<T>) -> Result<T> {
        let before = self.path.len();
        if before > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        let span = self.env.rt.device().profiler().scope(|| self.path.clone());
        let outer = span.is_recorded().then(|| self.name_tape(Some(self.path.as_str().into())));
        let y = f(self).map_err(|e| e.at(&self.path));
        if let Some(outer) = outer {
            self.name_tape(outer);
        }
        self.path.truncate(before);
        y
    }

    /// What the tape calls the module it records; gives what it called it before.
    fn name_tape(&mut self, scope: Option<Arc<str>>) -> Option<Arc<str>> {
        self.tape.as_mut().and_then(|tape| tape.set_scope(scope))
    }

    /// a + b.
    ///
    /// # Errors
    /// If the lengths differ or memory runs out.
    pub fn add(&mut self, a: Tensor, b: Tensor) -> Result<Tensor> {
        let (rt, tape) = self.parts();
        Ok(functions::add(rt, tape, &a, &b)?)
    }
}
