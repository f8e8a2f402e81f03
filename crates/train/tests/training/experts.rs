//! Mixtures of experts: what must not depend on how a step is cut or run again, and what happens where loads are as uneven as can be.

use std::sync::Arc;

use phalanx_data::Batch as TokenBatch;
use phalanx_formats::{Dtype, SafetensorsWriter, TensorSpec, WeightFolder};
use phalanx_kernels::moe::Drop;
use phalanx_models::{Model, StoredDType, load_weights};
use phalanx_nn::{BalanceLayers, BalanceLoss, BalanceScope, Env, ExpertCapacity, RouterStep};
use phalanx_parallel::{Plan, resolve, sites};
use phalanx_tensor::{Category, DType, Runtime};
use phalanx_testkit::rel_norm;
use phalanx_train::experts::count_window;
use phalanx_train::export::export;
use phalanx_train::job::{Job, Use};
use phalanx_train::optimizer::{AdamW, AdamWOptions};
use phalanx_train::step::{LossCount, evaluate_batch, forward_backward, layout};
use phalanx_train::window::{MicroBatch, gradients};

use crate::common::{
    Bench, Scratch, assert_same_weights, batch, grads, model_of, moe_shape, run, value, weights, write_model_of,
};

const FAMILIES: [&str; 2] = ["qwen3_moe", "deepseek_v3"];
const DOCS: [(usize, usize); 6] = [(9, 4), (31, 31), (5, 2), (12, 12), (22, 1), (17, 16)];

fn balance(scope: BalanceScope, layers: BalanceLayers) -> Option<BalanceLoss> {
    Some(BalanceLoss { coefficient: 0.2, scope, layers })
}

fn part(docs: std::ops::Range<usize>) -> TokenBatch {
    let all = batch(&DOCS, 1);
    let docs: Vec<(u64, Vec<u32>, Vec<bool>)> = docs
        .map(|d| {
            let (len, trained) = DOCS[d];
            (d as u64, all.ids[all.docs[d].clone()].to_vec(), (0..len).map(|t| t >= len - trained).collect())
        })
        .collect();
    TokenBatch::from_documents(docs.iter().map(|(i, ids, on)| (*i, ids.as_slice(), on.as_slice())))
}

fn env_of(rt: &Runtime, b: &TokenBatch, loss: Option<BalanceLoss>) -> Env {
    let mut env = Env::new(rt.clone(), layout(b));
    env.training = true;
    env.routing.balance = loss;
    env
}

/// Loss and gradients of one window, cut as given.
fn window(family: &str, loss: Option<BalanceLoss>, sizes: &[usize]) -> (LossCount, Vec<(String, Vec<f32>)>) {
    let rt = Runtime::new(1);
    let m = model_of(&rt, moe_shape(family, 3));
    let starts = sizes.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n)));
    let parts: Vec<TokenBatch> = starts.zip(sizes).map(|(at, n)| part(at..at + n)).collect();
    let batches: Vec<MicroBatch> = parts.into_iter().map(|tokens| MicroBatch { tokens, moment: 0 }).collect();
    let mut env = env_of(&rt, &batches[0].tokens, loss);
    env.routing.window = count_window(&m, &env, &batches).unwrap();
    let (sum, _) = gradients(&m, &env, &batches, None).unwrap();
    (sum, grads(&m.parameters()))
}

#[test]
fn a_balancing_loss_of_global_or_sequence_scope_does_not_see_how_a_window_is_cut() {
    for family in FAMILIES {
        for layers in [BalanceLayers::Together, BalanceLayers::Each] {
            for scope in [BalanceScope::Global, BalanceScope::Sequence] {
                let (one, want) = window(family, balance(scope, layers), &[6]);
                for sizes in [&[1usize; 6][..], &[2, 3, 1]] {
                    let (sum, got) = window(family, balance(scope, layers), sizes);
                    assert_eq!(sum.count, one.count);
                    assert!((sum.sum - one.sum).abs() <= 1e-6 * one.sum, "{family} {scope:?} {sizes:?}");
                    for ((name, a), (_, b)) in got.iter().zip(&want) {
                        assert!(rel_norm(a, b) <= 2e-6, "{family} {scope:?} {sizes:?} {name}: {}", rel_norm(a, b));
                    }
                }
            }
        }
        // The gradient of the loss reaches the routers, and its value the sum.
        let micro = balance(BalanceScope::MicroBatch, BalanceLayers::Together);
        let (with, without) = (window(family, micro, &[6]), window(family, None, &[6]));
        assert!(with.0.sum > without.0.sum);
        let gate =
            |g: &[(String, Vec<f32>)]| g.iter().find(|(n, _)| n.ends_with("1.mlp.gate.weight")).unwrap().1.clone();
        assert!(rel_norm(&gate(&with.1), &gate(&without.1)) > 1e-3);
        let cut = window(family, micro, &[2, 3, 1]);
        assert!((cut.0.sum - with.0.sum).abs() > 1e-6 * with.0.sum, "this scope does see it");
    }
}

/// The gradient of the whole loss by a router's weight, against differences of the loss itself.
#[test]
fn a_balancing_loss_has_the_gradient_it_claims() {
    for family in FAMILIES {
        for scope in [BalanceScope::MicroBatch, BalanceScope::Sequence] {
            let rt = Runtime::new(1);
            let m = model_of(&rt, moe_shape(family, 2));
            let b = part(0..6);
            let mut loss = balance(scope, BalanceLayers::Each).unwrap();
            loss.coefficient = 50.0;
            let gate = m.parameters().into_iter().find(|p| p.name().ends_with("1.mlp.gate.weight")).unwrap();
            let at = |change: Option<(usize, f32)>| {
                let before = value(&gate);
                let mut moved = before.clone();
                if let Some((i, d)) = change {
                    moved[i] += d;
                }
                gate.set(rt.from_f32(gate.shape(), &moved, Category::Weights).unwrap()).unwrap();
                let env = env_of(&rt, &b, Some(loss));
                let sum = forward_backward(&m, &env, &b).unwrap().sum;
                gate.set(rt.from_f32(gate.shape(), &before, Category::Weights).unwrap()).unwrap();
                (sum, env.routers.take())
            };
            at(None);
            let got = gate.grad().get().unwrap().f32().unwrap().to_vec();
            let mut compared = 0;
            for i in (0..got.len()).step_by(7) {
                let ((up, a), (down, b)) = (at(Some((i, 1e-3))), at(Some((i, -1e-3))));
                // Where a choice flips the loss jumps.
                if a.layers == b.layers {
                    let want = (up - down) / 2e-3;
                    let tolerance = 0.02 * (want.abs() + 2.0);
                    assert!((want - f64::from(got[i])).abs() < tolerance, "{family} {scope:?} {i}: {} {want}", got[i]);
                    compared += 1;
                }
            }
            assert!(compared > 10, "{compared}");
        }
    }
}

#[test]
fn recompute_counts_no_token_twice_and_changes_no_bit() {
    for family in FAMILIES {
        let run = |plan: &str| -> (Vec<(String, Vec<f32>)>, f64, RouterStep) {
            let rt = Runtime::new(2);
            let m = model_of(&rt, moe_shape(family, 3));
            let b = part(0..6);
            let mut env = env_of(&rt, &b, balance(BalanceScope::MicroBatch, BalanceLayers::Together));
            let plan: Plan = serde_json::from_str(plan).unwrap();
            env.plan = Arc::new(resolve(&sites(&m), &plan).unwrap());
            let sum = forward_backward(&m, &env, &b).unwrap().sum;
            (grads(&m.parameters()), sum, env.routers.take())
        };
        let want = run("{}");
        let pairs: u64 = 2 * DOCS.iter().map(|d| d.0 as u64).sum::<u64>();
        assert_eq!(want.2.layers.len(), 2);
        assert!(want.2.layers.values().all(|l| l.counts.iter().sum::<u64>() == pairs && l.dropped == 0));
        for plan in [r#"{"recompute": "model.layers.{*}"}"#, r#"{"recompute": "**.mlp"}"#] {
            let got = run(plan);
            assert_eq!((got.1.to_bits(), &got.2), (want.1.to_bits(), &want.2), "{family} {plan}");
            for ((name, a), (_, b)) in got.0.iter().zip(&want.0) {
                assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{family} {plan} {name}");
            }
        }
    }
}

/// Routers of zeros: all scores are equal, so every token goes to experts 0 and 1, and the others get nothing.
fn idle_experts(rt: &Runtime, family: &str) -> Model {
    let m = model_of(rt, moe_shape(family, 3));
    for p in m.parameters().iter().filter(|p| p.name().ends_with("gate.weight")) {
        p.set(rt.zeros(p.shape(), Category::Weights).unwrap()).unwrap();
    }
    m
}

#[test]
fn experts_without_tokens_have_gradients_of_zeros_and_a_defined_step() {
    for family in FAMILIES {
        // A whole batch, and the least that can be learnt from: two tokens.
        for b in [part(0..6), batch(&[(2, 1)], 3)] {
            let rt = Runtime::new(2);
            let m = idle_experts(&rt, family);
            let params: Vec<_> = m.parameters().into_iter().filter(|p| p.trainable()).collect();
            let options =
                AdamWOptions { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1, decay_norms_and_biases: false };
            let mut optimizer = AdamW::new(&rt, &params, &|_| DType::F32, options).unwrap();
            let env = env_of(&rt, &b, balance(BalanceScope::MicroBatch, BalanceLayers::Together));
            let sum = forward_backward(&m, &env, &b).unwrap();
            assert!(sum.sum.is_finite() && sum.count > 0);
            let tokens = b.ids.len() as u64;
            let load = &env.routers.take().layers["model.layers.1.mlp.gate"];
            assert_eq!(load.counts, [tokens, tokens, 0, 0, 0]);
            assert!((load.max_over_mean() - 2.5).abs() < 1e-12);
            for p in &params {
                let g = p.grad().get().unwrap_or_else(|| panic!("{family}: {} has no gradient", p.name()));
                let g = g.f32().unwrap();
                assert!(g.iter().all(|x| x.is_finite()), "{}", p.name());
                let idle = [2, 3, 4].iter().any(|e| p.name().contains(&format!(".mlp.experts.{e}.")));
                assert_eq!(g.iter().all(|x| *x == 0.0), idle, "{family}: {}", p.name());
            }
            let before: Vec<Vec<f32>> = params.iter().map(value).collect();
            optimizer.step(&rt, 1e-2, 1.0 / sum.count as f32).unwrap();
            for (p, before) in params.iter().zip(&before) {
                let after = value(p);
                assert!(after.iter().all(|x| x.is_finite()), "{}", p.name());
                if p.name().contains(".mlp.experts.3.") {
                    // Nothing but decay.
                    let decayed: Vec<f32> = before.iter().map(|w| w - 1e-2 * 0.1 * w).collect();
                    assert!(rel_norm(&after, &decayed) < 1e-6, "{}", p.name());
                }
            }
        }
    }
}

#[test]
fn a_capacity_drops_in_training_only_and_the_residual_goes_on() {
    for family in FAMILIES {
        for drop in [Drop::Position, Drop::Probability] {
            let rt = Runtime::new(2);
            let m = idle_experts(&rt, family);
            let b = part(0..6);
            let mut env = env_of(&rt, &b, None);
            let free = evaluate_batch(&m, &env.for_batch(layout(&b), 0), &b).unwrap();
            env.routing.capacity = Some(ExpertCapacity { factor: 0.5, drop });
            let sum = forward_backward(&m, &env, &b).unwrap();
            assert!(sum.sum.is_finite() && sum.sum != free.sum);
            // Half of a fifth of the pairs for each of the two experts that are asked.
            let pairs = 2 * b.ids.len();
            let kept = 2 * (pairs as f64 * 0.5 / 5.0).ceil() as usize;
            let load = &env.routers.take().layers["model.layers.2.mlp.gate"];
            assert_eq!((load.dropped, load.counts[0]), ((pairs - kept) as u64, b.ids.len() as u64));
            assert!(grads(&m.parameters()).iter().all(|(_, g)| g.iter().all(|x| x.is_finite())));
            env.training = false;
            let evaluated = evaluate_batch(&m, &env, &b).unwrap();
            assert_eq!(evaluated, free, "{family}: evaluation drops nothing");
        }
    }
}

/// All experts for every token: what is chosen is no choice.
#[test]
fn as_many_experts_a_token_as_there_are() {
    for family in FAMILIES {
        let mut shape = moe_shape(family, 2);
        shape["num_experts_per_tok"] = 5.into();
        let rt = Runtime::new(2);
        let m = model_of(&rt, shape);
        let b = part(0..6);
        let env = env_of(&rt, &b, None);
        assert!(forward_backward(&m, &env, &b).unwrap().sum.is_finite());
        let load = &env.routers.take().layers["model.layers.1.mlp.gate"];
        assert_eq!(load.counts, [b.ids.len() as u64; 5]);
    }
}

fn bench(name: &str, family: &str) -> Bench {
    let bench = Bench::new(name, 12);
    write_model_of(&bench.scratch.path("model"), moe_shape(family, 3), StoredDType::F32);
    bench
}

#[test]
fn biases_move_once_a_step_whatever_runs_twice() {
    let bench = bench("biases", "deepseek_v3");
    let keys =
        "moe_bias_update_speed: 0.01\nmoe_aux_loss_coef: 0.05\nmoe_aux_loss_scope: global\nnum_train_epochs: 2\n";
    let go = |name: &str, more: &str| run(bench.config(name, &format!("{keys}{more}")), None).unwrap().0;
    let steps = go("plain", "").state.step as f32;
    go("recompute", "plan: {recompute: \"model.layers.{*}\"}\n");
    assert_same_weights(&bench.out("plain"), &bench.out("recompute"));
    let all = weights(&bench.out("plain"));
    let biases: Vec<_> = all.iter().filter(|(n, _)| n.ends_with("e_score_correction_bias")).collect();
    assert_eq!(biases.len(), 2);
    for (name, bias) in biases {
        assert!(bias.iter().any(|b| *b != 0.0), "{name} has not moved");
        for b in bias {
            let moves = b / 0.01;
            assert!((moves - moves.round()).abs() < 1e-3 && moves.abs() <= steps, "{name}: {b} after {steps} steps");
        }
    }
    let text = std::fs::read_to_string(bench.out("plain").join("metrics.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert!(first["expert_load_max"].as_f64().unwrap() >= first["expert_load_mean"].as_f64().unwrap());
    assert!(first["expert_load/layers.2"].as_f64().unwrap() >= 1.0 && first["aux_loss"].as_f64().unwrap() > 0.0);
    // Stopped and gone on, to the bit.
    let (_, _) = run(bench.config("stopped", keys), Some(2)).unwrap();
    let resumed = format!("{keys}resume_from_checkpoint: true\n");
    run(bench.config("stopped", &resumed), None).unwrap();
    assert_same_weights(&bench.out("plain"), &bench.out("stopped"));
}

#[test]
fn keys_about_experts_that_cannot_be_are_refused_or_noted() {
    let moe = bench("keys", "qwen3_moe");
    let e = run(moe.config("a", "moe_bias_update_speed: 0.001\n"), None).unwrap_err().to_string();
    assert!(e.contains("moe_bias_update_speed") && e.contains("qwen3_moe") && e.contains("moe_aux_loss_coef"), "{e}");
    let dense = Bench::new("dense-keys", 4);
    let (_, watch) = run(dense.config("b", "moe_aux_loss_coef: 0.01\nmax_steps: 1\n"), None).unwrap();
    assert!(watch.messages.iter().any(|m| m.contains("moe_aux_loss_coef has no effect")), "{:?}", watch.messages);
}

#[test]
fn adapters_go_beside_attention_and_shared_experts() {
    for family in FAMILIES {
        let bench = bench("lora", family);
        let keys = "finetuning_type: lora\nlora_rank: 2\nlora_target: all\nmax_steps: 2\n";
        run(bench.config("out", keys), None).unwrap();
        let names: Vec<String> = weights(&bench.out("out")).into_iter().map(|(n, _)| n).collect();
        assert!(names.iter().any(|n| n.contains("layers.1.self_attn.o_proj")));
        assert!(names.iter().all(|n| !n.contains(".experts.")), "{names:?}");
        assert_eq!(names.iter().any(|n| n.contains("shared_experts")), family == "deepseek_v3");
        let e = Job::prepare(bench.config("no", "finetuning_type: lora\nlora_target: gate_proj\n"), Use::Train);
        let e = e.map(drop).unwrap_err();
        let e = format!("{e} {e:?}");
        assert!(e.contains("adapters beside experts are not supported"), "{e}");
    }
}

#[test]
fn an_exported_model_has_every_expert_by_name_and_exact_biases() {
    let scratch = Scratch::new("export-moe");
    let dir = scratch.path("model");
    write_model_of(&dir, moe_shape("deepseek_v3", 2), StoredDType::F32);
    let yaml = format!("model_name_or_path: {}\nthreads: 1\n", dir.display());
    let config = phalanx_config::Config::parse(&yaml, "run.yaml", &[]).unwrap();
    let mut job = Job::prepare(config, Use::Infer).unwrap();
    job.load(None).unwrap();
    export(&mut job, &scratch.path("out"), StoredDType::Bf16, 1 << 30).unwrap();
    let folder = WeightFolder::open(scratch.path("out")).unwrap();
    assert_eq!(folder.get("model.layers.1.mlp.experts.4.down_proj.weight").unwrap().dtype, Dtype::BF16);
    assert_eq!(folder.get("model.layers.1.mlp.gate.e_score_correction_bias").unwrap().dtype, Dtype::F32);
    assert_eq!(folder.len(), WeightFolder::open(&dir).unwrap().len());
}

/// Files with all experts of a block in one tensor hold the same model.
#[test]
fn stacked_experts_are_read_as_the_same_model() {
    let golden = format!("{}/../../testkit/fixtures/golden/qwen3-moe", env!("CARGO_MANIFEST_DIR"));
    let scratch = Scratch::new("stacked");
    let dir = scratch.path("model");
    std::fs::create_dir_all(&dir).unwrap();
    let folder = WeightFolder::open(&golden).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = folder
        .tensors()
        .filter(|t| !t.name.contains(".experts."))
        .map(|t| (t.name.to_owned(), t.shape.to_vec(), t.to_f32().unwrap()))
        .collect();
    for layer in 0..2 {
        let stem = format!("model.layers.{layer}.mlp.experts");
        let one = |e: usize, p: &str| folder.get(&format!("{stem}.{e}.{p}.weight")).unwrap().to_f32().unwrap();
        let (h, i) = (64, 32);
        let gate_up = (0..8).flat_map(|e| [one(e, "gate_proj"), one(e, "up_proj")].concat()).collect();
        tensors.push((format!("{stem}.gate_up_proj"), vec![8, 2 * i, h], gate_up));
        tensors.push((format!("{stem}.down_proj"), vec![8, h, i], (0..8).flat_map(|e| one(e, "down_proj")).collect()));
    }
    let write = |tensors: &[(String, Vec<usize>, Vec<f32>)]| {
        let specs = tensors.iter().map(|(n, s, _)| TensorSpec::new(n, Dtype::F32, s.as_slice())).collect();
        let writer = SafetensorsWriter::new(specs).unwrap();
        let of = |name: &str| &tensors.iter().find(|(n, ..)| n == name).unwrap().2;
        writer.write_file(dir.join("model.safetensors"), |spec, sink| sink.write_f32(of(&spec.name))).unwrap();
    };
    let rt = Runtime::new(1);
    let config = phalanx_models::ModelConfig::from_folder(&golden).unwrap();
    let (one, other) = (Model::new(&config).unwrap(), Model::new(&config).unwrap());
    load_weights(&rt, &one, &golden, &|_| DType::F32).unwrap();
    write(&tensors);
    load_weights(&rt, &other, &dir, &|_| DType::F32).unwrap();
    for (a, b) in one.parameters().iter().zip(other.parameters()) {
        assert_eq!(value(a), value(&b), "{}", a.name());
    }
    // One expert too few, and a value that is none.
    let stacked = tensors.iter().position(|(n, ..)| n.ends_with("1.mlp.experts.down_proj")).unwrap();
    let mut few = tensors.clone();
    few[stacked].1[0] = 7;
    few[stacked].2.truncate(7 * 64 * 32);
    write(&few);
    let e = load_weights(&rt, &other, &dir, &|_| DType::F32).unwrap_err().to_string();
    assert!(e.contains("model.layers.1.mlp.experts.down_proj") && e.contains('7'), "{e}");
    tensors[stacked].2[3 * 64 * 32 + 5] = f32::NAN;
    write(&tensors);
    let e = load_weights(&rt, &other, &dir, &|_| DType::F32).unwrap_err().to_string();
    assert!(e.contains("experts.3.down_proj.weight") && e.contains("element 5"), "{e}");
}
