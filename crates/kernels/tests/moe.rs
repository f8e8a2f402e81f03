//! Routing and moving rows against the plain references.

use phalanx_kernels::moe::{self, Balance, Capacity, DROPPED, Drop, Groups, Route, Scores, plain, route};
use phalanx_kernels::{Device, Isa};
use phalanx_testkit::values;
use proptest::prelude::*;

fn softmax(experts: usize, top_k: usize) -> Route {
    Route { experts, top_k, scores: Scores::Softmax, groups: None, normalise: true, scale: 1.0 }
}

fn sigmoid(experts: usize, top_k: usize, groups: Option<Groups>) -> Route {
    Route { experts, top_k, scores: Scores::Sigmoid, groups, normalise: true, scale: 2.5 }
}

fn choose(dev: &Device, r: &Route, logits: &[f32], bias: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
    let t = logits.len() / r.experts;
    let (mut chosen, mut weights) = (vec![0; t * r.top_k], vec![0.0; t * r.top_k]);
    route::forward(dev, r, logits, bias, &mut chosen, &mut weights, None).unwrap();
    (chosen, weights)
}

fn routes() -> Vec<Route> {
    let groups = Some(Groups { num: 4, chosen: 2 });
    vec![
        softmax(8, 2),
        softmax(5, 5),
        softmax(1, 1),
        Route { normalise: false, ..softmax(7, 3) },
        sigmoid(8, 2, groups),
        sigmoid(12, 4, groups),
        Route { normalise: false, ..sigmoid(6, 6, None) },
    ]
}

#[test]
fn choices_and_weights_are_those_of_the_reference() {
    for r in routes() {
        let (t, e) = (37, r.experts);
        let logits = values(3, t * e);
        let bias: Vec<f32> = values(4, e).iter().map(|b| 0.2 * b).collect();
        for bias in [None, Some(&bias[..])] {
            let (chosen, weights) = choose(&Device::new(2), &r, &logits, bias);
            for i in 0..t {
                let (want, w) = plain::route(&r, &logits[i * e..(i + 1) * e], bias);
                assert_eq!(chosen[i * r.top_k..(i + 1) * r.top_k], want, "{r:?} token {i}");
                for (got, want) in weights[i * r.top_k..].iter().zip(w) {
                    assert!((f64::from(*got) - want).abs() < 1e-6, "{r:?} token {i}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn of_equal_scores_the_lower_expert_wins() {
    let dev = Device::new(1);
    assert_eq!(choose(&dev, &softmax(6, 3), &[1.0; 6], None).0, [0, 1, 2]);
    assert_eq!(choose(&dev, &softmax(4, 2), &[0.0, 2.0, 0.0, 2.0], None).0, [1, 3]);
    let grouped = sigmoid(8, 3, Some(Groups { num: 4, chosen: 2 }));
    assert_eq!(choose(&dev, &grouped, &[0.5; 8], None).0, [0, 1, 2]);
}

#[test]
fn a_token_does_not_know_its_neighbours() {
    for r in routes() {
        let logits = values(9, 300 * r.experts);
        let all = choose(&Device::new(3), &r, &logits, None);
        for i in [0, 1, 150, 299] {
            let one = choose(&Device::new(1), &r, &logits[i * r.experts..(i + 1) * r.experts], None);
            let range = i * r.top_k..(i + 1) * r.top_k;
            assert_eq!(all.0[range.clone()], one.0);
            let bits = |w: &[f32]| w.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&all.1[range]), bits(&one.1));
        }
    }
}

#[test]
fn logits_that_are_no_numbers_do_not_panic() {
    for r in routes() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut logits = values(2, 3 * r.experts);
            logits[r.experts / 2] = bad;
            let all = vec![bad; r.experts];
            for logits in [&logits, &all] {
                let (chosen, _) = choose(&Device::new(1), &r, logits, None);
                assert!(chosen.iter().all(|&c| (c as usize) < r.experts));
            }
        }
    }
}

/// Gradients of Σ c·w + Σ slopes·p by the logits, against differences of the f64 reference.
#[test]
fn gradients_are_those_of_the_reference() {
    for r in routes() {
        let (t, e, k) = (6, r.experts, r.top_k);
        let (logits, c, slopes) = (values(5, t * e), values(6, t * k), values(7, 2 * e));
        let group_of: Vec<u32> = (0..t as u32).map(|i| i % 2).collect();
        let dev = Device::new(2);
        let (chosen, _) = choose(&dev, &r, &logits, None);
        for balanced in [false, true] {
            let balance = balanced.then_some(Balance { slopes: &slopes, group_of: &group_of });
            let mut got = vec![f32::NAN; t * e];
            route::backward(&dev, &r, &logits, &chosen, &c, balance, &mut got).unwrap();
            let loss = |i: usize, l: &[f32]| -> f64 {
                let s = plain::scores(&r, l);
                let picked: Vec<f64> = chosen[i * k..(i + 1) * k].iter().map(|&c| s[c as usize]).collect();
                let sum = if r.normalise { picked.iter().sum() } else { 1.0 };
                let w = picked.iter().zip(&c[i * k..]).map(|(s, c)| f64::from(r.scale) * s / sum * f64::from(*c));
                let total: f64 = s.iter().sum();
                let slopes = &slopes[group_of[i] as usize * e..];
                let b = s.iter().zip(slopes).map(|(s, d)| s / total * f64::from(*d));
                w.sum::<f64>() + if balanced { b.sum() } else { 0.0 }
            };
            for i in 0..t {
                for j in 0..e {
                    let at = |d: f32| {
                        let mut l = logits[i * e..(i + 1) * e].to_vec();
                        l[j] += d;
                        (loss(i, &l), f64::from(l[j]))
                    };
                    let ((up, x1), (down, x0)) = (at(1e-3), at(-1e-3));
                    let (want, got) = ((up - down) / (x1 - x0), f64::from(got[i * e + j]));
                    assert!((want - got).abs() < 2e-5 * (1.0 + want.abs()), "{r:?} {i} {j}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn impossible_forms_are_refused() {
    let groups = |num, chosen| Some(Groups { num, chosen });
    for r in [
        softmax(4, 5),
        softmax(4, 0),
        softmax(0, 0),
        sigmoid(8, 2, groups(3, 1)),
        sigmoid(8, 2, groups(8, 4)),
        sigmoid(8, 5, groups(4, 2)),
        sigmoid(8, 2, groups(4, 5)),
        sigmoid(8, 2, groups(0, 0)),
        sigmoid(200, 2, groups(100, 2)),
    ] {
        let (mut chosen, mut weights) = (vec![0; r.top_k], vec![0.0; r.top_k]);
        let logits = vec![0.0; r.experts];
        let e = route::forward(&Device::new(1), &r, &logits, None, &mut chosen, &mut weights, None);
        assert!(e.is_err(), "{r:?}");
    }
}

struct Placed {
    offsets: Vec<usize>,
    pairs: Vec<u32>,
    places: Vec<u32>,
}

fn place(chosen: &[u32], experts: usize, capacity: Option<Capacity<'_>>) -> Placed {
    let (mut offsets, mut pairs, mut places) = (vec![9; experts + 1], vec![9; chosen.len()], vec![9; chosen.len()]);
    let rows = moe::place(chosen, capacity, &mut offsets, &mut pairs, &mut places).unwrap();
    pairs.truncate(rows);
    Placed { offsets, pairs, places }
}

#[test]
fn a_capacity_drops_the_last_or_the_least_likely() {
    // Expert 1 is asked for by four tokens, expert 2 by none.
    let chosen = [1, 0, 1, 3, 0, 1, 1];
    let weights = [0.2, 0.5, 0.9, 0.4, 0.1, 0.2, 0.3];
    let limit = |rows, drop| Some(Capacity { rows, drop, weights: &weights });
    let all = place(&chosen, 4, None);
    assert_eq!((&all.offsets[..], &all.pairs[..]), (&[0, 2, 6, 6, 7][..], &[1, 4, 0, 2, 5, 6, 3][..]));
    let last = place(&chosen, 4, limit(2, Drop::Position));
    assert_eq!((&last.offsets[..], &last.pairs[..]), (&[0, 2, 4, 4, 5][..], &[1, 4, 0, 2, 3][..]));
    assert_eq!(last.places, [2, 0, 3, 4, 1, DROPPED, DROPPED]);
    let least = place(&chosen, 4, limit(2, Drop::Probability));
    assert_eq!((&least.offsets[..], &least.pairs[..]), (&[0, 2, 4, 4, 5][..], &[1, 4, 2, 6, 3][..]));
    // Of two equal weights the first token stays.
    assert_eq!(place(&chosen, 4, limit(3, Drop::Probability)).pairs, [1, 4, 0, 2, 6, 3]);
    assert_eq!(place(&chosen, 4, limit(0, Drop::Position)).offsets, [0; 5]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_come_back_to_their_tokens(
        (experts, tokens, k) in (1usize..6, 0usize..70, 1usize..4),
        width in prop::sample::select(&[1usize, 7, 16, 40][..]),
        capacity in prop::option::of((0usize..30, any::<bool>())),
        (one, seed) in any::<(bool, u64)>(),
    ) {
        let weights = values(seed, tokens * k);
        let chosen: Vec<u32> = values(seed ^ 1, tokens * k)
            .iter().map(|v| if one { 0 } else { v.to_bits() % experts as u32 }).collect();
        let capacity = capacity.map(|(rows, p)| {
            Capacity { rows, drop: if p { Drop::Probability } else { Drop::Position }, weights: &weights }
        });
        let p = place(&chosen, experts, capacity);
        for e in 0..experts {
            let rows = &p.pairs[p.offsets[e]..p.offsets[e + 1]];
            prop_assert!(rows.is_sorted() && rows.iter().all(|&r| chosen[r as usize] == e as u32));
            let asked = chosen.iter().filter(|&&c| c == e as u32).count();
            prop_assert_eq!(rows.len(), capacity.map_or(asked, |c| asked.min(c.rows)));
        }
        for (row, &pair) in p.pairs.iter().enumerate() {
            prop_assert_eq!(p.places[pair as usize], row as u32);
        }
        let x = values(seed ^ 2, tokens * width);
        for isa in Isa::available() {
            let dev = Device::with_isa(isa, 2).unwrap();
            let mut rows = vec![f32::NAN; p.pairs.len() * width];
            moe::gather(&dev, &x, width, k, &p.pairs, &mut rows).unwrap();
            for (row, &pair) in rows.chunks_exact(width).zip(&p.pairs) {
                let t = pair as usize / k;
                prop_assert_eq!(row, &x[t * width..(t + 1) * width]);
            }
            let mut weighed = vec![f32::NAN; rows.len()];
            moe::weigh(&dev, &rows, width, &weights, &p.pairs, &mut weighed).unwrap();
            let mut back = vec![f32::NAN; tokens * width];
            moe::sum(&dev, &weighed, width, k, &p.places, &mut back).unwrap();
            prop_assert_eq!(&back, &plain::sum(&weighed, width, k, &p.places));
            let (mut dx, mut dw) = (vec![f32::NAN; rows.len()], vec![f32::NAN; tokens * k]);
            moe::weigh_backward(&dev, &rows, width, &weights, &p.pairs, &weighed, &mut dx, &mut dw).unwrap();
            for pair in 0..tokens * k {
                let at = p.places[pair];
                if at == DROPPED {
                    prop_assert_eq!(dw[pair], 0.0);
                } else {
                    let r = at as usize * width..(at as usize + 1) * width;
                    let dot: f64 = rows[r.clone()].iter().zip(&weighed[r.clone()]).map(|(a, b)| f64::from(a * b)).sum();
                    prop_assert!((dot - f64::from(dw[pair])).abs() < 1e-5 * (1.0 + dot.abs()));
                    for i in r {
                        prop_assert_eq!(dx[i], weights[pair] * weighed[i]);
                    }
                }
            }
        }
    }
}
