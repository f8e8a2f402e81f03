//! AdamW, clipping and schedules against other people's numbers.

use phalanx_config::Config;
use phalanx_nn::Parameter;
use phalanx_tensor::{Category, DType, Runtime};
use phalanx_testkit::values;
use phalanx_train::optimizer::{AdamW, AdamWOptions, clip_factor};
use phalanx_train::trainer::schedule;

use crate::common::{fixtures, value};

#[test]
fn five_steps_are_those_of_f64() {
    for decay_norms in [false, true] {
        let rt = Runtime::new(1);
        let o =
            AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, decay_norms_and_biases: decay_norms };
        let params =
            [Parameter::new("w.weight", &[7, 9]), Parameter::new("norm.weight", &[9]), Parameter::new("w.bias", &[7])];
        for (i, p) in params.iter().enumerate() {
            p.set(rt.from_f32(p.shape(), &values(i as u64, p.len()), Category::Weights).unwrap()).unwrap();
        }
        let mut optimizer = AdamW::new(&rt, &params, &|_| DType::F32, o).unwrap();
        let mut reference: Vec<[Vec<f64>; 3]> = params
            .iter()
            .map(|p| [value(p).iter().map(|&x| f64::from(x)).collect(), vec![0.0; p.len()], vec![0.0; p.len()]])
            .collect();
        let (lr, max_norm) = (3e-2f64, 1.5);
        for t in 1..=5 {
            let grads: Vec<Vec<f32>> =
                params.iter().enumerate().map(|(i, p)| values(100 * t + i as u64, p.len())).collect();
            for (p, g) in params.iter().zip(&grads) {
                p.grad()
                    .accumulate(&rt, p.shape(), |d, _| {
                        d.copy_from_slice(g);
                        Ok::<_, phalanx_autograd::AutogradError>(())
                    })
                    .unwrap();
            }
            let norm = optimizer.grad_norm(&rt).unwrap();
            let exact = grads.iter().flatten().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            assert!((norm - exact).abs() < 1e-6 * exact);
            let factor = clip_factor(norm, max_norm);
            assert!(factor < 1.0);
            optimizer.step(&rt, lr as f32, factor as f32).unwrap();
            for ((p, g), [w, m, v]) in params.iter().zip(&grads).zip(&mut reference) {
                let decay = if decay_norms || p.shape().len() > 1 { 0.1 } else { 0.0 };
                for i in 0..w.len() {
                    let g = f64::from(g[i]) * max_norm / (exact + 1e-6);
                    w[i] -= lr * decay * w[i];
                    m[i] = 0.9 * m[i] + 0.1 * g;
                    v[i] = 0.95 * v[i] + 0.05 * g * g;
                    let (mh, vh) = (m[i] / (1.0 - 0.9f64.powi(t as i32)), v[i] / (1.0 - 0.95f64.powi(t as i32)));
                    w[i] -= lr * mh / (vh.sqrt() + 1e-8);
                }
            }
        }
        for (p, [w, ..]) in params.iter().zip(&reference) {
            for (a, b) in value(p).iter().zip(w) {
                assert!((f64::from(*a) - b).abs() < 3e-6, "{}: {a} and {b}", p.name());
            }
        }
    }
}

#[test]
fn clipping_is_torchs() {
    assert_eq!(clip_factor(0.5, 1.0), 1.0);
    assert_eq!(clip_factor(4.0, 0.0), 1.0, "0 turns it off");
    assert!((clip_factor(4.0, 1.0) - 1.0 / 4.000001).abs() < 1e-15);
    assert!(clip_factor(f64::NAN, 1.0).is_nan() || clip_factor(f64::NAN, 1.0) <= 1.0);
}

/// `tests/fixtures/make_schedules.py` asked transformers.
#[test]
fn schedules_are_those_of_transformers() {
    let text = std::fs::read_to_string(fixtures().join("schedules.json")).unwrap();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    for case in all["cases"].as_array().unwrap() {
        let total = case["total"].as_u64().unwrap();
        let warmup = case["warmup_steps"].as_u64().unwrap();
        let warmup = if warmup == 0 { String::new() } else { format!("warmup_steps: {warmup}\n") };
        let yaml = format!(
            "learning_rate: 2.0\nlr_scheduler_type: {}\n{warmup}lr_scheduler_kwargs: {}\n",
            case["type"].as_str().unwrap(),
            case["kwargs"]
        );
        let s = schedule(&Config::parse(&yaml, "run.yaml", &[]).unwrap(), total);
        for (step, want) in case["rates"].as_array().unwrap().iter().enumerate() {
            let (got, want) = (s.at(step as u64), 2.0 * want.as_f64().unwrap());
            assert!((got - want).abs() < 1e-12, "{yaml} step {step}: {got}, transformers {want}");
        }
    }
}
