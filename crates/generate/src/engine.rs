//! Continuous batching: one forward pass after another over whatever sequences are under way.
//!
//! Each pass takes the next token of every sequence that is being generated and, as far as the budget of rows allows, pieces
//! of prompts that are still to be read (chunked prefill; Agrawal et al., arXiv 2403.02310). A sequence that ends leaves its
//! slot to the next request that waits (iteration-level scheduling; Yu et al., "Orca", OSDI 2022).

use std::collections::VecDeque;
use std::sync::Arc;

use phalanx_kernels::cross_entropy::log_probs;
use phalanx_models::{Model, logits};
use phalanx_nn::{Batch, Cx, Env};
use phalanx_tensor::{Category, DType, Tensor};

use crate::error::{GenerateError, Result};
use crate::kv_cache::KvCache;
use crate::request::{Completion, FinishReason, Flow, Request, Token};
use crate::sampling::{Sampler, Seen, draw};

/// Limits of a [`Generator`]. None of them changes a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneratorOptions {
    /// Sequences under way at once; further requests wait.
    pub max_batch: usize,
    /// Rows of a pass that may be prompt tokens: bounds the memory of a pass, and how long others wait for a long prompt.
    pub max_pass_tokens: usize,
    /// Most tokens of prompt and answer together; the model's `max_position_embeddings` if not given.
    pub max_context: Option<usize>,
}

impl Default for GeneratorOptions {
    fn default() -> Self {
        GeneratorOptions { max_batch: 16, max_pass_tokens: 512, max_context: None }
    }
}

/// A sequence under way.
struct Live {
    request: usize,
    params: Request,
    /// Prompt and generated tokens.
    ids: Vec<u32>,
    seen: Seen,
    logprobs: Vec<f32>,
    /// `ids` may not grow beyond this.
    most: usize,
    cached: usize,
}

impl Live {
    fn generated(&self) -> usize {
        self.ids.len() - self.params.prompt.len()
    }
}

/// Generates with a model. Keeps its cache between calls: a prompt that begins like an earlier one reuses those rows.
///
/// If the weights change in between, call [`Generator::forget`].
pub struct Generator<'m> {
    model: &'m Model,
    env: Env,
    options: GeneratorOptions,
    context: usize,
    kv: KvCache,
    /// As many as were needed at once so far: `max_batch` may be any number.
    slots: Vec<Option<Live>>,
    /// The tokens whose rows lie in each slot's cache.
    cached: Vec<Vec<u32>>,
    waiting: VecDeque<(usize, Request)>,
    sampler: Sampler,
    next_request: usize,
}

impl<'m> Generator<'m> {
    /// A generator of `model` in the surroundings of `env`: its runtime, adapters and plan count, its batch does not.
    ///
    /// # Errors
    /// If a limit is 0.
    pub fn new(model: &'m Model, env: &Env, options: GeneratorOptions) -> Result<Generator<'m>> {
        for (name, value) in [
            ("max_batch", options.max_batch),
            ("max_pass_tokens", options.max_pass_tokens),
            ("max_context", options.max_context.unwrap_or(1)),
        ] {
            if value == 0 {
                return Err(GenerateError::parameter(name, value, "must be at least 1"));
            }
        }
        let trained = model.config().max_position_embeddings;
        let context = options.max_context.map_or(trained, |c| c.min(trained));
        let mut env = env.clone();
        env.training = false;
        Ok(Generator {
            model,
            options,
            context,
            kv: KvCache::new(&env.rt, 0),
            env,
            slots: Vec::new(),
            cached: Vec::new(),
            waiting: VecDeque::new(),
            sampler: Sampler::default(),
            next_request: 0,
        })
    }

    /// Most tokens of prompt and answer together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Generates for all requests and returns their results in the same order. `on_token` sees every token as it comes, with
    /// the request's index, and may end a request early.
    ///
    /// # Errors
    /// Before anything is computed, if a request is impossible; later, if memory runs out or the model is not finite. The
    /// generator can be used again after an error.
    pub fn generate(
        &mut self,
        requests: Vec<Request>,
        on_token: &mut dyn FnMut(&Token) -> Result<Flow>,
    ) -> Result<Vec<Completion>> {
        for (i, r) in requests.iter().enumerate() {
            r.check(i, self.model.config(), self.context)?;
        }
        self.abort();
        self.next_request = 0;
        let mut done: Vec<Option<Completion>> = requests.iter().map(|_| None).collect();
        for r in requests {
            self.submit(r)?;
        }
        while !self.is_idle() {
            match self.step(on_token) {
                Ok(finished) => finished.into_iter().for_each(|(i, c)| done[i] = Some(c)),
                Err(e) => {
                    self.abort();
                    return Err(e);
                }
            }
        }
        // Idle means that every request has been finished.
        Ok(done.into_iter().map(|c| c.expect("every request is finished")).collect())
    }

    /// Queues a request and returns its number; [`Generator::step`] works on it.
    ///
    /// # Errors
    /// If the request is impossible.
    pub fn submit(&mut self, request: Request) -> Result<usize> {
        let index = self.next_request;
        request.check(index, self.model.config(), self.context)?;
        self.next_request += 1;
        self.waiting.push_back((index, request));
        Ok(index)
    }

    /// Whether nothing is under way or waiting.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// Drops everything under way or waiting.
    pub fn abort(&mut self) {
        self.waiting.clear();
        for slot in 0..self.slots.len() {
            if let Some(live) = self.slots[slot].take() {
                self.retire(slot, &live);
            }
        }
    }

    /// Forgets the cache, and gives its memory back if nothing is under way.
    pub fn forget(&mut self) {
        self.kv.clear_idle();
    }

    /// One forward pass; returns what it finished.
    ///
    /// # Errors
    /// If memory runs out, the model is not finite, or `on_token` fails.
    pub fn step(&mut self, on_token: &mut dyn FnMut(&Token) -> Result<Flow>) -> Result<Vec<(usize, Completion)>> {
        self.admit();
        let plan = self.plan();
        if plan.is_empty() {
            return Ok(vec![]);
        }
        let hidden = self.forward(&plan)?;
        let last: Vec<(usize, usize)> = self.rows_to_sample(&plan);
        if last.is_empty() {
            return Ok(vec![]);
        }
        let hidden = self.pick_rows(hidden, &last)?;
        let logits = logits(&self.env.rt, self.model, &hidden, self.env.plan.arithmetic("lm_head"))?;
        self.choose(&logits, &last, on_token)
    }

    /// Gives waiting requests the free slots.
    fn admit(&mut self) {
        while !self.waiting.is_empty() {
            let blank = |s: usize| self.slots[s].is_none() && self.known(s).is_empty();
            if self.slots.len() < self.options.max_batch && !(0..self.slots.len()).any(blank) {
                self.kv.add_slot();
                self.slots.push(None);
                self.cached.push(Vec::new());
            }
            let Some((_, next)) = self.waiting.front() else { return };
            // The slot that shares the longest beginning; among equals the one that loses least.
            let free = (0..self.slots.len()).filter(|&s| self.slots[s].is_none());
            let best = free.max_by_key(|&s| {
                let known = self.known(s);
                (shared_prefix(known, &next.prompt), std::cmp::Reverse(known.len()))
            });
            let Some(slot) = best else { return };
            let Some((request, params)) = self.waiting.pop_front() else { return };
            // The last token is always computed: its logits are wanted.
            let cached = shared_prefix(self.known(slot), &params.prompt).min(params.prompt.len() - 1);
            self.kv.claim(slot, cached);
            let mut seen = Seen::default();
            if params.sampling.repetition_penalty != 1.0 {
                params.prompt.iter().for_each(|&id| seen.insert(id));
            }
            let most = params.prompt.len().saturating_add(params.max_new_tokens).min(self.context);
            let ids = params.prompt.clone();
            self.slots[slot] = Some(Live { request, ids, seen, logprobs: vec![], most, cached, params });
        }
    }

    /// The tokens whose rows lie in an idle slot: the cache may have given them up meanwhile.
    fn known(&self, slot: usize) -> &[u32] {
        let ids = &self.cached[slot];
        &ids[..self.kv.len(slot).min(ids.len())]
    }

    /// Which slots take part in the next pass, with how many new rows each.
    fn plan(&self) -> Vec<(usize, usize, usize)> {
        let pending = |slot: usize, live: &Live| live.ids.len() - self.kv.len(slot);
        let live = || self.slots.iter().enumerate().filter_map(|(s, l)| Some((s, l.as_ref()?)));
        let decoding = live().filter(|&(s, l)| l.generated() > 0 && pending(s, l) == 1).count();
        let mut budget = self.options.max_pass_tokens.saturating_sub(decoding).max(1);
        let mut plan = Vec::new();
        for (slot, l) in live() {
            let n = pending(slot, l);
            if l.generated() > 0 {
                plan.push((slot, n, l.most));
            } else {
                let n = n.min(budget);
                budget -= n;
                if n > 0 {
                    plan.push((slot, n, l.most));
                }
            }
        }
        plan
    }

    /// Hidden rows of the planned tokens; their keys and values are in the cache afterwards.
    fn forward(&self, plan: &[(usize, usize, usize)]) -> Result<Tensor> {
        let mut ids = Vec::new();
        let mut lens = Vec::with_capacity(plan.len());
        for &(slot, n, _) in plan {
            let past = self.kv.len(slot);
            lens.push((n, past));
            if let Some(live) = &self.slots[slot] {
                ids.extend_from_slice(&live.ids[past..past + n]);
            }
        }
        self.kv.begin(plan)?;
        let env = self.env.for_batch(Batch::continued(lens), 0);
        let mut cx = Cx::generate(&env, self.kv.handle());
        let hidden = self.model.hidden(&mut cx, &Arc::from(ids))?;
        self.kv.commit();
        Ok(hidden)
    }

    /// (slot, row of the pass) of every sequence whose tokens are now all computed.
    fn rows_to_sample(&self, plan: &[(usize, usize, usize)]) -> Vec<(usize, usize)> {
        let mut end = 0;
        let mut rows = Vec::with_capacity(plan.len());
        for &(slot, n, _) in plan {
            end += n;
            if self.slots[slot].as_ref().is_some_and(|l| l.ids.len() == self.kv.len(slot)) {
                rows.push((slot, end - 1));
            }
        }
        rows
    }

    /// The rows that the head is wanted for.
    fn pick_rows(&self, hidden: Tensor, last: &[(usize, usize)]) -> Result<Tensor> {
        if last.len() == hidden.dim(0) {
            return Ok(hidden);
        }
        let h = hidden.dim(1);
        let mut rows = self.env.rt.empty(&[last.len(), h], DType::F32, Category::Activations)?;
        let from = hidden.f32()?;
        for (to, &(_, row)) in rows.f32_mut()?.chunks_exact_mut(h).zip(last) {
            to.copy_from_slice(&from[row * h..(row + 1) * h]);
        }
        Ok(rows)
    }

    /// Chooses a token for each row of `logits`, tells the caller, and ends what has come to its end.
    fn choose(
        &mut self,
        logits: &Tensor,
        last: &[(usize, usize)],
        on_token: &mut dyn FnMut(&Token) -> Result<Flow>,
    ) -> Result<Vec<(usize, Completion)>> {
        let vocab = logits.dim(1);
        let values = logits.f32()?;
        let mut chosen = Vec::with_capacity(last.len());
        for (row, &(slot, _)) in values.chunks_exact(vocab).zip(last) {
            let id = match &self.slots[slot] {
                Some(l) => self.sampler.sample(&l.params.sampling, row, &l.seen, draw(l.params.seed, l.ids.len())),
                None => 0,
            };
            chosen.push(id as i32);
        }
        let (mut logp, mut lse) = (vec![0f32; last.len()], vec![0f32; last.len()]);
        log_probs(self.env.rt.device(), values, &chosen, &mut logp, &mut lse)?;
        let mut finished = Vec::new();
        for ((&(slot, _), &id), &logprob) in last.iter().zip(&chosen).zip(&logp) {
            let Some(live) = &mut self.slots[slot] else { continue };
            if !logprob.is_finite() {
                return Err(GenerateError::NotFinite { request: live.request, position: live.ids.len() });
            }
            if let Some(reason) = live.take(id as u32, logprob, self.context, on_token)?
                && let Some(live) = self.slots[slot].take()
            {
                self.retire(slot, &live);
                let ids = live.ids[live.params.prompt.len()..].to_vec();
                let (logprobs, cached_tokens) = (live.logprobs, live.cached);
                finished.push((live.request, Completion { ids, logprobs, finish_reason: reason, cached_tokens }));
            }
        }
        Ok(finished)
    }

    /// Frees a slot; what lies in its cache can still serve a later prompt.
    fn retire(&mut self, slot: usize, live: &Live) {
        self.kv.release(slot);
        self.cached[slot].clear();
        self.cached[slot].extend_from_slice(&live.ids[..self.kv.len(slot)]);
    }
}

impl Live {
    /// Adds a token; says why this was the last one, if it was.
    fn take(
        &mut self,
        id: u32,
        logprob: f32,
        context: usize,
        on_token: &mut dyn FnMut(&Token) -> Result<Flow>,
    ) -> Result<Option<FinishReason>> {
        let is_stop = self.params.stop_token_ids.contains(&id);
        let token = Token { request: self.request, index: self.generated(), id, logprob, is_stop };
        self.ids.push(id);
        self.logprobs.push(logprob);
        if self.params.sampling.repetition_penalty != 1.0 {
            self.seen.insert(id);
        }
        let flow = on_token(&token)?;
        if is_stop {
            return Ok(Some(FinishReason::StopToken));
        }
        if let Flow::Break(reason) = flow {
            return Ok(Some(reason));
        }
        if self.generated() >= self.params.max_new_tokens {
            return Ok(Some(FinishReason::Length));
        }
        Ok((self.ids.len() >= context).then_some(FinishReason::Context))
    }
}

fn shared_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
