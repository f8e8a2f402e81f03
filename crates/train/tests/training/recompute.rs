//! Recompute changes memory, not one bit of a gradient.

use std::sync::Arc;

use phalanx_nn::{AdapterSet, Arithmetic};
use phalanx_parallel::{Plan, resolve, sites};
use phalanx_tensor::Runtime;
use phalanx_train::adapter::{LoraOptions, create};
use phalanx_train::step::forward_backward;

use crate::common::{VOCAB, batch, env, grads, model};

/// Gradients and the peak of the pool in activations, under a plan.
fn under(plan: &str) -> (Vec<(String, Vec<f32>)>, usize) {
    let rt = Runtime::new(1);
    let m = model(&rt, 4, false);
    let plan: Plan = serde_json::from_str(plan).unwrap();
    let all = sites(&m);
    let resolved = resolve(&all, &plan).unwrap();
    for site in &all {
        for p in m.parameters().iter().filter(|p| site.parameters.contains(&p.name().to_owned())) {
            p.set_trainable(resolved.modules[&site.path].trainable);
        }
    }
    let b = batch(&[(50, 50), (70, 70), (40, 9), (64, 64)], 2);
    let mut params = m.parameters();
    let adapters = if resolved.modules.values().any(|s| s.adapter) {
        let shape = |n: &str| params.iter().find(|p| p.name() == n).map(|p| p.shape().to_vec());
        let o = LoraOptions { rank: 4, alpha: 8.0, dropout: 0.25, rslora: false };
        let set = create(&rt, &all, &shape, &resolved, o, 3).unwrap();
        for (i, p) in set.parameters().iter().enumerate() {
            let values: Vec<f32> = phalanx_testkit::values(i as u64, p.len()).iter().map(|v| v * 0.1).collect();
            p.set(rt.from_f32(p.shape(), &values, phalanx_tensor::Category::Weights).unwrap()).unwrap();
        }
        set
    } else {
        AdapterSet::default()
    };
    params.extend(adapters.parameters());
    let mut e = env(&rt, &b);
    e.plan = Arc::new(resolved);
    e.adapters = Arc::new(adapters);
    (e.training, e.seed, e.moment) = (true, 9, 4);
    e.logits_chunk_bytes = 16 * 4 * VOCAB;
    forward_backward(&m, &e, &b).unwrap();
    let peak = rt.pool().stats().peak["activations"];
    (grads(&params), peak)
}

#[track_caller]
fn assert_same(plain: &str, recomputed: &str) -> (usize, usize) {
    let ((a, before), (b, after)) = (under(plain), under(recomputed));
    assert!(!a.is_empty());
    assert_eq!(a.len(), b.len());
    for ((name, x), (_, y)) in a.iter().zip(&b) {
        assert!(x.iter().zip(y).all(|(x, y)| x.to_bits() == y.to_bits()), "{recomputed}: {name}");
    }
    (before, after)
}

#[test]
fn all_blocks() {
    let (before, after) = assert_same("{}", r#"{"recompute": "model.layers.{*}"}"#);
    assert!(after * 2 < before, "{after} of {before} bytes");
}

#[test]
fn some_blocks() {
    let (before, after) = assert_same("{}", r#"{"recompute": "model.layers.{0,2}"}"#);
    assert!(after < before, "{after} of {before} bytes");
}

#[test]
fn only_the_mlp_or_only_attention() {
    let (before, after) = assert_same("{}", r#"{"recompute": "model.layers.{*}.mlp"}"#);
    assert!(after < before, "{after} of {before} bytes");
    assert_same("{}", r#"{"recompute": ["model.layers.{0-1}.self_attn", "model.layers.{2-3}.input_layernorm"]}"#);
}

#[test]
fn with_adapters_and_dropout() {
    let lora = r#""adapters": "**.*_proj""#;
    assert_same(&format!("{{{lora}}}"), &format!(r#"{{{lora}, "recompute": "model.layers.{{*}}"}}"#));
    assert_same(&format!("{{{lora}}}"), &format!(r#"{{{lora}, "recompute": "model.layers.{{*}}.mlp"}}"#));
    // One adapter only, deep inside; the blocks below need no gradient.
    let one = r#""adapters": "model.layers.2.self_attn.v_proj""#;
    let (plain, again) = (format!("{{{one}}}"), format!(r#"{{{one}, "recompute": "model.layers.{{*}}"}}"#));
    assert_same(&plain, &again);
    assert_eq!(under(&again).0.len(), 2);
}

#[test]
fn with_frozen_layers_below_and_above() {
    for freeze in [r#""freeze": ["model.embed_tokens", "model.layers.{0-1}"]"#, r#""train": "model.layers.1.mlp""#] {
        assert_same(&format!("{{{freeze}}}"), &format!(r#"{{{freeze}, "recompute": "model.layers.{{*}}"}}"#));
    }
}

/// Less exact products: recomputed to the same bits, near the exact gradients by what they may lose, and exact where there is no faster way.
#[test]
fn with_less_exact_products() {
    let exact = under("{}").0;
    let isa = phalanx_kernels::Isa::detect();
    let unit = |arithmetic| phalanx_kernels::gemm::tuning::unit_name(isa, arithmetic);
    let has_unit = |arithmetic| isa == phalanx_kernels::Isa::Amx || unit(arithmetic) != unit(Arithmetic::F32);
    for (arithmetic, most, less_exact) in [
        ("bf16x2", 1e-3, has_unit(Arithmetic::Bf16x2)),
        ("bf16", 0.1, has_unit(Arithmetic::Bf16)),
        // Recipes, the same everywhere.
        ("int8_block", 0.2, true),
        ("int8_block_stochastic", 0.2, true),
        ("fp8_tensorwise", 0.5, true),
        ("fp8_blockwise", 0.5, true),
        ("mxfp8", 0.5, true),
        ("fp16_block", 1e-2, true),
    ] {
        let plain = format!(r#"{{"arithmetic": "{arithmetic}"}}"#);
        let again = format!(r#"{{"arithmetic": "{arithmetic}", "recompute": "model.layers.{{*}}"}}"#);
        assert_same(&plain, &again);
        let mut differs = false;
        for ((name, x), (_, want)) in under(&plain).0.iter().zip(&exact) {
            let err = phalanx_testkit::rel_norm(x, want);
            assert!(err < most, "{arithmetic}: {name}: {err:.1e}");
            differs |= err > 0.0;
        }
        assert_eq!(differs, less_exact, "{arithmetic}");
    }
}
