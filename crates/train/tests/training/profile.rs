//! `profile=true`: what is recorded, and that nothing else changes.

use phalanx_kernels::profile::{Kind, Recording};
use phalanx_nn::Parameter;
use phalanx_tensor::Runtime;
use phalanx_train::step::forward_backward;
use serde_json::Value;

use crate::common::{Bench, assert_same_weights, batch, env, metrics, model, run};

fn flops(r: &Recording, of: &str) -> f64 {
    r.kernels.iter().filter(|k| k.name.starts_with(of)).map(|k| k.flops).sum()
}

/// The counted arithmetic is the formula's: 6 for each weight of a matrix and token, and for attention two products forward and five
/// backward of what each query sees, where the formula takes half the square and backward for twice forward.
#[test]
fn counted_arithmetic_is_the_models() {
    let rt = Runtime::new(2);
    let m = model(&rt, 3, true);
    let (docs, seq) = (2, 48);
    let b = batch(&[(seq, seq); 2], 1);
    let profiler = rt.device().profiler();
    profiler.start(0);
    {
        let _step = profiler.region("step");
        forward_backward(&m, &env(&rt, &b), &b).unwrap();
    }
    let r = profiler.stop().unwrap();
    let (config, tokens) = (m.config(), (docs * seq) as f64);
    let norms: usize = m.parameters().iter().filter(|p| p.shape().len() == 1).map(Parameter::len).sum();
    let matrices = config.num_params() - norms;
    assert_eq!(flops(&r, "gemm"), 6.0 * matrices as f64 * tokens);
    let formula = config.train_flops_per_token(seq) - 6.0 * config.num_params() as f64;
    let seen = (seq + 1) as f64 / seq as f64;
    let ratio = flops(&r, "attention") / (formula * tokens);
    assert!((ratio - 7.0 / 6.0 * seen).abs() < 1e-12, "{ratio}");
}

#[test]
fn modules_are_named_in_forward_and_backward_also_where_they_are_recomputed() {
    for recompute in [false, true] {
        let rt = Runtime::new(1);
        let m = model(&rt, 2, true);
        let b = batch(&[(20, 20)], 1);
        let mut e = env(&rt, &b);
        if recompute {
            let plan = serde_json::from_str(r#"{"recompute": "model.layers.{*}"}"#).unwrap();
            e.plan = phalanx_parallel::resolve(&phalanx_parallel::sites(&m), &plan).unwrap().into();
        }
        rt.device().profiler().start(0);
        forward_backward(&m, &e, &b).unwrap();
        let r = rt.device().profiler().stop().unwrap();
        let backward = r.events.iter().position(|e| e.name == "backward" && e.kind == Kind::Phase).unwrap();
        let has =
            |name: &str, after: bool| r.events.iter().skip(if after { backward } else { 0 }).any(|e| e.name == name);
        assert!(has("model.layers.1.mlp.gate_proj", false) && has("forward", false));
        assert!(has("model.layers.1.mlp.gate_proj: linear backward", true), "{recompute}");
        assert_eq!(has("model.layers.1: recompute backward", true), recompute);
        assert_eq!(has("model.layers.1.mlp.gate_proj", true), recompute);
        // Nothing is counted outside a region.
        assert!(r.kernels.is_empty());
    }
}

#[test]
fn a_profiled_run_has_the_same_bits_and_leaves_a_table_and_a_trace() {
    let bench = Bench::new("profile", 60);
    let keys = "max_steps: 6\neval_strategy: steps\neval_steps: 4\nsave_steps: 4\nval_size: 6\n";
    let (plain, _) = run(bench.config("plain", keys), None).unwrap();
    let (profiled, watch) = run(bench.config("profiled", &format!("{keys}profile: true\n")), None).unwrap();
    assert_eq!(metrics(&bench.out("plain")), metrics(&bench.out("profiled")));
    assert_same_weights(&bench.out("plain"), &bench.out("profiled"));
    assert!(plain.profile.is_none() && !bench.out("plain").join("profile.json").exists());
    assert!(watch.messages.iter().any(|m| m == "profiling steps 3 to 5"), "{:?}", watch.messages);

    let r = &profiled.profile.as_ref().unwrap().recording;
    assert_eq!((r.regions.len(), r.regions[0].calls), (1, 3));
    let mut phases: Vec<_> = r.phases.iter().map(|p| (p.name.as_ref(), p.calls)).collect();
    phases.sort_unstable();
    // Three micro-batches a step.
    assert_eq!(phases, [("backward", 9), ("data", 9), ("forward", 9), ("optimizer", 3)]);
    for name in ["evaluate", "save"] {
        assert_eq!(r.events.iter().filter(|e| e.name == name).count(), 1, "{name}");
    }
    let s = profiled.profile.as_ref().unwrap().shares();
    assert!(s.gemm > 0.0 && s.attention > 0.0 && s.other > 0.0 && s.outside > 0.0, "{s:?}");

    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(bench.out("profiled").join(name)).unwrap()).unwrap()
    };
    assert!(read("profile.json")["kernels"].as_array().unwrap().len() > 10);
    assert!(read("trace-rank0.json")["traceEvents"].as_array().unwrap().len() > 100);
}
