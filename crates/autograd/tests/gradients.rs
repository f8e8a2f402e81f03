//! Every function's gradient against central differences of its formula in f64.
//!
//! The formula is written out here once more, in f64 and without any of the crate's kernels, so that forward and backward are both
//! compared with something that shares no code with them.

use std::sync::Arc;

use phalanx_autograd::functions::{
    self, AttentionSpec, HeadSpec, LinearSpec, Param, Part, attention, dropout, dropout_part, embedding, glu,
    layer_norm, linear, linear_cross_entropy, rms_norm, rope,
};
use phalanx_autograd::{AutogradError, Tape};
use phalanx_kernels::attention::Seq;
use phalanx_kernels::gemm::Arithmetic;
use phalanx_kernels::glu::Act;
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Category, Runtime};
use phalanx_testkit::values;

mod common;
use common::{Frozen, Trained, X, arg, check};

fn matmul_nt(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    x.chunks(k).flat_map(|row| w.chunks(k).map(move |col| dot(row, col))).collect()
}

#[test]
fn linear_with_bias_and_factor() {
    for (alpha, kinds) in [(1.0f32, [X, Trained, Trained]), (0.37, [X, Trained, Frozen]), (2.0, [X, Frozen, Trained])] {
        let args = [arg(kinds[0], &[5, 7], 1), arg(kinds[1], &[3, 7], 2), arg(kinds[2], &[3], 3)];
        check(
            "linear",
            &args,
            |rt, tape, g| linear(rt, Some(tape), g.x(0), LinearSpec::exact(g.p(1), Some(g.p(2)), alpha)).unwrap(),
            |a| {
                let y = matmul_nt(&a[0], &a[1], 7);
                y.iter().enumerate().map(|(i, y)| f64::from(alpha) * y + a[2][i % 3]).collect()
            },
        );
    }
    check(
        "linear without bias, twice into one slot",
        &[arg(X, &[4, 6], 4), arg(Trained, &[6, 6], 5)],
        |rt, tape, g| {
            let spec = || LinearSpec::exact(g.p(1), None, 0.5);
            let h = linear(rt, Some(tape), g.x(0), spec()).unwrap();
            linear(rt, Some(tape), &h, spec()).unwrap()
        },
        |a| {
            let half = |v: Vec<f64>| v.iter().map(|v| v * 0.5).collect::<Vec<_>>();
            half(matmul_nt(&half(matmul_nt(&a[0], &a[1], 6)), &a[1], 6))
        },
    );
}

fn rms(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let h = w.len();
    x.chunks(h)
        .flat_map(|row| {
            let r = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / h as f64 + eps).sqrt();
            row.iter().zip(w).map(move |(v, w)| v * r * w).collect::<Vec<_>>()
        })
        .collect()
}

fn layer(x: &[f64], w: &[f64], b: Option<&[f64]>, eps: f64) -> Vec<f64> {
    let h = w.len();
    let norm = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / h as f64;
        let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / h as f64;
        let r = 1.0 / (var + eps).sqrt();
        (0..h).map(|i| (row[i] - mean) * r * w[i] + b.map_or(0.0, |b| b[i])).collect::<Vec<_>>()
    };
    x.chunks(h).flat_map(norm).collect()
}

#[test]
fn norms() {
    for w in [Trained, Frozen] {
        check(
            "rms_norm",
            &[arg(X, &[6, 9], 1), arg(w, &[9], 2)],
            |rt, tape, g| rms_norm(rt, Some(tape), g.x(0), g.p(1), 1e-5).unwrap(),
            |a| rms(&a[0], &a[1], f64::from(1e-5f32)),
        );
        check(
            "rms_norm over heads",
            &[arg(X, &[3, 2, 8], 1), arg(w, &[8], 2)],
            |rt, tape, g| rms_norm(rt, Some(tape), g.x(0), g.p(1), 1e-5).unwrap(),
            |a| rms(&a[0], &a[1], f64::from(1e-5f32)),
        );
        for b in [Trained, Frozen] {
            check(
                "layer_norm",
                &[arg(X, &[6, 9], 1), arg(w, &[9], 2), arg(b, &[9], 3)],
                |rt, tape, g| layer_norm(rt, Some(tape), g.x(0), g.p(1), Some(g.p(2)), 1e-5).unwrap(),
                |a| layer(&a[0], &a[1], Some(&a[2]), f64::from(1e-5f32)),
            );
        }
        check(
            "layer_norm without bias",
            &[arg(X, &[6, 9], 1), arg(w, &[9], 2)],
            |rt, tape, g| layer_norm(rt, Some(tape), g.x(0), g.p(1), None, 1e-5).unwrap(),
            |a| layer(&a[0], &a[1], None, f64::from(1e-5f32)),
        );
    }
}

/// Norms and gated units leave recipes instead of values; several consumers share what is rebuilt.
#[test]
fn values_that_are_rebuilt() {
    check(
        "rms_norm into two projections, their gated product into a third",
        &[
            arg(X, &[5, 8], 1),
            arg(Trained, &[8], 2),
            arg(Trained, &[6, 8], 3),
            arg(Trained, &[6, 8], 4),
            arg(Trained, &[8, 6], 5),
        ],
        |rt, tape, g| {
            let spec = |i: usize| LinearSpec::exact(g.p(i), None, 1.0);
            let n = rms_norm(rt, Some(tape), g.x(0), g.p(1), 1e-5).unwrap();
            let gate = linear(rt, Some(tape), &n, spec(2)).unwrap();
            let up = linear(rt, Some(tape), &n, spec(3)).unwrap();
            drop(n);
            let h = glu(rt, Some(tape), Act::Silu, &gate, &up).unwrap();
            let down = linear(rt, Some(tape), &h, spec(4)).unwrap();
            functions::add(rt, Some(tape), g.x(0), &down).unwrap()
        },
        |a| {
            let n = rms(&a[0], &a[1], f64::from(1e-5f32));
            let (gate, up) = (matmul_nt(&n, &a[2], 8), matmul_nt(&n, &a[3], 8));
            let h: Vec<f64> = gate.iter().zip(&up).map(|(&g, u)| Act::Silu.value_and_slope(g).0 * u).collect();
            matmul_nt(&h, &a[4], 6).iter().zip(&a[0]).map(|(d, x)| d + x).collect()
        },
    );
}

#[test]
fn rotary_positions_full_and_partial() {
    for (dim, rotary) in [(8usize, 8usize), (10, 6)] {
        let half = rotary / 2;
        let angle = |t: usize, j: usize| (t as f32 * 0.7 + j as f32 * 0.3 + 0.1).sin_cos();
        check(
            "rope",
            &[arg(X, &[4, 3, dim], 1)],
            |rt, tape, g| {
                let table = |f: &dyn Fn(usize, usize) -> f32| {
                    let v: Vec<f32> =
                        (0..4).flat_map(|t| (0..half).map(move |j| (t, j))).map(|(t, j)| f(t, j)).collect();
                    rt.from_f32(&[4, half], &v, Category::Activations).unwrap()
                };
                let (cos, sin) = (table(&|t, j| angle(t, j).1), table(&|t, j| angle(t, j).0));
                rope(rt, Some(tape), g.x(0).clone(), &cos, &sin).unwrap()
            },
            |a| {
                let mut y = a[0].clone();
                for (row, x) in a[0].chunks(dim).enumerate() {
                    for j in 0..half {
                        let (s, c) = angle(row / 3, j);
                        let (s, c) = (f64::from(s), f64::from(c));
                        y[row * dim + j] = x[j] * c - x[j + half] * s;
                        y[row * dim + j + half] = x[j + half] * c + x[j] * s;
                    }
                }
                y
            },
        );
    }
}

#[test]
fn gated_units_of_every_activation() {
    for act in [Act::Silu, Act::Gelu, Act::GeluTanh] {
        let mut args = [arg(X, &[7, 11], 1), arg(X, &[7, 11], 2)];
        args[0].values.iter_mut().for_each(|v| *v *= 4.0);
        check(
            "glu",
            &args,
            |rt, tape, g| glu(rt, Some(tape), act, g.x(0), g.x(1)).unwrap(),
            |a| a[0].iter().zip(&a[1]).map(|(&g, u)| act.value_and_slope(g).0 * u).collect(),
        );
        check(
            "glu of a value with itself",
            &[arg(X, &[3, 5], 3)],
            |rt, tape, g| glu(rt, Some(tape), act, g.x(0), g.x(0)).unwrap(),
            |a| a[0].iter().map(|&g| act.value_and_slope(g).0 * g).collect(),
        );
    }
}

#[test]
fn activations_have_the_slopes_they_claim() {
    for act in [Act::Silu, Act::Gelu, Act::GeluTanh] {
        for i in -40..40 {
            let (x, h) = (f64::from(i) / 8.0, 1e-5);
            let slope = (act.value_and_slope(x + h).0 - act.value_and_slope(x - h).0) / (2.0 * h);
            assert!((slope - act.value_and_slope(x).1).abs() < 1e-8, "{act:?} at {x}");
        }
    }
}

#[test]
fn embeddings_add_up_over_repeated_ids() {
    let ids: Arc<[u32]> = Arc::from([3u32, 0, 3, 3, 5]);
    check(
        "embedding",
        &[arg(Trained, &[6, 4], 1)],
        |rt, tape, g| embedding(rt, Some(tape), &ids, g.p(0)).unwrap(),
        |a| ids.iter().flat_map(|&i| a[0][i as usize * 4..][..4].to_vec()).collect(),
    );
}

#[test]
fn additions() {
    check(
        "a + 0.3 b, a used again",
        &[arg(X, &[3, 5], 1), arg(X, &[3, 5], 2)],
        |rt, tape, g| {
            let s = functions::scale_add(rt, Some(tape), g.x(0), g.x(1), 0.3).unwrap();
            let s = functions::add(rt, Some(tape), &s, g.x(0)).unwrap();
            functions::add(rt, Some(tape), &s, &s).unwrap()
        },
        |a| a[0].iter().zip(&a[1]).map(|(x, y)| 2.0 * (2.0 * x + f64::from(0.3f32) * y)).collect(),
    );
}

#[test]
fn attention_with_groups_windows_and_documents() {
    let (n, k, d) = (4usize, 2usize, 6usize);
    for window in [None, Some(3), Some(1)] {
        for docs in [&[9usize][..], &[4, 1, 6]] {
            let t: usize = docs.iter().sum();
            let mut at = 0;
            let seqs: Vec<Seq> = docs
                .iter()
                .map(|&len| {
                    at += len;
                    Seq { q_start: at - len, q_len: len, kv_start: at - len, kv_len: len, ahead: 0 }
                })
                .collect();
            let scale = 0.6f32;
            check(
                &format!("attention, window {window:?}, documents {docs:?}"),
                &[arg(X, &[t, n, d], 1), arg(X, &[t, k, d], 2), arg(X, &[t, k, d], 3)],
                |rt, tape, g| {
                    let spec = AttentionSpec { seqs: seqs.as_slice().into(), scale, window };
                    attention(rt, Some(tape), g.x(0), g.x(1), g.x(2), spec).unwrap()
                },
                |a| {
                    let mut out = vec![0.0; t * n * d];
                    for s in &seqs {
                        for q in s.q_start..s.q_start + s.q_len {
                            for head in 0..n {
                                let kv = head / (n / k);
                                let row = |m: &[f64], r: usize, h: usize, heads: usize| {
                                    m[(r * heads + h) * d..][..d].to_vec()
                                };
                                let query = row(&a[0], q, head, n);
                                let first = window.map_or(s.kv_start, |w| s.kv_start.max((q + 1).saturating_sub(w)));
                                let scores: Vec<f64> = (first..=q)
                                    .map(|r| {
                                        let key = row(&a[1], r, kv, k);
                                        f64::from(scale) * query.iter().zip(&key).map(|(x, y)| x * y).sum::<f64>()
                                    })
                                    .collect();
                                let max = scores.iter().fold(f64::MIN, |m, &s| m.max(s));
                                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                                for (i, r) in (first..=q).enumerate() {
                                    let p = (scores[i] - max).exp() / sum;
                                    for (j, v) in row(&a[2], r, kv, k).iter().enumerate() {
                                        out[(q * n + head) * d + j] += p * v;
                                    }
                                }
                            }
                        }
                    }
                    out
                },
            );
        }
    }
}

#[test]
fn dropout_keeps_its_mask_and_its_mean() {
    let stream = Stream::new(4, "layer.lora_dropout").at(7);
    let p = 0.3f32;
    let rt = Runtime::new(1);
    let ones = rt.from_f32(&[8, 50], &[1.0; 400], Category::Activations).unwrap();
    let mask: Vec<f64> =
        dropout(&rt, None, &ones, p, stream).unwrap().f32().unwrap().iter().map(|&v| f64::from(v)).collect();
    assert!(mask.iter().all(|&m| m == 0.0 || (m - 1.0 / 0.7).abs() < 1e-6));
    let kept = mask.iter().filter(|&&m| m != 0.0).count() as f64 / 400.0;
    assert!((kept - 0.7).abs() < 0.08, "{kept}");
    check(
        "dropout",
        &[arg(X, &[8, 50], 1)],
        |rt, tape, g| dropout(rt, Some(tape), g.x(0), p, stream).unwrap(),
        |a| a[0].iter().zip(&mask).map(|(x, m)| x * m).collect(),
    );
    check(
        "no dropout",
        &[arg(X, &[2, 3], 1), arg(X, &[2, 3], 2)],
        |rt, tape, g| {
            let x = dropout(rt, Some(tape), g.x(0), 0.0, stream).unwrap();
            functions::add(rt, Some(tape), &x, g.x(1)).unwrap()
        },
        |a| a[0].iter().zip(&a[1]).map(|(x, y)| x + y).collect(),
    );
    // Rows that lie elsewhere keep their mask.
    let rows = [5u32, 0, 6];
    let some = rt.from_f32(&[3, 50], &[1.0; 150], Category::Activations).unwrap();
    let moved = dropout_part(&rt, None, &some, p, stream, Part { rows: Some(rows.into()), ..Part::default() }).unwrap();
    for (row, moved) in rows.iter().zip(moved.f32().unwrap().chunks(50)) {
        let whole = &mask[*row as usize * 50..][..50];
        assert!(moved.iter().zip(whole).all(|(a, b)| f64::from(*a) == *b));
    }
    let other = dropout(&rt, None, &ones, p, Stream::new(4, "layer.lora_dropout").at(8)).unwrap();
    assert!(other.f32().unwrap().iter().zip(&mask).any(|(a, b)| f64::from(*a) != *b), "each micro-batch draws its own");
}

fn cross_entropy(hidden: &[f64], w: &[f64], h: usize, targets: &[i32]) -> f64 {
    let logits = matmul_nt(hidden, w, h);
    let v = w.len() / h;
    let row = |t: usize| {
        let row = &logits[t * v..][..v];
        let max = row.iter().fold(f64::MIN, |m, &x| m.max(x));
        max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln() - row[targets[t] as usize]
    };
    (0..targets.len()).filter(|&t| targets[t] >= 0).map(row).sum()
}

/// 40 rows in chunks of 16: not a multiple, one chunk without a target that counts.
fn targets() -> Arc<[i32]> {
    (0..40).map(|t| if (16..32).contains(&t) || t % 5 == 0 { -100 } else { (t * 7) % 13 }).collect()
}

#[test]
fn fused_head_and_loss() {
    let targets = targets();
    for (hidden, head) in [(X, Trained), (X, Frozen), (Frozen, Trained)] {
        check(
            "linear_cross_entropy",
            &[arg(hidden, &[40, 5], 1), arg(head, &[13, 5], 2)],
            |rt, tape, g| {
                let spec = HeadSpec {
                    weight: g.p(1),
                    targets: Arc::clone(&targets),
                    chunk_bytes: 1,
                    arithmetic: Arithmetic::F32,
                    slice: None,
                };
                let out = linear_cross_entropy(rt, Some(tape), g.x(0), spec).unwrap();
                assert_eq!(out.sum.count, targets.iter().filter(|&&t| t >= 0).count());
                out.loss
            },
            |a| vec![cross_entropy(&a[0], &a[1], 5, &targets)],
        );
    }
}

#[test]
fn a_tied_head_gets_the_sum_of_both_uses() {
    let targets = targets();
    let ids: Arc<[u32]> = (0..40u32).map(|t| (t * 5) % 13).collect();
    check(
        "embedding, norm and head with one table",
        &[arg(Trained, &[13, 6], 1), arg(Trained, &[6], 2)],
        |rt, tape, g| {
            let x = embedding(rt, Some(tape), &ids, g.p(0)).unwrap();
            let n = rms_norm(rt, Some(tape), &x, g.p(1), 1e-5).unwrap();
            let spec = HeadSpec {
                weight: g.p(0),
                targets: Arc::clone(&targets),
                chunk_bytes: 1,
                arithmetic: Arithmetic::F32,
                slice: None,
            };
            linear_cross_entropy(rt, Some(tape), &n, spec).unwrap().loss
        },
        |a| {
            let x: Vec<f64> = ids.iter().flat_map(|&i| a[0][i as usize * 6..][..6].to_vec()).collect();
            vec![cross_entropy(&rms(&x, &a[1], f64::from(1e-5f32)), &a[0], 6, &targets)]
        },
    );
}

#[test]
fn a_fused_loss_refuses_another_upstream_factor() {
    let rt = Runtime::new(1);
    let mut tape = Tape::new();
    let x = tape.input(rt.from_f32(&[2, 3], &values(1, 6), Category::Activations).unwrap());
    let weight = Param::new(rt.from_f32(&[4, 3], &values(2, 12), Category::Weights).unwrap(), None);
    let spec =
        HeadSpec { weight, targets: Arc::from([1, 2]), chunk_bytes: 1, arithmetic: Arithmetic::F32, slice: None };
    let out = linear_cross_entropy(&rt, Some(&mut tape), &x, spec).unwrap();
    let half = rt.from_f32(&[1], &[0.5], Category::Activations).unwrap();
    let e = tape.backward(&rt, &out.loss, half).map(|_| ()).unwrap_err();
    assert!(matches!(e, AutogradError::Upstream { got, .. } if got == 0.5));
}

#[test]
fn frozen_parts_leave_nothing_on_the_tape() {
    let rt = Runtime::new(1);
    let mut tape = Tape::new();
    let x = rt.from_f32(&[2, 3], &values(1, 6), Category::Activations).unwrap();
    let w = Param::new(rt.from_f32(&[4, 3], &values(2, 12), Category::Weights).unwrap(), None);
    let y = linear(&rt, Some(&mut tape), &x, LinearSpec::exact(w, None, 1.0)).unwrap();
    assert!(tape.is_empty() && !tape.tracks(&y));
    let seed = rt.zeros(&[2, 4], Category::Activations).unwrap();
    assert!(matches!(tape.backward(&rt, &y, seed), Err(AutogradError::NotRecorded)));
}
