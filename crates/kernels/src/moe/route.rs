//! The router: from logits to the experts of each token and their weights.
//!
//! Softmax over all experts, then the k greatest (Mixtral, Qwen); or a sigmoid for each expert and a bias that counts for choosing only,
//! among the best groups of experts (DeepSeek-V3, arXiv 2412.19437, 2.1.2). Of equal scores the lower expert wins.

use crate::error::{bad_shape, check_len};
use crate::par::{Parts, rows_per_task};
use crate::profile::per_element;
use crate::{Device, Result};

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over the experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// Experts are chosen among those of the best groups only: a group counts as much as its two best experts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups; neighbouring experts, equally many each.
    pub num: usize,
    /// Groups that a token chooses from.
    pub chosen: usize,
}

/// The form of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Route {
    /// Experts E.
    pub experts: usize,
    /// Experts of a token, k.
    pub top_k: usize,
    /// How logits become scores.
    pub scores: Scores,
    /// Whether the choice is limited to groups.
    pub groups: Option<Groups>,
    /// Whether the weights of a token are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f32,
}

/// Slopes of a balancing loss: its derivative by each expert's probability, the same for all tokens of a group.
#[derive(Clone, Copy, Debug)]
pub struct Balance<'a> {
    /// Derivative by the probability of an expert [G,E].
    pub slopes: &'a [f32],
    /// The group of each token [T].
    pub group_of: &'a [u32],
}

impl Route {
    /// Whether the form is possible.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<()> {
        let (e, k) = (self.experts, self.top_k);
        if e == 0 || k == 0 || k > e {
            return bad_shape("route", format!("{k} of {e} experts cannot be chosen"));
        }
        let Some(g) = self.groups else { return Ok(()) };
        if g.num == 0 || !e.is_multiple_of(g.num) || e / g.num < 2 {
            return bad_shape("route", format!("{e} experts do not make {} groups of two or more", g.num));
        }
        if g.chosen == 0 || g.chosen > g.num || g.chosen * (e / g.num) < k {
            return bad_shape(
                "route",
                format!("{k} experts cannot be chosen from {} of {} groups of {}", g.chosen, g.num, e / g.num),
            );
        }
        Ok(())
    }

    /// Scores of one token.
    fn scores(&self, logits: &[f32], out: &mut [f32]) {
        match self.scores {
            Scores::Softmax => {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut sum = 0f32;
                for (o, l) in out.iter_mut().zip(logits) {
                    *o = (l - max).exp();
                    sum += *o;
                }
                out.iter_mut().for_each(|o| *o /= sum);
            }
            Scores::Sigmoid => out.iter_mut().zip(logits).for_each(|(o, l)| *o = 1.0 / (1.0 + (-l).exp())),
        }
    }

    /// The experts of one token, the best first. `by` [E] holds what they are chosen by and is used up.
    fn choose(&self, by: &mut [f32], chosen: &mut [u32]) {
        if let Some(groups) = self.groups {
            let size = self.experts / groups.num;
            let mut worth = [0f32; MOST_GROUPS];
            let worth = &mut worth[..groups.num];
            for (w, group) in worth.iter_mut().zip(by.chunks_exact(size)) {
                let first = greatest(group);
                let rest = (0..size).filter(|&i| i != first).map(|i| group[i]);
                *w = group[first] + rest.fold(f32::NEG_INFINITY, f32::max);
            }
            let mut keep = [false; MOST_GROUPS];
            for _ in 0..groups.chosen {
                let best = (0..groups.num).filter(|&g| !keep[g]);
                let best = best.reduce(|b, g| if worth[g] > worth[b] { g } else { b }).unwrap_or(0);
                keep[best] = true;
            }
            for (group, _) in by.chunks_exact_mut(size).zip(&keep).filter(|(_, keep)| !**keep) {
                group.fill(TAKEN);
            }
        }
        for c in chosen {
            let best = greatest(by);
            *c = best as u32;
            by[best] = TAKEN;
        }
    }
}

/// Groups that a router may have.
pub const MOST_GROUPS: usize = 64;

/// What marks an expert that cannot be chosen (any more): no score is that low.
const TAKEN: f32 = f32::NEG_INFINITY;

/// The greatest of `x`, the first of equals. Where a score is no number any index may come, also twice: every row of the token is then
/// no number either.
fn greatest(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best })
}

/// Chooses. `logits` [T,E], `bias` [E] (added to the scores for choosing only) → `chosen` [T,k], `weights` [T,k], both the best first;
/// `probabilities` [T,E], if asked for: the scores as shares that sum to 1, what a balancing loss looks at.
///
/// # Errors
/// If the form is not possible or a length does not fit.
pub fn forward(
    dev: &Device,
    r: &Route,
    logits: &[f32],
    bias: Option<&[f32]>,
    chosen: &mut [u32],
    weights: &mut [f32],
    probabilities: Option<&mut [f32]>,
) -> Result<()> {
    let (t, e, k) = checked(r, logits.len())?;
    if let Some(b) = bias {
        check_len("route", "bias", b.len(), e)?;
    }
    check_len("route", "chosen", chosen.len(), t * k)?;
    check_len("route", "weights", weights.len(), t * k)?;
    if let Some(p) = &probabilities {
        check_len("route", "probabilities", p.len(), t * e)?;
    }
    let _span = dev.profiler().kernel("route forward", || per_element(t * e, 8 + k, 4));
    let rows = rows_per_task(e * k);
    let (weights, shares) = (Parts::new(weights), probabilities.map(Parts::new));
    dev.team().for_chunks_mut(chosen, rows * k, &|i, chosen| {
        let (mut scores, mut by) = (vec![0f32; e], vec![0f32; e]);
        for (j, chosen) in chosen.chunks_exact_mut(k).enumerate() {
            let t = i * rows + j;
            r.scores(&logits[t * e..(t + 1) * e], &mut scores);
            by.copy_from_slice(&scores);
            if let Some(bias) = bias {
                by.iter_mut().zip(bias).for_each(|(b, x)| *b += x);
            }
            r.choose(&mut by, chosen);
            // SAFETY: tasks handle different tokens.
            let weights = unsafe { weights.get(t * k..(t + 1) * k) };
            weights.iter_mut().zip(&*chosen).for_each(|(w, &c)| *w = scores[c as usize]);
            let factor = if r.normalise { r.scale / denominator(r, weights) } else { r.scale };
            weights.iter_mut().for_each(|w| *w *= factor);
            if let Some(shares) = &shares {
                // SAFETY: as above.
                let shares = unsafe { shares.get(t * e..(t + 1) * e) };
                let sum = if r.scores == Scores::Softmax { 1.0 } else { scores.iter().sum::<f32>() };
                shares.iter_mut().zip(&scores).for_each(|(p, s)| *p = s / sum);
            }
        }
    });
    Ok(())
}

/// What the weights of a token are divided by. Sigmoids may all be 0 in f32, so DeepSeek adds a trifle.
fn denominator(r: &Route, chosen_scores: &[f32]) -> f32 {
    chosen_scores.iter().sum::<f32>() + if r.scores == Scores::Sigmoid { 1e-20 } else { 0.0 }
}

/// Gradient of the logits from that of the weights, `dweights` [T,k], and the slopes of a balancing loss. Overwrites `dlogits` [T,E].
/// `chosen` is the forward's: what was chosen is not a matter of gradients.
///
/// # Errors
/// If a length does not fit or an index is too large.
pub fn backward(
    dev: &Device,
    r: &Route,
    logits: &[f32],
    chosen: &[u32],
    dweights: &[f32],
    balance: Option<Balance<'_>>,
    dlogits: &mut [f32],
) -> Result<()> {
    let (t, e, k) = checked(r, logits.len())?;
    check_len("route backward", "chosen", chosen.len(), t * k)?;
    check_len("route backward", "dweights", dweights.len(), t * k)?;
    check_len("route backward", "dlogits", dlogits.len(), t * e)?;
    if let Some(bad) = chosen.iter().find(|&&c| c as usize >= e) {
        return bad_shape("route backward", format!("expert {bad} of {e}"));
    }
    if let Some(b) = balance {
        check_len("route backward", "group_of", b.group_of.len(), t)?;
        let groups = b.slopes.len() / e;
        check_len("route backward", "slopes", b.slopes.len(), groups * e)?;
        if b.group_of.iter().any(|&g| g as usize >= groups) {
            return bad_shape("route backward", format!("a token's group is beyond the {groups} there are"));
        }
    }
    let _span = dev.profiler().kernel("route backward", || per_element(t * e, 12, 8));
    let rows = rows_per_task(e);
    dev.team().for_chunks_mut(dlogits, rows * e, &|i, dlogits| {
        let (mut scores, mut d) = (vec![0f32; e], vec![0f32; e]);
        for (j, dlogits) in dlogits.chunks_exact_mut(e).enumerate() {
            let t = i * rows + j;
            r.scores(&logits[t * e..(t + 1) * e], &mut scores);
            let (chosen, dw) = (&chosen[t * k..(t + 1) * k], &dweights[t * k..(t + 1) * k]);
            d.fill(0.0);
            if r.normalise {
                // w = scale·s/Σs, so ds = scale·(dw − Σ dw·s/Σs)/Σs.
                let sum: f32 = denominator(r, &chosen.iter().map(|&c| scores[c as usize]).collect::<Vec<_>>());
                let mean = chosen.iter().zip(dw).map(|(&c, g)| g * scores[c as usize] / sum).sum::<f32>();
                chosen.iter().zip(dw).for_each(|(&c, g)| d[c as usize] = r.scale * (g - mean) / sum);
            } else {
                chosen.iter().zip(dw).for_each(|(&c, g)| d[c as usize] = r.scale * g);
            }
            if let Some(b) = balance {
                let slopes = &b.slopes[b.group_of[t] as usize * e..][..e];
                match r.scores {
                    Scores::Softmax => d.iter_mut().zip(slopes).for_each(|(d, s)| *d += s),
                    Scores::Sigmoid => {
                        // p = s/Σs over all experts.
                        let sum: f32 = scores.iter().sum();
                        let mean = scores.iter().zip(slopes).map(|(s, g)| g * s / sum).sum::<f32>();
                        d.iter_mut().zip(slopes).for_each(|(d, s)| *d += (s - mean) / sum);
                    }
                }
            }
            match r.scores {
                Scores::Softmax => {
                    let mean: f32 = scores.iter().zip(&d).map(|(s, d)| s * d).sum();
                    dlogits.iter_mut().zip(&scores).zip(&d).for_each(|((o, s), d)| *o = s * (d - mean));
                }
                Scores::Sigmoid => {
                    dlogits.iter_mut().zip(&scores).zip(&d).for_each(|((o, s), d)| *o = d * s * (1.0 - s));
                }
            }
        }
    });
    Ok(())
}

/// T, E and k.
fn checked(r: &Route, logits: usize) -> Result<(usize, usize, usize)> {
    r.check()?;
    if r.groups.is_some_and(|g| g.num > MOST_GROUPS) {
        return bad_shape("route", format!("more than {MOST_GROUPS} groups of experts"));
    }
    let t = logits / r.experts;
    check_len("route", "logits", logits, t * r.experts)?;
    Ok((t, r.experts, r.top_k))
}
