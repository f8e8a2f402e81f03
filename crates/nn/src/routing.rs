//! What a run says to the routers of a mixture of experts, and what it hears from them.
//!
//! Three things go by the choices of many tokens, each with a scope of its own:
//!
//! * A **capacity** limits what an expert takes of one micro-batch ([`ExpertCapacity`]).
//! * A **balancing loss** (Switch, Fedus et al., arXiv 2101.03961: α·E·Σ f·P) pulls loads together through the gradient
//!   ([`BalanceLoss`]). Its scope — micro-batch, sequence, or the whole accumulation window — changes its value, so it is spelled out.
//! * **Loads** are counted over a step for metrics and for balancing without a loss ([`RouterLog`]; biases: Wang et al., arXiv 2408.15664).
//!
//! Rows of a batch carry no padding, so nothing needs to be left out. A recompute region runs its routers twice; only the first run
//! counts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_autograd::functions::BalanceSlopes;
use phalanx_kernels::moe::Drop;

use crate::Batch;

/// A limit to the rows of an expert in one micro-batch: ⌈factor·T·k/E⌉, at least 1. Pairs beyond it are dropped: what they would add is missing,
/// so a token that lost all its experts passes through the residual only. While training; evaluation and generation drop nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertCapacity {
    /// 1 is an equal share.
    pub factor: f64,
    /// Which pairs go.
    pub drop: Drop,
}

impl ExpertCapacity {
    /// Rows an expert takes of `pairs` = T·k pairs.
    pub fn rows(&self, pairs: usize, experts: usize) -> usize {
        ((self.factor * pairs as f64 / experts.max(1) as f64).ceil() as usize).max(1)
    }
}

/// The tokens that a balancing loss forms its shares over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BalanceScope {
    /// All tokens of a micro-batch; of several, each counts as much as it has counted targets. What `transformers` does.
    #[default]
    MicroBatch,
    /// Each sequence by itself, counting as much as it has counted targets: the value does not depend on how a batch is cut.
    Sequence,
    /// All tokens of an optimizer step. With accumulation the choices of the whole window are counted first, in a forward pass of their own, so
    /// that the value is that of the window in one batch.
    Global,
}

/// The layers that a balancing loss forms its shares over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BalanceLayers {
    /// The routers of all layers as one, as in `transformers`.
    #[default]
    Together,
    /// Each layer by itself, added up, as in the Switch paper and in Megatron.
    Each,
}

/// A balancing loss: coefficient · E · Σ f·P with f the choices of an expert per token and P its mean probability; k where all is even.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceLoss {
    /// α, beside a mean loss of 1 a token.
    pub coefficient: f64,
    /// Over which tokens.
    pub scope: BalanceScope,
    /// Over which layers.
    pub layers: BalanceLayers,
}

/// What a run says to routers.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Limit of the rows of an expert; none by default (dropless).
    pub capacity: Option<ExpertCapacity>,
    /// A balancing loss.
    pub balance: Option<BalanceLoss>,
    /// Choices of a whole accumulation window, for a balancing loss of that scope.
    pub window: Option<Arc<BalanceWindow>>,
}

impl Routing {
    /// The balancing loss of one pass over `batch`, whose rows have these targets (−100: not counted).
    pub fn balance_pass(&self, batch: &Batch, targets: &[i32]) -> Option<Arc<BalancePass>> {
        let loss = self.balance.filter(|b| b.coefficient != 0.0)?;
        let counted = |rows: std::ops::Range<usize>| targets[rows].iter().filter(|&&t| t >= 0).count() as f64;
        let (mut group_of, mut targets_of) = (vec![0; batch.tokens()], vec![]);
        if loss.scope == BalanceScope::Sequence {
            for (i, s) in batch.seqs.iter().enumerate() {
                let rows = s.q_start..s.q_start + s.q_len;
                group_of[rows.clone()].fill(i as u32);
                targets_of.push(counted(rows));
            }
        } else {
            targets_of.push(counted(0..batch.tokens()));
        }
        let window = self.window.clone().filter(|_| loss.scope == BalanceScope::Global);
        Some(Arc::new(BalancePass { loss, group_of: group_of.into(), targets_of, window, seen: Mutex::default() }))
    }
}

/// Choices and probabilities of one set of routers, by group of tokens.
#[derive(Clone, Debug, Default)]
struct Shares {
    experts: usize,
    /// Choices [G, E].
    counts: Vec<f64>,
    /// Sums of probabilities [G, E].
    probabilities: Vec<f64>,
    /// Tokens [G], once for each router.
    tokens: Vec<f64>,
}

impl Shares {
    /// E·count/N² of expert e in group g: with the sum of probabilities it makes E·f·P.
    fn slope(&self, g: usize, e: usize) -> f64 {
        let n = self.tokens[g];
        if n == 0.0 { 0.0 } else { self.experts as f64 * self.counts[g * self.experts + e] / (n * n) }
    }
}

/// The balancing loss of one micro-batch: fed by the routers in forward, asked by them in backward.
#[derive(Debug)]
pub struct BalancePass {
    loss: BalanceLoss,
    group_of: Arc<[u32]>,
    /// Counted targets of each group.
    targets_of: Vec<f64>,
    window: Option<Arc<BalanceWindow>>,
    seen: Mutex<BTreeMap<String, Shares>>,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

impl BalancePass {
    /// The routers that share their shares with the one at `layer`.
    fn key(&self, layer: &str, experts: usize) -> String {
        match self.loss.layers {
            BalanceLayers::Together => format!("{experts} experts"),
            BalanceLayers::Each => layer.to_owned(),
        }
    }

    /// Hears what the router at `layer` chose [T·k] with which probabilities [T, E].
    pub fn hear(&self, layer: &str, experts: usize, chosen: &[u32], probabilities: &[f32]) {
        let groups = self.targets_of.len();
        let mut seen = lock(&self.seen);
        let s = seen.entry(self.key(layer, experts)).or_insert_with(|| Shares {
            experts,
            counts: vec![0.0; groups * experts],
            probabilities: vec![0.0; groups * experts],
            tokens: vec![0.0; groups],
        });
        let k = chosen.len() / self.group_of.len().max(1);
        for (t, &g) in self.group_of.iter().enumerate() {
            let at = g as usize * experts;
            s.tokens[g as usize] += 1.0;
            chosen[t * k..(t + 1) * k].iter().for_each(|&e| s.counts[at + e as usize] += 1.0);
            let p = &probabilities[t * experts..(t + 1) * experts];
            s.probabilities[at..at + experts].iter_mut().zip(p).for_each(|(sum, &p)| *sum += f64::from(p));
        }
    }

    /// The factor of E·Σ f·P of a group: α times counted targets, because losses are sums here.
    fn weight(&self, group: usize) -> f64 {
        let targets = self.window.as_ref().map_or(self.targets_of[group], |w| w.targets);
        self.loss.coefficient * targets
    }

    /// The shares that slopes come from: of the window, if there is one.
    fn shares<'a>(&'a self, key: &str, own: &'a Shares) -> &'a Shares {
        self.window.as_ref().and_then(|w| w.shares.get(key)).unwrap_or(own)
    }

    /// The loss of what was heard: a sum, like the loss it is added to. Over the micro-batches of a window the values add up.
    pub fn value(&self) -> f64 {
        let mut total = 0.0;
        for (key, own) in lock(&self.seen).iter() {
            let shares = self.shares(key, own);
            for g in 0..own.tokens.len() {
                let p = &own.probabilities[g * own.experts..];
                total += self.weight(g) * (0..own.experts).map(|e| shares.slope(g, e) * p[e]).sum::<f64>();
            }
        }
        total
    }

    /// Its derivative by the probabilities of the router at `layer`, whose forward is over.
    pub fn slopes(&self, layer: &str, experts: usize) -> BalanceSlopes {
        let seen = lock(&self.seen);
        let key = self.key(layer, experts);
        let groups = self.targets_of.len();
        let mut slopes = vec![0f32; groups * experts];
        if let Some(own) = seen.get(&key) {
            let shares = self.shares(&key, own);
            for (i, s) in slopes.iter_mut().enumerate() {
                let (g, e) = (i / experts, i % experts);
                *s = (self.weight(g) * shares.slope(g, e)) as f32;
            }
        }
        BalanceSlopes { slopes, group_of: Arc::clone(&self.group_of) }
    }
}

/// Choices of the micro-batches of one accumulation window together.
#[derive(Clone, Debug, Default)]
pub struct BalanceWindow {
    shares: BTreeMap<String, Shares>,
    targets: f64,
}

impl BalanceWindow {
    /// Adds what the routers told a pass (of global scope, without a window) in a forward over a micro-batch.
    pub fn add(&mut self, pass: &BalancePass) {
        self.targets += pass.targets_of.iter().sum::<f64>();
        for (key, own) in lock(&pass.seen).iter() {
            let zero =
                || Shares { counts: vec![0.0; own.counts.len()], tokens: vec![0.0; own.tokens.len()], ..own.clone() };
            let to = self.shares.entry(key.clone()).or_insert_with(zero);
            to.counts.iter_mut().zip(&own.counts).for_each(|(a, b)| *a += b);
            to.tokens.iter_mut().zip(&own.tokens).for_each(|(a, b)| *a += b);
        }
    }
}

/// What the experts of one layer were asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerLoad {
    /// Choices of each expert, dropped ones too [E].
    pub counts: Vec<u64>,
    /// Choices that a capacity dropped.
    pub dropped: u64,
}

impl LayerLoad {
    /// Greatest load over the mean one; 1 where all is even, E where one expert has all.
    pub fn max_over_mean(&self) -> f64 {
        let (sum, max) = (self.counts.iter().sum::<u64>(), self.counts.iter().max().copied().unwrap_or(0));
        if sum == 0 { 1.0 } else { max as f64 * self.counts.len() as f64 / sum as f64 }
    }
}

/// What routers did in one optimizer step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterStep {
    /// Loads by the path of the router (`model.layers.3.mlp.gate`).
    pub layers: BTreeMap<String, LayerLoad>,
    /// The balancing loss, a sum like the loss it is part of.
    pub balance: f64,
}

/// Counts over the passes of a step. Only training counts, each token once.
#[derive(Debug, Default)]
pub struct RouterLog(Mutex<RouterStep>);

impl RouterLog {
    /// Adds the choices of a layer in one pass.
    pub fn add(&self, layer: &str, experts: usize, chosen: &[u32], dropped: usize) {
        let mut step = lock(&self.0);
        let load = step.layers.entry(layer.to_owned()).or_default();
        load.counts.resize(experts, 0);
        chosen.iter().for_each(|&e| load.counts[e as usize] += 1);
        load.dropped += dropped as u64;
    }

    /// Adds the balancing loss of one pass.
    pub fn add_balance(&self, value: f64) {
        lock(&self.0).balance += value;
    }

    /// Ends a step: what was counted, leaving nothing.
    pub fn take(&self) -> RouterStep {
        std::mem::take(&mut *lock(&self.0))
    }
}

/// How far a router's correction bias goes for a load: b += `speed`·sign(mean load − load). No gradient, and no weight goes by it, only the
/// choice; so it balances without a loss (arXiv 2408.15664, 2412.19437). `counts` [E] are those of all tokens of a step.
pub fn update_bias(bias: &mut [f32], counts: &[u64], speed: f32) {
    let total: u64 = counts.iter().sum();
    for (b, &count) in bias.iter_mut().zip(counts) {
        // In whole numbers: E·count against the sum, so that equal is equal.
        match (count as u128 * counts.len() as u128).cmp(&u128::from(total)) {
            std::cmp::Ordering::Less => *b += speed,
            std::cmp::Ordering::Greater => *b -= speed,
            std::cmp::Ordering::Equal => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_moves_toward_the_mean() {
        let mut bias = vec![0.0, 0.1, -0.1, 0.0];
        update_bias(&mut bias, &[0, 7, 3, 2], 0.01);
        assert_eq!(bias, [0.01, 0.1 - 0.01, -0.1, 0.01]);
        update_bias(&mut bias, &[0; 4], 0.01);
        assert_eq!(bias[0], 0.01, "nothing seen, nothing moved");
    }

    #[test]
    fn capacities_round_up_and_never_vanish() {
        let c = |factor| ExpertCapacity { factor, drop: Drop::Position };
        assert_eq!((c(1.0).rows(10, 4), c(1.25).rows(16, 4), c(0.001).rows(10, 4)), (3, 5, 1));
    }

    /// One micro-batch of two sequences against the same in two micro-batches.
    fn value(scope: BalanceScope, parts: &[&[usize]]) -> f64 {
        let routing = |window| Routing {
            capacity: None,
            balance: Some(BalanceLoss { coefficient: 0.5, scope, layers: BalanceLayers::Together }),
            window,
        };
        // Token i of sequence s chooses (s + i) mod 3 of 3 experts; its first row has no target.
        let forward = |lens: &[usize], first: usize, window: Option<Arc<BalanceWindow>>| {
            let (mut chosen, mut p, mut targets) = (vec![], vec![], vec![]);
            for (s, &n) in lens.iter().enumerate() {
                for i in 0..n {
                    chosen.push(((first + s + i * i) % 3) as u32);
                    p.extend([0.2 + 0.1 * i as f32, 0.3, 0.5 - 0.1 * i as f32]);
                    targets.push(if i == 0 { -100 } else { 1 });
                }
            }
            let pass = routing(window).balance_pass(&Batch::causal(lens), &targets).unwrap();
            pass.hear("a", 3, &chosen, &p);
            pass.hear("b", 3, &chosen, &p);
            pass
        };
        let starts: Vec<usize> = parts.iter().scan(0, |at, p| Some(std::mem::replace(at, *at + p.len()))).collect();
        let mut window = BalanceWindow::default();
        parts.iter().zip(&starts).for_each(|(p, &s)| window.add(&forward(p, s, None)));
        let window = Arc::new(window);
        parts.iter().zip(&starts).map(|(p, &s)| forward(p, s, Some(Arc::clone(&window))).value()).sum()
    }

    #[test]
    fn a_scope_says_what_splitting_a_batch_changes() {
        let splits: [&[&[usize]]; 3] = [&[&[4, 3, 2]], &[&[4], &[3, 2]], &[&[4], &[3], &[2]]];
        let of = |scope| splits.map(|parts| value(scope, parts));
        let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
        for scope in [BalanceScope::Global, BalanceScope::Sequence] {
            let v = of(scope);
            assert!(close(v[0], v[1]) && close(v[0], v[2]), "{scope:?}: {v:?}");
        }
        let v = of(BalanceScope::MicroBatch);
        assert!(!close(v[0], v[1]), "{v:?}");
        assert!(close(v[0], value(BalanceScope::Global, splits[0])));
        assert!(close(v[2], value(BalanceScope::Sequence, splits[0])));
    }
}
