//! Training with `fp8_delayed`: histories grow by one entry a step whatever happens within it, and belong to the checkpoint.

use std::sync::Arc;

use phalanx_kernels::lowp::Operand;
use phalanx_models::Model;
use phalanx_nn::{DelayedScales, Env};
use phalanx_parallel::{Plan, resolve, sites};
use phalanx_tensor::{DType, Runtime};
use phalanx_train::checkpoint::{SCALES_FILE, read_scales, write_scales};
use phalanx_train::optimizer::{AdamW, AdamWOptions, clip_factor};
use phalanx_train::step::{LossCount, evaluate_batch, forward_backward};

use crate::common::{Bench, Scratch, batch, env, metrics, model, run, value};

const STEPS: usize = 3;

/// A model with its scales, and what it lost in each step.
struct Trained {
    model: Model,
    env: Env,
    losses: Vec<f64>,
}

/// Three steps of two micro-batches each; after every micro-batch something is evaluated if `evaluates`.
fn trained(plan: &str, evaluates: bool) -> Trained {
    let rt = Runtime::new(1);
    let model = model(&rt, 2, false);
    let plan: Plan = serde_json::from_str(plan).unwrap();
    let resolved = Arc::new(resolve(&sites(&model), &plan).unwrap());
    let scales = Arc::new(DelayedScales::new(&model, &resolved));
    let params = model.parameters();
    params.iter().for_each(|p| {
        let frozen = resolved.modules.iter().any(|(path, m)| !m.trainable && p.name() == format!("{path}.weight"));
        p.set_trainable(!frozen);
    });
    let options = AdamWOptions { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0, decay_norms_and_biases: false };
    let mut optimizer = AdamW::new(&rt, &params, &|_| DType::F32, options).unwrap();
    let with = |b: &phalanx_data::Batch| {
        let mut env = env(&rt, b);
        (env.plan, env.scales) = (resolved.clone(), scales.clone());
        env
    };
    let mut losses = vec![];
    for step in 0..STEPS as u32 {
        let mut window = LossCount::default();
        for micro in 0..2 {
            let b = batch(&[(12, 12), (9, 4)], 2 * step + micro);
            window.add(forward_backward(&model, &with(&b), &b).unwrap());
            if evaluates {
                let other = batch(&[(20, 20)], 100 + step);
                evaluate_batch(&model, &with(&other), &other).unwrap();
            }
        }
        let n = window.count as f64;
        let norm = optimizer.grad_norm(&rt).unwrap() / n;
        optimizer.step(&rt, 1e-2, (clip_factor(norm, 1.0) / n) as f32).unwrap();
        scales.commit();
        losses.push(window.mean());
    }
    let env = with(&batch(&[(12, 12)], 0));
    Trained { model, env, losses }
}

/// Magnitudes of every layer and operand.
fn amaxes(scales: &DelayedScales) -> Vec<(String, [Vec<f32>; 3])> {
    let of = |layer: &phalanx_autograd::LayerScales| Operand::ALL.map(|o| layer.history(o).amaxes().collect());
    scales.by_path.iter().map(|(path, layer)| (path.clone(), of(layer))).collect()
}

#[test]
fn histories_grow_once_a_step_with_accumulation_recompute_and_evaluation() {
    let plain = trained(r#"{"arithmetic": "fp8_delayed"}"#, false);
    let histories = amaxes(&plain.env.scales);
    assert_eq!(histories.len(), 2 * 7, "the linear layers of two blocks, and not the head");
    assert!(histories.iter().flat_map(|(_, h)| h).all(|h| h.len() == STEPS && h.iter().all(|&a| a > 0.0)));
    let recompute = r#"{"arithmetic": "fp8_delayed", "recompute": "model.layers.{*}"}"#;
    for (plan, evaluates) in [(recompute, false), (recompute, true), (r#"{"arithmetic": "fp8_delayed"}"#, true)] {
        let other = trained(plan, evaluates);
        assert_eq!(amaxes(&other.env.scales), histories, "{plan}, evaluates {evaluates}");
        assert_eq!(other.losses, plain.losses);
        for (a, b) in plain.model.parameters().iter().zip(&other.model.parameters()) {
            assert_eq!(value(a), value(b), "{}", a.name());
        }
    }
    let exact = trained("{}", false);
    assert!(exact.env.scales.by_path.is_empty());
    let tensorwise = trained(r#"{"arithmetic": "fp8_tensorwise"}"#, false);
    assert!(tensorwise.env.scales.by_path.is_empty());
    assert_eq!(tensorwise.losses[0], plain.losses[0], "a first step goes by its own magnitudes");
    assert_ne!(tensorwise.losses[1..], plain.losses[1..]);
}

/// A frozen block below everything that is trained has no backward, so that recompute runs its forward only once.
#[test]
fn a_frozen_block_under_recompute_is_seen_too() {
    let plan = r#"{"arithmetic": "fp8_delayed", "recompute": "model.layers.{*}",
                   "freeze": ["model.layers.0", "model.embed_tokens"]}"#;
    let histories = amaxes(&trained(plan, false).env.scales);
    let lens = |h: &[Vec<f32>; 3]| [h[0].len(), h[1].len(), h[2].len()];
    for (path, h) in &histories {
        let gradients = if path.starts_with("model.layers.0.") { 0 } else { STEPS };
        assert_eq!(lens(h), [STEPS, STEPS, gradients], "{path}");
    }
}

#[test]
fn evaluation_goes_by_the_scales() {
    let Trained { model, env, .. } = trained(r#"{"arithmetic": "fp8_delayed"}"#, false);
    let b = batch(&[(12, 12)], 0);
    let with = evaluate_batch(&model, &env, &b).unwrap();
    let mut anew = env.clone();
    anew.scales = Arc::default();
    let without = evaluate_batch(&model, &anew, &b).unwrap();
    assert_ne!(with, without);
    let before = amaxes(&env.scales);
    env.scales.commit();
    assert_eq!(amaxes(&env.scales), before);
}

#[test]
fn scales_come_back_from_a_file_as_they_were() {
    let Trained { model, env, .. } = trained(r#"{"arithmetic": "fp8_delayed"}"#, false);
    let scratch = Scratch::new("scales");
    let dir = scratch.path("");
    let fresh = || DelayedScales::new(&model, &env.plan);
    let back = fresh();
    assert_eq!(read_scales(&dir, &back).unwrap(), 14, "no file: every layer begins anew");
    write_scales(&dir, &env.scales).unwrap();
    assert_eq!(read_scales(&dir, &back).unwrap(), 0);
    for (path, layer) in &env.scales.by_path {
        for operand in Operand::ALL {
            assert_eq!(back.by_path[path].history(operand), layer.history(operand), "{path} {}", operand.name());
        }
    }
    let layer = &env.scales.by_path["model.layers.1.mlp.up_proj"];
    layer.restore(Operand::Weight, &[1.0, f32::NAN], Some(1.0));
    write_scales(&dir, &env.scales).unwrap();
    let e = read_scales(&dir, &fresh()).unwrap_err().to_string();
    assert!(e.contains("up_proj/weight/amaxes holds NaN"), "{e}");
}

#[test]
fn a_checkpoint_without_scales_is_gone_on_from_with_a_note() {
    let bench = Bench::new("delayed-note", 20);
    let keys = "plan: {arithmetic: fp8_delayed}\n";
    run(bench.config("whole", keys), None).unwrap();
    run(bench.config("parts", keys), Some(3)).unwrap();
    std::fs::remove_file(bench.out("parts").join("checkpoint-3").join(SCALES_FILE)).unwrap();
    let (_, watch) = run(bench.config("parts", keys), None).unwrap();
    assert!(watch.messages.iter().any(|m| m.contains("no delayed scales for 14 of 14 layers")), "{:?}", watch.messages);
    let (whole, parts) = (metrics(&bench.out("whole")), metrics(&bench.out("parts")));
    assert_eq!(whole[..3], parts[..3]);
    assert_ne!(whole[3..], parts[3..], "the history matters");
    assert!(!bench.out("parts").join(SCALES_FILE).exists(), "no part of a model");
}
