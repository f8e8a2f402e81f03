//! From logits to the next token.
//!
//! The processors and their order are those of `transformers` (`generation/logits_process.py`): repetition penalty,
//! temperature, top-k, top-p, min-p. Where that leaves a choice open (which of equal tokens a cut keeps), the lower id
//! goes first, so that a result never depends on a sorting algorithm.

use std::collections::HashSet;

use phalanx_tensor::rng::Stream;

use crate::error::{GenerateError, Result};

/// How the next token is chosen. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by it; 0 takes the most probable token.
    pub temperature: f64,
    /// Keep the k most probable tokens (and those equal to the last of them); 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most probable tokens whose probabilities reach it (nucleus; Holtzman et al., arXiv 1904.09751).
    pub top_p: f64,
    /// Keep tokens at least this probable relative to the most probable one (Nguyen et al., arXiv 2407.01082); 0 keeps all.
    pub min_p: f64,
    /// Positive logits of tokens that occurred, in the prompt too, are divided by it, negative ones multiplied (Keskar et
    /// al., arXiv 1909.05858); 1 changes nothing.
    pub repetition_penalty: f64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl SamplingParams {
    /// Always the most probable token; of equal ones the lowest id.
    pub fn greedy() -> SamplingParams {
        SamplingParams::default()
    }

    /// Sampling from the model's distribution at a temperature, nothing cut off.
    pub fn at_temperature(temperature: f64) -> SamplingParams {
        SamplingParams { temperature, ..SamplingParams::default() }
    }

    /// Refuses values that mean nothing.
    ///
    /// # Errors
    /// Names the parameter, its value and the range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name, value: f64, why: &str| Err(GenerateError::parameter(name, value, why));
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse("temperature", self.temperature, "must be a number from 0 (greedy) up, usually 0.5 to 1");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p", self.top_p, "must be above 0 and at most 1 (1 keeps every token)");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p", self.min_p, "must be from 0 (keeps every token) to 1");
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return refuse("repetition_penalty", self.repetition_penalty, "must be above 0 (1 changes nothing)");
        }
        Ok(())
    }
}

/// The tokens of a sequence, each once, for the repetition penalty.
#[derive(Debug, Default)]
pub struct Seen(HashSet<u32>);

impl Seen {
    /// Notes a token.
    pub fn insert(&mut self, id: u32) {
        self.0.insert(id);
    }
}

/// A uniform number in [0, 1) for the token at `position` of a sequence with `seed`: a function of these two alone, so that
/// neither the batch nor the order of requests changes a result.
pub fn draw(seed: u64, position: usize) -> f64 {
    let [a, b, ..] = Stream::new(seed, "sample").block(position as u64);
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

/// The most probable token; of equal ones the lowest id. NaN is never chosen unless there is nothing else.
pub fn argmax(logits: &[f32]) -> u32 {
    // The greatest of each lane first, which is a vector operation; then where it lies.
    let (chunks, rest) = logits.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut see = |values: &[f32]| {
        for (max, &x) in lanes.iter_mut().zip(values) {
            *max = if x > *max { x } else { *max };
        }
    };
    chunks.iter().for_each(|c| see(c));
    see(rest);
    let max = lanes.into_iter().fold(f32::NEG_INFINITY, |max, x| if x > max { x } else { max });
    logits.iter().position(|&x| x == max).unwrap_or(0) as u32
}

#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    /// Logit after the repetition penalty.
    score: f32,
    /// Probability relative to that of the most probable token.
    weight: f64,
}

/// Chooses tokens; keeps its working memory from call to call.
#[derive(Default)]
pub struct Sampler {
    scores: Vec<f32>,
    ranked: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// The next token, given the model's `logits` [V], the tokens before it and a uniform number from [`draw`].
    pub fn sample(&mut self, params: &SamplingParams, logits: &[f32], seen: &Seen, uniform: f64) -> u32 {
        let best = self.process(params, logits, seen);
        pick(&self.candidates, uniform).unwrap_or(best)
    }

    /// What [`Sampler::sample`] draws from: tokens with their probabilities, in the order of drawing.
    pub fn distribution(&mut self, params: &SamplingParams, logits: &[f32], seen: &Seen) -> Vec<(u32, f64)> {
        self.process(params, logits, seen);
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        self.candidates.iter().map(|c| (c.id, c.weight / total)).collect()
    }

    /// Fills `candidates` with what the processors leave, and returns the most probable token.
    fn process(&mut self, params: &SamplingParams, logits: &[f32], seen: &Seen) -> u32 {
        let Sampler { scores: penalised, ranked, candidates } = self;
        candidates.clear();
        let scores = if params.repetition_penalty == 1.0 {
            logits
        } else {
            penalised.clear();
            penalised.extend_from_slice(logits);
            penalise(penalised, seen, params.repetition_penalty as f32);
            penalised
        };
        let best = argmax(scores);
        let Some(&max) = scores.get(best as usize) else { return best };
        if params.temperature == 0.0 {
            candidates.push(Candidate { id: best, score: max, weight: 1.0 });
            return best;
        }
        let floor = match params.top_k {
            0 => f32::NEG_INFINITY,
            k => kth_greatest(ranked, scores, k),
        };
        // Weights relative to the greatest: no temperature is so small that they overflow.
        candidates.extend(scores.iter().enumerate().filter(|&(_, &s)| s >= floor).map(|(id, &score)| Candidate {
            id: id as u32,
            score,
            weight: ((f64::from(score) - f64::from(max)) / params.temperature).exp(),
        }));
        if params.top_p < 1.0 {
            keep_nucleus(candidates, params.top_p);
        }
        if params.min_p > 0.0 {
            candidates.retain(|c| c.weight >= params.min_p);
        }
        best
    }
}

fn penalise(scores: &mut [f32], seen: &Seen, penalty: f32) {
    for &id in &seen.0 {
        if let Some(s) = scores.get_mut(id as usize) {
            *s = if *s < 0.0 { *s * penalty } else { *s / penalty };
        }
    }
}

/// The `k`th greatest score, or −∞ when there are no more than `k`.
fn kth_greatest(ranked: &mut Vec<f32>, scores: &[f32], k: usize) -> f32 {
    if k >= scores.len() {
        return f32::NEG_INFINITY;
    }
    ranked.clear();
    ranked.extend_from_slice(scores);
    *ranked.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// Most probable first, equal ones by id. Candidates are never NaN: a comparison with the floor has dropped those.
fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.score.partial_cmp(&a.score).unwrap_or(std::cmp::Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Keeps candidates from the most probable on until their share reaches `top_p`: one is dropped when those before it reach
/// it already.
fn keep_nucleus(candidates: &mut Vec<Candidate>, top_p: f64) {
    let enough = top_p * candidates.iter().map(|c| c.weight).sum::<f64>();
    // The nucleus is nearly always small beside the vocabulary: rank more and more of it until it is found.
    let (mut ranked, mut before) = (0, 0.0);
    let mut take = 128;
    while ranked < candidates.len() {
        let rest = &mut candidates[ranked..];
        if take < rest.len() {
            rest.select_nth_unstable_by(take, by_rank);
        }
        let part = take.min(rest.len());
        rest[..part].sort_unstable_by(by_rank);
        for (i, c) in rest[..part].iter().enumerate() {
            if before >= enough && ranked + i > 0 {
                candidates.truncate(ranked + i);
                return;
            }
            before += c.weight;
        }
        ranked += part;
        take *= 8;
    }
}

/// Inverse of the cumulative distribution, in the order the candidates are in.
fn pick(candidates: &[Candidate], uniform: f64) -> Option<u32> {
    let mut left = uniform * candidates.iter().map(|c| c.weight).sum::<f64>();
    for c in candidates {
        left -= c.weight;
        if left < 0.0 {
            return Some(c.id);
        }
    }
    // Rounding may leave a crumb: it belongs to the last token that has any probability.
    candidates.iter().rfind(|c| c.weight > 0.0).map(|c| c.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens that can come out, found by drawing on a fine grid.
    fn support(params: &SamplingParams, logits: &[f32], seen: &[u32]) -> Vec<u32> {
        let mut set = Seen::default();
        seen.iter().for_each(|&id| set.insert(id));
        let mut sampler = Sampler::default();
        let mut ids: Vec<u32> =
            (0..10_000).map(|i| sampler.sample(params, logits, &set, (f64::from(i) + 0.5) / 10_000.0)).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn log(p: &[f64]) -> Vec<f32> {
        p.iter().map(|p| p.ln() as f32).collect()
    }

    const WARM: SamplingParams =
        SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

    #[test]
    fn each_cut_keeps_what_transformers_keeps() {
        let logits = log(&[0.1, 0.4, 0.05, 0.3, 0.15]);
        assert_eq!(support(&WARM, &logits, &[]), [0, 1, 2, 3, 4]);
        assert_eq!(support(&SamplingParams { top_k: 2, ..WARM }, &logits, &[]), [1, 3]);
        assert_eq!(support(&SamplingParams { top_k: 99, ..WARM }, &logits, &[]), [0, 1, 2, 3, 4]);
        // 0.4 + 0.3 < 0.75: the token that crosses the border is kept.
        assert_eq!(support(&SamplingParams { top_p: 0.75, ..WARM }, &logits, &[]), [1, 3, 4]);
        assert_eq!(support(&SamplingParams { top_p: 1e-9, ..WARM }, &logits, &[]), [1]);
        assert_eq!(support(&SamplingParams { min_p: 0.3, ..WARM }, &logits, &[]), [1, 3, 4]);
        assert_eq!(support(&SamplingParams { min_p: 1.0, ..WARM }, &logits, &[]), [1]);
        // Top-p works on what top-k left, made a distribution again: of 0.4 and 0.3, 0.4 is 57 %.
        assert_eq!(support(&SamplingParams { top_k: 2, top_p: 0.5, ..WARM }, &logits, &[]), [1]);
    }

    #[test]
    fn ties_go_to_the_lowest_id_but_top_k_keeps_all_of_them() {
        let logits = [0.0, 1.0, 1.0, 1.0];
        assert_eq!(argmax(&logits), 1);
        assert_eq!(support(&SamplingParams { top_k: 1, ..WARM }, &logits, &[]), [1, 2, 3]);
        assert_eq!(support(&SamplingParams { top_p: 0.3, ..WARM }, &logits, &[]), [1, 2]);
    }

    #[test]
    fn repetition_penalty_pushes_down_from_both_sides() {
        let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy() };
        assert_eq!(support(&params, &[2.0, 1.5, -1.0], &[0]), [1]);
        assert_eq!(support(&params, &[-1.0, -1.5, -9.0], &[0, 0]), [1]);
        // Temperature comes after the penalty.
        let mut scores = [2.0, -3.0, 4.0];
        let mut seen = Seen::default();
        [0, 1].into_iter().for_each(|id| seen.insert(id));
        penalise(&mut scores, &seen, 2.0);
        assert_eq!(scores, [1.0, -6.0, 4.0]);
    }

    #[test]
    fn frequencies_follow_the_tempered_distribution() {
        let logits = log(&[0.5, 0.3, 0.2]);
        let params = SamplingParams { temperature: 0.5, ..WARM };
        let mut counts = [0u32; 3];
        let mut sampler = Sampler::default();
        for i in 0..100_000 {
            counts[sampler.sample(&params, &logits, &Seen::default(), draw(7, i)) as usize] += 1;
        }
        let z = 0.25 + 0.09 + 0.04;
        for (n, p) in counts.iter().zip([0.25 / z, 0.09 / z, 0.04 / z]) {
            assert!((f64::from(*n) / 100_000.0 - p).abs() < 0.006, "{counts:?}");
        }
    }

    #[test]
    fn the_nucleus_in_a_large_vocabulary_equals_a_full_sort() {
        let logits: Vec<f32> = (0..5000).map(|i| draw(3, i) as f32 * 4.0).collect();
        for top_p in [0.001, 0.1, 0.5, 0.9, 0.999] {
            let make = || {
                logits.iter().enumerate().map(|(i, &score)| Candidate {
                    id: i as u32,
                    score,
                    weight: f64::from(score).exp(),
                })
            };
            let mut got: Vec<Candidate> = make().collect();
            keep_nucleus(&mut got, top_p);
            let mut all: Vec<Candidate> = make().collect();
            all.sort_by(by_rank);
            let total: f64 = all.iter().map(|c| c.weight).sum();
            let mut before = 0.0;
            let want = all.iter().take_while(|c| {
                let keep = before < top_p * total;
                before += c.weight;
                keep
            });
            assert!(want.map(|c| c.id).eq(got.iter().map(|c| c.id)), "{top_p}");
        }
    }

    #[test]
    fn strange_logits_do_not_panic() {
        let params = SamplingParams { temperature: 1e-300, top_k: 2, top_p: 0.9, min_p: 0.1, ..WARM };
        let mut sampler = Sampler::default();
        for logits in
            [&[f32::NAN; 3][..], &[f32::NEG_INFINITY; 3], &[f32::INFINITY, 1.0, f32::NAN], &[3e38, -3e38, 0.0], &[]]
        {
            let id = sampler.sample(&params, logits, &Seen::default(), 0.999_999);
            assert!((id as usize) < logits.len().max(1));
        }
    }

    #[test]
    fn parameters_are_checked_by_name() {
        let bad = [
            ("temperature", SamplingParams { temperature: -0.1, ..WARM }),
            ("temperature", SamplingParams { temperature: f64::NAN, ..WARM }),
            ("top_p", SamplingParams { top_p: 0.0, ..WARM }),
            ("top_p", SamplingParams { top_p: 1.1, ..WARM }),
            ("min_p", SamplingParams { min_p: f64::NAN, ..WARM }),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..WARM }),
        ];
        for (name, params) in bad {
            assert!(params.check().unwrap_err().to_string().starts_with(name));
        }
        WARM.check().unwrap();
    }
}
