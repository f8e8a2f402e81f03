//! The references: everything in f64, one token at a time, by sorting.

use super::{DROPPED, Route, Scores};

/// Scores of a token.
pub fn scores(r: &Route, logits: &[f32]) -> Vec<f64> {
    let x: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
    match r.scores {
        Scores::Sigmoid => x.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Scores::Softmax => {
            let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
            x.iter().map(|x| (x - max).exp() / sum).collect()
        }
    }
}

/// Indices of `x` from the greatest on, the lower of equals first.
fn ranked(x: &[f64], among: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut all: Vec<usize> = (0..x.len()).filter(|&i| among(i)).collect();
    all.sort_by(|&a, &b| x[b].total_cmp(&x[a]).then(a.cmp(&b)));
    all
}

/// The experts of one token and their weights; see [`super::route::forward`].
pub fn route(r: &Route, logits: &[f32], bias: Option<&[f32]>) -> (Vec<u32>, Vec<f64>) {
    let s = scores(r, logits);
    let by: Vec<f64> = s.iter().enumerate().map(|(i, s)| s + bias.map_or(0.0, |b| f64::from(b[i]))).collect();
    let mut allowed = vec![true; r.experts];
    if let Some(g) = r.groups {
        let size = r.experts / g.num;
        let worth = |g: usize| ranked(&by, |i| i / size == g)[..2].iter().map(|&i| by[i]).sum::<f64>();
        let worth: Vec<f64> = (0..g.num).map(worth).collect();
        let best = ranked(&worth, |_| true);
        allowed.iter_mut().enumerate().for_each(|(i, a)| *a = best[..g.chosen].contains(&(i / size)));
    }
    let chosen = &ranked(&by, |i| allowed[i])[..r.top_k];
    let sum: f64 = if r.normalise { chosen.iter().map(|&c| s[c]).sum() } else { 1.0 };
    (chosen.iter().map(|&c| c as u32).collect(), chosen.iter().map(|&c| f64::from(r.scale) * s[c] / sum).collect())
}

/// See [`super::sum`].
pub fn sum(y: &[f32], width: usize, top_k: usize, places: &[u32]) -> Vec<f32> {
    let row = |p: u32, i: usize| if p == DROPPED { 0.0 } else { y[p as usize * width + i] };
    let token =
        |places: &[u32]| (0..width).map(|i| places.iter().fold(0f32, |s, &p| s + row(p, i))).collect::<Vec<_>>();
    places.chunks_exact(top_k).flat_map(token).collect()
}
