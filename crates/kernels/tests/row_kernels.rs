//! Norms, RoPE, GLU, cross-entropy, AdamW, embedding and sums: against references in f64, on every instruction set, with the
//! same bits for any team.

mod common;

use common::{bits, on_all_devices};
use phalanx_kernels::adamw::{self, AdamW};
use phalanx_kernels::cross_entropy::{
    IGNORE, LinearCrossEntropy, grad_in_place, linear_cross_entropy, log_probs, log_sum_exps,
};
use phalanx_kernels::glu::{self, Act};
use phalanx_kernels::{
    Device, KernelError, Mat, bf16, columns, elementwise, embedding, layer_norm, plain, reduce, rms_norm, rope,
};
use phalanx_testkit::{assert_close, rel_norm, values};
use proptest::prelude::*;

/// Shapes [T,H] that are smaller than a register, odd, and longer than one task.
const SHAPES: [(usize, usize); 7] = [(0, 5), (1, 1), (3, 7), (5, 64), (2, 577), (70, 100), (300, 576)];

#[test]
fn rms_norm_and_its_gradient() {
    for (t, h) in SHAPES {
        let (x, w, dy) = (values(1, t * h), values(2, h), values(3, t * h));
        let (want, _, want_rstd) = plain::norm(&x, &w, &[], 1e-5, false);
        let (want_dx, want_dw, _) = plain::norm_backward(&x, &w, 1e-5, &dy, false);
        on_all_devices(|dev| {
            let (mut y, mut rstd, mut dx) = (vec![0.0; t * h], vec![0.0; t], vec![0.0; t * h]);
            let mut dw = vec![0.0; h];
            rms_norm::forward(dev, &x, w[..].into(), 1e-5, &mut y, &mut rstd).unwrap();
            rms_norm::backward(dev, &x, w[..].into(), &rstd, &dy, &mut dx, Some(&mut dw)).unwrap();
            assert!(rel_norm(&y, &want) < 1e-6 && rel_norm(&rstd, &want_rstd) < 1e-6);
            // H = 1: the true gradient is almost zero, what is left of it is rounding.
            assert!(h == 1 || rel_norm(&dx, &want_dx) < 1e-6, "{} at {t} × {h}", rel_norm(&dx, &want_dx));
            assert!(rel_norm(&dw, &want_dw) < 1e-6);
            let mut frozen = vec![0.0; t * h];
            rms_norm::backward(dev, &x, w[..].into(), &rstd, &dy, &mut frozen, None).unwrap();
            assert_eq!(bits(&frozen), bits(&dx));

            let (mut sum, mut sum2) = (vec![0.0; t * h], vec![0.0; t * h]);
            let (mut y2, mut y3, mut r2, mut r3) = (y.clone(), y.clone(), rstd.clone(), rstd.clone());
            elementwise::add(dev, &x, &dy, &mut sum).unwrap();
            rms_norm::forward(dev, &sum, w[..].into(), 1e-5, &mut y2, &mut r2).unwrap();
            rms_norm::forward_add(dev, &x, &dy, w[..].into(), 1e-5, &mut sum2, &mut y3, &mut r3).unwrap();
            assert_eq!((bits(&sum), bits(&y2), bits(&r2)), (bits(&sum2), bits(&y3), bits(&r3)));
            (bits(&y), bits(&rstd), bits(&dx), bits(&dw))
        });
    }
}

#[test]
fn layer_norm_and_its_gradient() {
    for (t, h) in SHAPES {
        // An offset makes a one-pass variance fail.
        let x: Vec<f32> = values(1, t * h).iter().map(|v| v + 8.0).collect();
        let (w, b, dy) = (values(2, h), values(4, h), values(3, t * h));
        let (want, want_mean, _) = plain::norm(&x, &w, &b, 1e-5, true);
        let (want_dx, want_dw, want_db) = plain::norm_backward(&x, &w, 1e-5, &dy, true);
        on_all_devices(|dev| {
            let (mut y, mut mean, mut rstd) = (vec![0.0; t * h], vec![0.0; t], vec![0.0; t]);
            let (mut dx, mut dw, mut db) = (vec![0.0; t * h], vec![0.0; h], vec![0.0; h]);
            let (wm, bm) = (Mat::F32(&w), Some(Mat::F32(&b)));
            layer_norm::forward(dev, &x, wm, bm, 1e-5, &mut y, &mut mean, &mut rstd).unwrap();
            layer_norm::backward(dev, &x, wm, &mean, &rstd, &dy, &mut dx, Some(&mut dw), Some(&mut db)).unwrap();
            assert!(rel_norm(&mean, &want_mean) < 1e-6);
            // The mean is rounded to f32: half an ulp of 8 against values of size 1.
            for (got, want) in [(&y, &want), (&dw, &want_dw), (&db, &want_db)] {
                assert!(rel_norm(got, want) < 3e-6, "{} at {t} × {h}", rel_norm(got, want));
            }
            // H = 1: the true gradient is zero, what is left of it is rounding times 1/√ε.
            assert!(h == 1 || rel_norm(&dx, &want_dx) < 3e-6, "{} at {t} × {h}", rel_norm(&dx, &want_dx));
            (bits(&y), bits(&dx), bits(&dw), bits(&db))
        });
    }
}

#[test]
fn norm_weights_in_bf16_are_widened_exactly() {
    let (t, h) = (3, 37);
    let (x, dy) = (values(1, t * h), values(2, t * h));
    let narrow: Vec<bf16> = values(3, h).iter().map(|&v| bf16::from_f32(v)).collect();
    let wide: Vec<f32> = narrow.iter().map(|v| v.to_f32()).collect();
    on_all_devices(|dev| {
        let run = |w: Mat<'_>| {
            let (mut y, mut rstd, mut dx, mut dw) = (x.clone(), vec![0.0; t], x.clone(), vec![0.0; h]);
            rms_norm::forward(dev, &x, w, 1e-5, &mut y, &mut rstd).unwrap();
            rms_norm::backward(dev, &x, w, &rstd, &dy, &mut dx, Some(&mut dw)).unwrap();
            (bits(&y), bits(&dx), bits(&dw))
        };
        let (a, b) = (run(Mat::F32(&wide)), run(Mat::Bf16(&narrow)));
        assert_eq!(a, b);
        a
    });
}

#[test]
fn a_row_does_not_know_its_neighbours() {
    let (t, h, v) = (9, 83, 1500);
    let (x, w, logits) = (values(1, t * h), values(2, h), values(3, t * v));
    let targets: Vec<i32> = (0..t as i32).map(|i| i * 160).collect();
    on_all_devices(|dev| {
        let (mut y, mut rstd, mut logp, mut lse) = (x.clone(), vec![0.0; t], vec![0.0; t], vec![0.0; t]);
        rms_norm::forward(dev, &x, w[..].into(), 1e-6, &mut y, &mut rstd).unwrap();
        log_probs(dev, &logits, &targets, &mut logp, &mut lse).unwrap();
        for i in 0..t {
            let (mut y1, mut r1, mut p1, mut l1) = (vec![0.0; h], [0.0], [0.0], [0.0]);
            rms_norm::forward(dev, &x[i * h..(i + 1) * h], w[..].into(), 1e-6, &mut y1, &mut r1).unwrap();
            log_probs(dev, &logits[i * v..(i + 1) * v], &targets[i..=i], &mut p1, &mut l1).unwrap();
            assert_eq!(bits(&y1), bits(&y[i * h..(i + 1) * h]));
            assert_eq!((p1[0].to_bits(), l1[0].to_bits()), (logp[i].to_bits(), lse[i].to_bits()));
        }
    });
}

#[test]
fn rope_turns_and_turns_back() {
    for (t, heads, d, half) in [(1, 1, 4, 2), (3, 2, 10, 3), (40, 9, 64, 32), (5, 3, 96, 48), (2, 3, 80, 16)] {
        let x = values(1, t * heads * d);
        let angles: Vec<f32> = values(2, t * half).iter().map(|a| a * 9.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let want = plain::rope(&x, heads, d, &cos, &sin, false);
        let want_back = plain::rope(&x, heads, d, &cos, &sin, true);
        on_all_devices(|dev| {
            let (mut y, mut z) = (x.clone(), x.clone());
            rope::apply(dev, &mut y, heads, d, &cos, &sin, false).unwrap();
            rope::apply(dev, &mut z, heads, d, &cos, &sin, true).unwrap();
            assert!(rel_norm(&y, &want) < 2e-7 && rel_norm(&z, &want_back) < 2e-7);
            bits(&y)
        });
    }
    let dev = Device::new(1);
    rope::apply(&dev, &mut [], 2, 4, &[], &[], false).unwrap();
    assert!(matches!(
        rope::apply(&dev, &mut [0.0; 4], 1, 4, &[0.0; 3], &[0.0; 3], false),
        Err(KernelError::Shape { .. })
    ));
}

#[test]
fn rope_of_neighbours_is_rope_of_halves_in_another_order() {
    let dev = Device::new(2);
    for (t, heads, d, at, half) in [(1, 1, 4, 0, 2), (3, 2, 10, 4, 3), (40, 9, 24, 16, 4), (2, 3, 80, 0, 16)] {
        let x = values(1, t * heads * d);
        let angles: Vec<f32> = values(2, t * half).iter().map(|a| a * 9.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        // Value j of the turned part lies at `order(j)` in the other form.
        let order = |j: usize| if j.is_multiple_of(2) { j / 2 } else { half + j / 2 };
        let swap = |x: &[f32], to_halves: bool| {
            let mut y = x.to_vec();
            for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
                for j in 0..2 * half {
                    let (from, to) = if to_halves { (j, order(j)) } else { (order(j), j) };
                    y[at + to] = x[at + from];
                }
            }
            y
        };
        for inverse in [false, true] {
            let (mut halves, mut pairs) = (swap(&x, true), x.clone());
            let form = |interleaved| rope::Form { at, interleaved };
            rope::apply_form(&dev, &mut halves, heads, d, form(false), &cos, &sin, inverse).unwrap();
            rope::apply_form(&dev, &mut pairs, heads, d, form(true), &cos, &sin, inverse).unwrap();
            assert_close(&pairs, &swap(&halves, false), 1e-6, 1e-6, "rope");
        }
    }
    let form = rope::Form { at: 3, interleaved: true };
    let e = rope::apply_form(&dev, &mut [0.0; 4], 1, 4, form, &[0.0], &[0.0], false);
    assert!(matches!(e, Err(KernelError::Shape { .. })));
}

#[test]
fn columns_go_out_and_come_back() {
    for (rows, width, at, n, repeat) in [(0, 3, 0, 2, 1), (6, 5, 2, 3, 3), (700, 40, 16, 24, 4), (70_000, 2, 1, 1, 7)] {
        let (x, y) = (values(1, rows * width), values(2, rows / repeat * n));
        on_all_devices(|dev| {
            let mut out = vec![f32::NAN; rows * n];
            columns::take(dev, &x, width, at, &mut out, n).unwrap();
            let mut all = x.clone();
            let mut sums = vec![f32::NAN; rows / repeat * n];
            columns::put(dev, &y, n, repeat, &mut all, width, at).unwrap();
            columns::sum(dev, &x, width, at, repeat, &mut sums, n).unwrap();
            for r in 0..rows {
                for c in 0..width {
                    let inside = (at..at + n).contains(&c);
                    let want = if inside { y[r / repeat * n + c - at] } else { x[r * width + c] };
                    assert_eq!(all[r * width + c], want);
                    assert!(!inside || out[r * n + c - at] == x[r * width + c]);
                }
            }
            for (r, s) in sums.iter().enumerate() {
                let want = (0..repeat).fold(0f32, |s, i| s + x[(r / n * repeat + i) * width + at + r % n]);
                assert_eq!(*s, want);
            }
        });
    }
    let dev = Device::new(1);
    assert!(columns::take(&dev, &[0.0; 6], 3, 2, &mut [0.0; 4], 2).is_err());
    assert!(columns::put(&dev, &[0.0; 4], 2, 3, &mut [0.0; 6], 3, 0).is_err());
}

#[test]
fn glu_and_its_gradient() {
    for n in [0, 1, 15, 16, 17, 1000, 70_001] {
        // From the far tails through zero.
        let gate: Vec<f32> = values(1, n).iter().enumerate().map(|(i, v)| v * [0.01, 1.0, 6.0, 40.0][i % 4]).collect();
        let (up, dout) = (values(2, n), values(3, n));
        for act in [Act::Silu, Act::Gelu, Act::GeluTanh] {
            let (want, want_dg, want_du) = plain::glu(act, &gate, &up, &dout);
            on_all_devices(|dev| {
                let (mut out, mut dg, mut du) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
                glu::forward(dev, act, &gate, &up, &mut out).unwrap();
                glu::backward(dev, act, &gate, &up, &dout, &mut dg, &mut du).unwrap();
                for (what, got, want) in [("out", &out, &want), ("dgate", &dg, &want_dg), ("dup", &du, &want_du)] {
                    assert_close(got, want, 2e-7, 2e-6, &format!("{act:?} {what}"));
                }
                (bits(&out), bits(&dg), bits(&du))
            });
        }
    }
}

#[test]
fn glu_survives_what_overflows() {
    let gate = [f32::MAX, -f32::MAX, 200.0, -200.0, f32::NAN, 0.0];
    for act in [Act::Silu, Act::Gelu] {
        on_all_devices(|dev| {
            let (mut out, mut dg, mut du) = ([0.0; 6], [0.0; 6], [0.0; 6]);
            glu::forward(dev, act, &gate, &[1.0; 6], &mut out).unwrap();
            glu::backward(dev, act, &gate, &[1.0; 6], &[1.0; 6], &mut dg, &mut du).unwrap();
            assert_eq!((out[0], out[2], out[3].abs(), out[5]), (f32::MAX, 200.0, 0.0, 0.0), "{act:?}");
            assert!(out[1].abs() == 0.0 && out[4].is_nan(), "{act:?} {out:?}");
            assert_eq!((dg[0], dg[2], dg[3].abs(), dg[5]), (1.0, 1.0, 0.0, 0.5), "{act:?}");
            assert!(dg[1].abs() == 0.0 && dg[4].is_nan(), "{act:?} {dg:?}");
        });
    }
}

#[test]
fn log_probabilities_and_gradient() {
    for (c, v) in [(1, 1), (3, 5), (4, 1000), (17, 2_049), (2, 40_000)] {
        let logits: Vec<f32> = values(1, c * v).iter().map(|x| x * 12.0).collect();
        let targets: Vec<i32> = (0..c).map(|i| if i % 3 == 2 { IGNORE } else { (i * 7919 % v) as i32 }).collect();
        let want_lse = plain::log_sum_exps(&logits, v);
        on_all_devices(|dev| {
            let (mut logp, mut lse, mut lse2, mut d) = (vec![9.0; c], vec![0.0; c], vec![0.0; c], logits.clone());
            log_probs(dev, &logits, &targets, &mut logp, &mut lse).unwrap();
            log_sum_exps(dev, &logits, &mut lse2).unwrap();
            grad_in_place(dev, &mut d, &targets, &lse, 0.5).unwrap();
            assert_close(&lse, &want_lse, 1e-6, 2e-7, "lse");
            assert_eq!(bits(&lse), bits(&lse2));
            for i in 0..c {
                let row = i * v..(i + 1) * v;
                if targets[i] == IGNORE {
                    assert!(logp[i] == 0.0 && d[row].iter().all(|&g| g == 0.0));
                    continue;
                }
                assert_eq!(logp[i].to_bits(), (logits[i * v + targets[i] as usize] - lse[i]).to_bits());
                let total: f64 = d[row.clone()].iter().map(|&g| f64::from(g)).sum();
                assert!(total.abs() < 2e-6, "the gradient of a row sums to {total}");
                let want: Vec<f32> = logits[row.clone()]
                    .iter()
                    .enumerate()
                    .map(|(k, &x)| {
                        let p = (f64::from(x) - f64::from(want_lse[i])).exp();
                        ((p - f64::from(u8::from(k == targets[i] as usize))) * 0.5) as f32
                    })
                    .collect();
                assert_close(&d[row], &want, 1e-6, 2e-6, "gradient of the logits");
            }
            (bits(&logp), bits(&lse), bits(&d))
        });
    }
}

#[test]
fn log_sum_exp_of_infinities_and_nan() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    on_all_devices(|dev| {
        let mut lse = [0.0; 4];
        log_sum_exps(dev, &[-inf, -inf, -inf, 1.0, -inf, nan, 2.0, nan], &mut lse).unwrap();
        assert!(lse[0] == -inf && lse[1] == 1.0 && lse[2].is_nan() && lse[3].is_nan(), "{lse:?}");
    });
}

fn head_case(t: usize, h: usize, v: usize, chunk: usize, bias: bool, targets: &[i32]) {
    let (hidden, weight, b) = (values(1, t * h), values(2, v * h), values(3, v));
    let a = LinearCrossEntropy {
        arithmetic: Default::default(),
        hidden: &hidden,
        weight: weight[..].into(),
        bias: bias.then_some(&b[..]),
        targets,
        hidden_size: h,
        chunk,
        grad_scale: 0.25,
    };
    let want = plain::linear_cross_entropy(&a);
    on_all_devices(|dev| {
        let mut space = vec![f32::NAN; chunk.min(t) * v];
        let (mut dx, mut dw, mut db, mut logp) =
            (vec![f32::NAN; t * h], vec![0.0; v * h], vec![0.0; v], vec![f32::NAN; t]);
        let loss =
            linear_cross_entropy(dev, &a, Some(&mut dx), Some(&mut dw), Some(&mut db), &mut logp, &mut space).unwrap();
        assert_eq!(loss.count, want.count);
        assert!((loss.sum - want.sum).abs() <= 1e-6 * want.sum, "{} {}", loss.sum, want.sum);
        for (what, got, want) in [
            ("logp", &logp, &want.logp),
            ("d_hidden", &dx, &want.d_hidden),
            ("d_weight", &dw, &want.d_weight),
            ("d_bias", &db, &want.d_bias),
        ] {
            assert!(rel_norm(got, want) < 2e-6, "{what}: {}", rel_norm(got, want));
        }
        // A frozen head, and no gradient at all, change nothing in what is left.
        let (mut dx2, mut logp2) = (dx.clone(), logp.clone());
        let l2 = linear_cross_entropy(dev, &a, Some(&mut dx2), None, None, &mut logp2, &mut space).unwrap();
        let l3 = linear_cross_entropy(dev, &a, None, None, None, &mut logp2, &mut space).unwrap();
        assert_eq!((loss, loss), (l2, l3));
        assert_eq!((bits(&dx), bits(&logp)), (bits(&dx2), bits(&logp2)));
        (loss.sum.to_bits(), bits(&logp), bits(&dx), bits(&dw), bits(&db))
    });
}

#[test]
fn the_fused_head_in_chunks() {
    let targets: Vec<i32> = (0..23).map(|i| if i % 5 == 4 { IGNORE } else { i * 3 % 70 }).collect();
    head_case(23, 12, 70, 8, false, &targets); // the chunk does not divide T
    head_case(23, 12, 70, 100, true, &targets); // one chunk, longer than T
    let mut gap = targets.clone();
    gap[8..16].fill(IGNORE); // a whole chunk without a counted token
    head_case(23, 12, 70, 8, true, &gap);
    head_case(7, 5, 3, 2, false, &[IGNORE; 7]); // nothing counted at all
    head_case(0, 5, 3, 2, false, &[]);
}

#[test]
fn the_fused_head_refuses_bad_targets_and_space() {
    let dev = Device::new(1);
    let run = |targets: &[i32], chunk, space: usize| {
        let a = LinearCrossEntropy {
            arithmetic: Default::default(),
            hidden: &[1.0; 4],
            weight: Mat::F32(&[1.0; 6]),
            bias: None,
            targets,
            hidden_size: 2,
            chunk,
            grad_scale: 1.0,
        };
        linear_cross_entropy(&dev, &a, None, None, None, &mut [0.0; 2], &mut vec![0.0; space])
    };
    assert!(run(&[0, 2], 2, 6).is_ok());
    for (targets, chunk, space) in [([0, 3], 2, 6), ([-1, 0], 2, 6), ([0, 1], 0, 6), ([0, 1], 2, 5)] {
        assert!(matches!(run(&targets, chunk, space), Err(KernelError::Shape { .. })));
    }
}

#[test]
fn adamw_follows_the_reference_for_five_steps() {
    for n in [1, 31, 40_000] {
        let start = values(1, n);
        let mut seen = vec![];
        on_all_devices(|dev| {
            let (mut p, mut m, mut v) = (start.clone(), vec![0.0; n], vec![0.0; n]);
            let mut out = vec![bf16::ZERO; n];
            let mut p64: Vec<f64> = start.iter().map(|&x| f64::from(x)).collect();
            let (mut m64, mut v64) = (vec![0f64; n], vec![0f64; n]);
            for step in 1..=5 {
                let o =
                    AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step, grad_scale: 0.3 };
                let grad = values(10 + step, n);
                adamw::step(dev, &o, &mut p, &grad, &mut m, &mut v, Some(&mut out)).unwrap();
                plain::adamw(&o, &mut p64, &grad, &mut m64, &mut v64);
                for (got, want) in [(&p, &p64), (&m, &m64), (&v, &v64)] {
                    let want: Vec<f32> = want.iter().map(|&x| x as f32).collect();
                    assert!(rel_norm(got, &want) < 1e-6);
                }
                assert!(out.iter().zip(&p).all(|(o, &p)| *o == bf16::from_f32(p)));
            }
            seen = bits(&p);
            (bits(&p), bits(&m), bits(&v))
        });
        assert_eq!(seen.len(), n);
    }
}

#[test]
fn embedding_gathers_and_adds_back() {
    for (vocab, h, t) in [(1, 1, 1), (7, 5, 40), (50, 130, 33), (50, 300, 700), (3, 4, 0)] {
        let table = values(1, vocab * h);
        let narrow: Vec<bf16> = table.iter().map(|&v| bf16::from_f32(v)).collect();
        let dout = values(2, t * h);
        let ids: Vec<u32> = (0..t).map(|i| (i * i * 7 % vocab) as u32).collect(); // many repeats
        on_all_devices(|dev| {
            let (mut out, mut low, mut d) = (vec![0.0; t * h], vec![0.0; t * h], values(3, vocab * h));
            let mut want = d.clone();
            embedding::gather(dev, table[..].into(), h, &ids, &mut out).unwrap();
            embedding::gather(dev, narrow[..].into(), h, &ids, &mut low).unwrap();
            embedding::scatter_add(dev, &mut d, h, &ids, &dout).unwrap();
            for (i, &id) in ids.iter().enumerate() {
                for j in 0..h {
                    assert_eq!(out[i * h + j], table[id as usize * h + j]);
                    assert_eq!(low[i * h + j], narrow[id as usize * h + j].to_f32());
                    want[id as usize * h + j] += dout[i * h + j];
                }
            }
            assert_eq!(bits(&d), bits(&want), "tokens are added in order");
            bits(&d)
        });
    }
    let dev = Device::new(1);
    let e = embedding::gather(&dev, Mat::F32(&[0.0; 6]), 2, &[0, 3], &mut [0.0; 4]).unwrap_err();
    assert!(e.to_string().contains("token id 3 at position 1"), "{e}");
}

#[test]
fn sums_and_element_wise() {
    for (t, n) in [(0, 3), (1, 1), (200, 300), (65, 17), (130, 1000)] {
        let (a, b) = (values(1, t * n), values(2, t * n));
        on_all_devices(|dev| {
            let mut out = vec![0.0; t * n];
            elementwise::add(dev, &a, &b, &mut out).unwrap();
            assert!(out.iter().zip(&a).zip(&b).all(|((o, a), b)| *o == a + b));
            let mut acc = a.clone();
            elementwise::add_assign(dev, &mut acc, &b, 1.0).unwrap();
            assert_eq!(bits(&acc), bits(&out));
            elementwise::scale(dev, &mut acc, 0.5);
            assert!(acc.iter().zip(&out).all(|(a, o)| *a == o * 0.5));

            let mut bias = values(5, n);
            let mut want: Vec<f64> = bias.iter().map(|&v| f64::from(v)).collect();
            elementwise::sum_rows(dev, &a, &mut bias).unwrap();
            a.chunks_exact(n).for_each(|r| want.iter_mut().zip(r).for_each(|(w, &v)| *w += f64::from(v)));
            let want: Vec<f32> = want.iter().map(|&v| v as f32).collect();
            assert!(rel_norm(&bias, &want) < 1e-6);

            let squares = reduce::sum_squares(dev, &a);
            let exact: f64 = a.iter().map(|&v| f64::from(v).powi(2)).sum();
            assert!((squares - exact).abs() <= 1e-6 * exact, "{squares} {exact}");

            let mut narrow = vec![bf16::ZERO; t * n];
            elementwise::to_bf16(dev, &a, &mut narrow).unwrap();
            elementwise::from_bf16(dev, &narrow, &mut out).unwrap();
            assert!(out.iter().zip(&a).all(|(o, &a)| *o == bf16::from_f32(a).to_f32()));
            (bits(&acc), bits(&bias), squares.to_bits())
        });
    }
    // Longer than one batch of partial sums.
    let long = values(9, reduce::PIECE * 300 + 11);
    let exact: f64 = long.iter().map(|&v| f64::from(v).powi(2)).sum();
    on_all_devices(|dev| {
        let got = reduce::sum_squares(dev, &long);
        assert!((got - exact).abs() <= 1e-7 * exact);
        got.to_bits()
    });
    assert!(reduce::sum_squares(&Device::new(1), &[1.0, f32::NAN]).is_nan());
}

#[test]
fn rounding_to_bf16_at_the_edges() {
    let x: Vec<f32> =
        [0u32, 0x8000_0000, 1, 0x7F80_0000, 0xFF80_0000, 0x7F7F_FFFF, 0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF]
            .into_iter()
            .chain((0..40).map(|i| 0x3F80_0000 + i * 0x2000))
            .map(f32::from_bits)
            .collect();
    on_all_devices(|dev| {
        let mut out = vec![bf16::ZERO; x.len()];
        elementwise::to_bf16(dev, &x, &mut out).unwrap();
        for (o, &x) in out.iter().zip(&x) {
            let want = bf16::from_f32(x);
            assert!(o.to_bits() == want.to_bits() || (x.is_nan() && o.is_nan()), "{x:?}: {o:?}, want {want:?}");
        }
    });
}

#[test]
fn dropout_drops_by_index_and_keeps_the_mean() {
    let n = 70_000;
    let x = vec![1.0f32; n];
    let draw = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32;
    on_all_devices(|dev| {
        let mut out = vec![0.0; n];
        elementwise::dropout(dev, &x, 0.25, &draw, &mut out).unwrap();
        let mean = out.iter().sum::<f32>() / n as f32;
        assert!((mean - 1.0).abs() < 0.02 && out.iter().all(|&o| o == 0.0 || o == 1.0 / 0.75));
        elementwise::dropout(dev, &x, 0.0, &draw, &mut out).unwrap();
        assert_eq!(out, x);
        assert!(elementwise::dropout(dev, &x, 1.0, &draw, &mut out).is_err());
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_of_norm_and_head_equals_the_reference(
        t in 0usize..200,
        h in 2usize..150,
        v in 1usize..40,
        chunk in 1usize..70,
        threads in 1usize..4,
        seed in 0u64..1000,
    ) {
        let (x, w, dy) = (values(seed, t * h), values(seed + 1, h), values(seed + 2, t * h));
        let (want, ..) = plain::norm(&x, &w, &[], 1e-2, false);
        let (want_dx, want_dw, _) = plain::norm_backward(&x, &w, 1e-2, &dy, false);
        let dev = Device::new(threads);
        let (mut y, mut dx, mut dw, mut rstd) = (x.clone(), x.clone(), vec![0.0; h], vec![0.0; t]);
        rms_norm::forward(&dev, &x, w[..].into(), 1e-2, &mut y, &mut rstd).unwrap();
        rms_norm::backward(&dev, &x, w[..].into(), &rstd, &dy, &mut dx, Some(&mut dw)).unwrap();
        prop_assert!(rel_norm(&y, &want) < 1e-6 && rel_norm(&dx, &want_dx) < 2e-6 && rel_norm(&dw, &want_dw) < 2e-6);
        let targets: Vec<i32> = (0..t).map(|i| if i % 4 == 1 { IGNORE } else { ((i * 31) % v) as i32 }).collect();
        let few = t.min(60);
        head_case(few, h.min(20), v, chunk, seed % 2 == 0, &targets[..few]);
    }
}
