//! Gradients of what a mixture of experts and latent attention are made of, against differences of their formulas in f64.

use std::sync::Arc;

use phalanx_autograd::functions::{
    self, AttentionSpec, BalanceSlopes, GroupedSpec, Places, attention, columns, from_experts, glu, grouped_linear,
    join_heads, rope_form, route, to_experts, weigh,
};
use phalanx_autograd::{GradSlot, Tape};
use phalanx_kernels::attention::Seq;
use phalanx_kernels::gemm::Arithmetic;
use phalanx_kernels::glu::Act;
use phalanx_kernels::moe::{Capacity, Drop, Groups, Route, Scores, plain};
use phalanx_kernels::rope::Form;
use phalanx_tensor::{Category, Runtime, Tensor};
use phalanx_testkit::values;

mod common;
use common::{Arg, Frozen, Given, Trained, X, arg, check};

/// Seven tokens, two choices each, five experts of which number 3 gets nothing and number 1 more than a fair share.
const CHOSEN: [u32; 14] = [1, 0, 1, 2, 4, 1, 1, 0, 2, 1, 0, 4, 1, 2];
const EXPERTS: usize = 5;

fn places(capacity: Option<usize>) -> Places {
    let weights = values(77, CHOSEN.len());
    let capacity = capacity.map(|rows| Capacity { rows, drop: Drop::Probability, weights: &weights });
    Places::new(&CHOSEN, 2, EXPERTS, capacity).unwrap()
}

fn grouped(g: &Given, first: usize, offsets: &Arc<[usize]>) -> GroupedSpec {
    let weights: Vec<_> = (first..first + EXPERTS).map(|i| g.p(i)).collect();
    GroupedSpec {
        weights: weights.into(),
        offsets: Arc::clone(offsets),
        arithmetic: Arithmetic::F32,
        gradient_noise: None,
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Token by token, in the order of choices: Σ down(w · act(gate(x))·up(x)).
fn mixture(a: &[Vec<f64>], at: &Places, (h, inner): (usize, usize)) -> Vec<f64> {
    let (x, weights) = (&a[0], &a[1]);
    let mut out = vec![0.0; x.len()];
    for (pair, &expert) in CHOSEN.iter().enumerate() {
        if at.places[pair] == u32::MAX {
            continue;
        }
        let (token, e) = (pair / 2, expert as usize);
        let x = &x[token * h..(token + 1) * h];
        let [gate, up, down] = [0, 1, 2].map(|p| &a[2 + p * EXPERTS + e]);
        let inner: Vec<f64> = (0..inner)
            .map(|i| {
                let g = dot(&gate[i * h..(i + 1) * h], x);
                weights[pair] * Act::Silu.value_and_slope(g).0 * dot(&up[i * h..(i + 1) * h], x)
            })
            .collect();
        for j in 0..h {
            out[token * h + j] += dot(&down[j * inner.len()..(j + 1) * inner.len()], &inner);
        }
    }
    out
}

#[test]
fn rows_through_experts_and_back() {
    let (h, inner) = (6, 4);
    for (capacity, kind) in [(None, Trained), (Some(2), Trained), (None, Frozen)] {
        let mut args: Vec<Arg> = vec![arg(X, &[7, h], 1), arg(X, &[7, 2], 2)];
        for (p, shape) in [[inner, h], [inner, h], [h, inner]].iter().enumerate() {
            args.extend((0..EXPERTS).map(|e| arg(kind, shape, (10 * p + e) as u64)));
        }
        let at = places(capacity);
        check(
            &format!("experts, capacity {capacity:?}"),
            &args,
            |rt, tape, g| {
                let rows = to_experts(rt, Some(tape), g.x(0), &at).unwrap();
                let gate = grouped_linear(rt, Some(tape), &rows, grouped(g, 2, &at.offsets)).unwrap();
                let up = grouped_linear(rt, Some(tape), &rows, grouped(g, 2 + EXPERTS, &at.offsets)).unwrap();
                drop(rows);
                let y = glu(rt, Some(tape), Act::Silu, &gate, &up).unwrap();
                let y = weigh(rt, Some(tape), &y, g.x(1), &at).unwrap();
                let y = grouped_linear(rt, Some(tape), &y, grouped(g, 2 + 2 * EXPERTS, &at.offsets)).unwrap();
                from_experts(rt, Some(tape), &y, &at).unwrap()
            },
            |a| mixture(a, &at, (h, inner)),
        );
    }
}

/// An expert without rows has a gradient, and it is zero; also where it already had one.
#[test]
fn an_empty_expert_has_a_gradient_of_zeros() {
    let rt = Runtime::new(2);
    let at = places(None);
    let slots: Vec<GradSlot> = (0..EXPERTS).map(|_| GradSlot::new()).collect();
    let weight = |e: usize| rt.from_f32(&[3, 6], &values(e as u64, 18), Category::Weights).unwrap();
    for round in 1..3 {
        let mut tape = Tape::new();
        let x = rt.from_f32(&[7, 6], &values(1, 42), Category::Activations).unwrap();
        let rows = to_experts(&rt, Some(&mut tape), &x, &at).unwrap();
        let weights =
            (0..EXPERTS).map(|e| functions::Param::new(weight(e), Some(slots[e].clone()))).collect::<Vec<_>>();
        let spec = GroupedSpec {
            weights: weights.into(),
            offsets: Arc::clone(&at.offsets),
            arithmetic: Arithmetic::F32,
            gradient_noise: None,
        };
        let y = grouped_linear(&rt, Some(&mut tape), &rows, spec).unwrap();
        let seed = rt.from_f32(y.shape(), &values(3, y.len()), Category::Activations).unwrap();
        tape.backward(&rt, &y, seed).unwrap();
        let empty = slots[3].get().unwrap();
        assert!(empty.f32().unwrap().iter().all(|g| *g == 0.0), "round {round}");
        assert!(slots[1].get().unwrap().f32().unwrap().iter().any(|g| *g != 0.0));
    }
}

#[test]
fn weights_of_the_chosen() {
    let softmax = Route { experts: 6, top_k: 3, scores: Scores::Softmax, groups: None, normalise: true, scale: 1.0 };
    let groups = Some(Groups { num: 3, chosen: 2 });
    let sigmoid = Route { scores: Scores::Sigmoid, groups, scale: 2.5, ..softmax };
    for form in
        [softmax, Route { normalise: false, ..softmax }, sigmoid, Route { top_k: 4, normalise: false, ..sigmoid }]
    {
        for balanced in [false, true] {
            let slopes = values(8, 12);
            let logits = arg(X, &[5, 6], 4);
            let group_of: Arc<[u32]> = Arc::from([0, 0, 1, 1, 0]);
            let chosen: Vec<Vec<u32>> = logits.values.chunks(6).map(|l| plain::route(&form, l, None).0).collect();
            // A balancing loss is no part of the output: its slopes are seen as the gradient of Σ slope·p beside it.
            let run = |rt: &Runtime, tape: &mut Tape, logits: &Tensor| {
                let (slopes, group_of) = (slopes.clone(), Arc::clone(&group_of));
                let ask: functions::AskSlopes = Box::new(move || BalanceSlopes { slopes, group_of });
                route(rt, Some(tape), logits, form, None, balanced.then_some(ask)).unwrap()
            };
            let rt = Runtime::new(1);
            let mut tape = Tape::new();
            let x = tape.input(rt.from_f32(&[5, 6], &logits.values, Category::Activations).unwrap());
            let out = run(&rt, &mut tape, &x);
            assert_eq!(out.experts.to_vec(), chosen.concat());
            assert_eq!(out.probabilities.is_some(), balanced);
            let c = values(9, 5 * form.top_k);
            let seed = rt.from_f32(&[5, form.top_k], &c, Category::Activations).unwrap();
            let grads = tape.backward(&rt, &out.weights, seed).unwrap();
            let got = grads.of(&x).unwrap().f32().unwrap();
            let objective = |t: usize, l: &[f64]| {
                let l32: Vec<f32> = l.iter().map(|&v| v as f32).collect();
                let s = plain::scores(&form, &l32);
                let picked: Vec<f64> = chosen[t].iter().map(|&e| s[e as usize]).collect();
                let sum: f64 = if form.normalise { picked.iter().sum() } else { 1.0 };
                let weights = picked.iter().zip(&c[t * form.top_k..]);
                let weights = weights.map(|(s, c)| f64::from(form.scale) * s / sum * f64::from(*c)).sum::<f64>();
                let total: f64 = s.iter().sum();
                let slopes = &slopes[group_of[t] as usize * 6..];
                let p = s.iter().zip(slopes).map(|(s, d)| s / total * f64::from(*d)).sum::<f64>();
                weights + if balanced { p } else { 0.0 }
            };
            for t in 0..5 {
                for e in 0..6 {
                    let at = |d: f64| {
                        let mut l: Vec<f64> = logits.values[t * 6..(t + 1) * 6].iter().map(|&v| f64::from(v)).collect();
                        l[e] = f64::from((l[e] + d) as f32);
                        (objective(t, &l), l[e])
                    };
                    let ((up, x1), (down, x0)) = (at(2e-3), at(-2e-3));
                    let (want, got) = ((up - down) / (x1 - x0), f64::from(got[t * 6 + e]));
                    assert!((want - got).abs() < 3e-5, "{form:?} balanced {balanced}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn heads_are_split_and_joined() {
    check(
        "columns of heads, joined with one row for all heads",
        &[arg(X, &[4, 3, 7], 1), arg(X, &[4, 1, 2], 2)],
        |rt, tape, g| {
            let a = columns(rt, Some(tape), g.x(0), 2..6).unwrap();
            join_heads(rt, Some(tape), &a, g.x(1)).unwrap()
        },
        |a| {
            let row = |r: usize| [&a[0][r * 7 + 2..r * 7 + 6], &a[1][r / 3 * 2..r / 3 * 2 + 2]].concat();
            (0..12).flat_map(row).collect()
        },
    );
    check(
        "two parts of one value, as many heads in both",
        &[arg(X, &[3, 2, 5], 3)],
        |rt, tape, g| {
            let (a, b) = (columns(rt, Some(tape), g.x(0), 3..5), columns(rt, Some(tape), g.x(0), 0..3));
            join_heads(rt, Some(tape), &a.unwrap(), &b.unwrap()).unwrap()
        },
        |a| a[0].chunks(5).flat_map(|r| [&r[3..], &r[..3]].concat()).collect(),
    );
}

#[test]
fn a_part_of_a_head_turns_in_neighbouring_pairs() {
    let (at, half, dim) = (3, 2, 8);
    let angle = |t: usize, j: usize| (t as f32 * 0.7 + j as f32 * 0.3 + 0.1).sin_cos();
    check(
        "rope of neighbours",
        &[arg(X, &[4, 3, dim], 1)],
        |rt, tape, g| {
            let table = |f: &dyn Fn(usize, usize) -> f32| {
                let v: Vec<f32> = (0..4 * half).map(|i| f(i / half, i % half)).collect();
                rt.from_f32(&[4, half], &v, Category::Activations).unwrap()
            };
            let (cos, sin) = (table(&|t, j| angle(t, j).1), table(&|t, j| angle(t, j).0));
            rope_form(rt, Some(tape), g.x(0).clone(), &cos, &sin, Form { at, interleaved: true }).unwrap()
        },
        |a| {
            let mut y = a[0].clone();
            for (row, x) in a[0].chunks(dim).enumerate() {
                for j in 0..half {
                    let (s, c) = angle(row / 3, j);
                    let (s, c, i) = (f64::from(s), f64::from(c), at + 2 * j);
                    y[row * dim + i] = x[i] * c - x[i + 1] * s;
                    y[row * dim + i + 1] = x[i + 1] * c + x[i] * s;
                }
            }
            y
        },
    );
}

#[test]
fn attention_with_values_narrower_than_keys() {
    let (t, n, d, dv) = (7usize, 2usize, 6usize, 3usize);
    let seqs = [
        Seq { q_start: 0, q_len: 3, kv_start: 0, kv_len: 3, ahead: 0 },
        Seq { q_start: 3, q_len: 4, kv_start: 3, kv_len: 4, ahead: 0 },
    ];
    check(
        "attention",
        &[arg(X, &[t, n, d], 1), arg(X, &[t, n, d], 2), arg(X, &[t, n, dv], 3)],
        |rt, tape, g| {
            let spec = AttentionSpec { seqs: seqs.as_slice().into(), scale: 0.5, window: None };
            attention(rt, Some(tape), g.x(0), g.x(1), g.x(2), spec).unwrap()
        },
        |a| {
            let mut out = vec![0.0; t * n * dv];
            let row = |m: &[f64], r: usize, h: usize, w: usize| m[(r * n + h) * w..][..w].to_vec();
            for s in &seqs {
                for q in s.q_start..s.q_start + s.q_len {
                    for h in 0..n {
                        let query = row(&a[0], q, h, d);
                        let scores: Vec<f64> =
                            (s.kv_start..=q).map(|r| (0.5 * dot(&query, &row(&a[1], r, h, d))).exp()).collect();
                        let sum: f64 = scores.iter().sum();
                        for (r, p) in (s.kv_start..=q).zip(&scores) {
                            for (j, v) in row(&a[2], r, h, dv).iter().enumerate() {
                                out[(q * n + h) * dv + j] += p / sum * v;
                            }
                        }
                    }
                }
            }
            out
        },
    );
}
