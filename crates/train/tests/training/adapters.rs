//! LoRA: what trains, what is saved, what ships.

use std::sync::Arc;

use phalanx_models::{StoredDType, logits};
use phalanx_nn::{Arithmetic, Batch, Cx, Env};
use phalanx_tensor::{Category, DType};
use phalanx_testkit::rel_norm;
use phalanx_train::adapter::{self, StandsOn};
use phalanx_train::export::export;
use phalanx_train::job::{Job, Use};
use phalanx_train::optimizer::{AdamW, AdamWOptions};
use phalanx_train::resume::Start;

use crate::common::{Bench, bits, metrics, prepared, run, value, weights, write_model};

const LORA: &str = "finetuning_type: lora\nlora_rank: 4\nlora_alpha: 8\n";

fn job(bench: &Bench, keys: &str) -> Job {
    let mut job = Job::prepare(bench.config("out", keys), Use::Train).unwrap();
    job.load(None).unwrap();
    job
}

fn job_logits(job: &Job, adapted: bool) -> Vec<f32> {
    let ids: Arc<[u32]> = Arc::from([5u32, 99, 301, 17, 42, 8]);
    let mut env = Env::new(job.rt.clone(), Batch::causal(&[6]));
    if adapted {
        env.adapters = job.adapters.clone();
    }
    let hidden = job.model.hidden(&mut Cx::eval(&env), &ids).unwrap();
    job.rt.to_vec(&logits(&job.rt, &job.model, &hidden, Arithmetic::F32).unwrap()).unwrap()
}

#[test]
fn a_new_adapter_changes_nothing_and_alone_is_trained() {
    let bench = Bench::new("new-adapter", 4);
    let job = job(&bench, LORA);
    assert_eq!(job_logits(&job, true), job_logits(&job, false));
    let trained = job.trained();
    assert_eq!(trained.len(), 2 * 7 * 2, "A and B of seven layers in two blocks");
    assert!(trained.iter().all(|p| p.name().starts_with("base_model.model.model.layers.")));
    assert!(trained.iter().any(|p| p.name() == "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"));
    assert!(job.model.parameters().iter().all(|p| !p.trainable()));
    // A as PEFT draws it: uniform in ±1/√in.
    let a = value(trained.iter().find(|p| p.name().ends_with("0.mlp.up_proj.lora_A.weight")).unwrap());
    let bound = 1.0 / 32f32.sqrt();
    assert!(a.iter().all(|x| x.abs() <= bound) && a.iter().any(|x| x.abs() > 0.8 * bound));
}

#[test]
fn training_moves_only_adapters_and_what_is_named() {
    for bf16 in [false, true] {
        let bench = Bench::new("only-adapters", 8);
        let keys = format!("{LORA}lora_dropout: 0.1\nadditional_target: lm_head\nbf16: {bf16}\n");
        let (mut job, data) = prepared(bench.config("out", &keys)).unwrap();
        job.load(None).unwrap();
        let before: Vec<_> = job.model.parameters().iter().map(|p| (p.clone(), value(p))).collect();
        let frozen = if bf16 { DType::Bf16 } else { DType::F32 };
        let q = job.model.parameters().into_iter().find(|p| p.name().ends_with("0.self_attn.q_proj.weight")).unwrap();
        assert_eq!(q.value().unwrap().dtype(), frozen);
        let flag = std::sync::atomic::AtomicBool::new(false);
        let mut watch = crate::common::Watch::default();
        phalanx_train::trainer::train(&mut job, data.train, None, &Start::default(), &flag, &mut watch).unwrap();
        for (old, values) in before {
            // Loading again inside `train` gave the parameters new values; names tell them apart.
            let now = job.model.parameters().into_iter().find(|p| p.name() == old.name()).unwrap();
            assert_eq!(bits(&value(&now)) == bits(&values), old.name() != "lm_head.weight", "{}", old.name());
            assert!(now.grad().get().is_none());
        }
        let saved: Vec<String> = weights(&bench.out("out")).into_iter().map(|(n, _)| n).collect();
        assert_eq!(saved.len(), 29, "{saved:?}");
        assert!(saved.contains(&"base_model.model.lm_head.weight".to_owned()));
        let text = std::fs::read_to_string(bench.out("out").join("adapter_config.json")).unwrap();
        let c: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(c["modules_to_save"], serde_json::json!(["lm_head"]));
        let losses = metrics(&bench.out("out"));
        assert!(losses.last().unwrap()[1] < losses[0][1], "{losses:?}");
    }
}

/// PEFT copies what it saves and leaves the other use of a tied weight as it was: both names stand in the file.
#[test]
fn a_tied_weight_is_saved_under_both_names() {
    let bench = Bench::new("tied", 6);
    std::fs::remove_dir_all(bench.out("model")).unwrap();
    write_model(&bench.out("model"), 2, true, StoredDType::F32);
    let keys = format!("{LORA}additional_target: embed_tokens,lm_head\n");
    run(bench.config("out", &keys), None).unwrap();
    let dir = bench.out("out");
    let value = |name: &str| weights(&dir).into_iter().find(|(n, _)| n == name).unwrap().1;
    let embedding = value("base_model.model.model.embed_tokens.weight");
    assert_eq!(embedding, value("base_model.model.lm_head.weight"));
    let c: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(c["modules_to_save"], serde_json::json!(["embed_tokens", "lm_head"]));
    // And back: equal entries are one, anything else is not what PEFT would compute with.
    let job = infer(&bench, &dir.display().to_string());
    assert_eq!(crate::common::value(job.model.head()), embedding);
    let shape = |n: &str| job.shape_of(n);
    let (embedding, head) = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight");
    for (drop, change, word) in [
        (Some(embedding), None, "not model.embed_tokens.weight"),
        (Some(head), None, "not lm_head.weight"),
        (None, Some(head), "differ"),
    ] {
        let tensors: Vec<_> = weights(&dir)
            .into_iter()
            .filter(|(name, _)| Some(name.as_str()) != drop)
            .map(|(name, mut values)| {
                values[0] += f32::from(u8::from(Some(name.as_str()) == change));
                (name, values)
            })
            .collect();
        let to = bench.out(&format!("tied-{}", word.len()));
        std::fs::create_dir(&to).unwrap();
        std::fs::copy(dir.join("adapter_config.json"), to.join("adapter_config.json")).unwrap();
        rewrite(&dir, &to, &tensors);
        let e = adapter::load(&job.rt, &to, &shape).map(|_| ()).unwrap_err().to_string();
        assert!(e.contains(word) && e.contains("tie_word_embeddings"), "{e}");
    }
}

/// Writes tensors of the adapter in `from` into `to`, with other values.
fn rewrite(from: &std::path::Path, to: &std::path::Path, tensors: &[(String, Vec<f32>)]) {
    use phalanx_formats::{Dtype, SafetensorsWriter, TensorSpec, WeightFolder};
    let old = WeightFolder::open_file(from.join("adapter_model.safetensors")).unwrap();
    let spec = |name: &str| TensorSpec::new(name, Dtype::F32, old.get(name).unwrap().shape);
    let values = |name: &str| &tensors.iter().find(|(n, _)| n == name).unwrap().1;
    SafetensorsWriter::new(tensors.iter().map(|(n, _)| spec(n)).collect())
        .unwrap()
        .write_file(to.join("adapter_model.safetensors"), |spec, sink| sink.write_f32(values(&spec.name)))
        .unwrap();
}

#[test]
fn a_folder_comes_back_as_it_was() {
    let bench = Bench::new("round-trip", 6);
    let keys = format!("{LORA}use_rslora: true\nlora_target: q_proj,down_proj\n");
    run(bench.config("out", &keys), None).unwrap();
    let dir = bench.out("out");
    let more = format!("{keys}adapter_name_or_path: {}\noutput_dir: {}\n", dir.display(), bench.out("next").display());
    let job = job(&bench, &more);
    assert_eq!(job.lora.unwrap().scale(4), 8.0 / 2.0, "alpha / √rank");
    let again = bench.out("again");
    std::fs::create_dir(&again).unwrap();
    adapter::save(
        &job.rt,
        &again,
        &job.adapters,
        &job.lora.unwrap(),
        &[],
        &StandsOn { model: "base", merged: &[] },
        &job.model,
    )
    .unwrap();
    crate::common::assert_same_weights(&dir, &again);
    let read = |d: &std::path::Path| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(d.join("adapter_config.json")).unwrap()).unwrap()
    };
    assert_eq!(read(&again)["target_modules"], serde_json::json!(["down_proj", "q_proj"]));
    assert_eq!(read(&again)["use_rslora"], serde_json::json!(true));
    // Other targets than the adapter's are refused, not ignored.
    let other = more.replace("q_proj,down_proj", "q_proj");
    let mut job = Job::prepare(bench.config("other", &other), Use::Train).unwrap();
    let e = job.load(None).unwrap_err().to_string();
    assert!(e.contains("lora_target") && e.contains("create_new_adapter"), "{e}");
}

fn infer(bench: &Bench, adapters: &str) -> Job {
    let keys = format!("finetuning_type: lora\nadapter_name_or_path: {adapters}\n");
    let mut job = Job::prepare(bench.config("unused", &keys), Use::Infer).unwrap();
    job.load(None).unwrap();
    job
}

#[test]
fn the_merged_model_is_the_adapted_one() {
    let bench = Bench::new("merge", 6);
    run(bench.config("first", &format!("{LORA}additional_target: lm_head\nlearning_rate: 3e-2\n")), None).unwrap();
    let first = bench.out("first").display().to_string();
    let adapted = job_logits(&infer(&bench, &first), true);
    assert!(rel_norm(&adapted, &job_logits(&infer(&bench, &first), false)) > 1e-3, "the adapter does something");
    let mut job = infer(&bench, &first);
    let report = export(&mut job, &bench.out("merged"), StoredDType::F32, 1 << 30).unwrap();
    assert_eq!(report.merged_layers, 14);
    assert!(report.logits_rel < 1e-5 && report.changed_share > 0.9, "{report:?}");
    let keys = format!("model_name_or_path: {}\nfinetuning_type: full\n", bench.out("merged").display());
    let mut merged = Job::prepare(bench.config("unused", &keys), Use::Infer).unwrap();
    merged.load(None).unwrap();
    assert!(rel_norm(&job_logits(&merged, false), &adapted) < 1e-5);
    let e =
        export(&mut infer(&bench, &first), &bench.out("merged"), StoredDType::F32, 1 << 30).unwrap_err().to_string();
    assert!(e.contains("holds files"), "{e}");

    // A second adapter on top of the merged first: both count when they are named in order.
    let keys = format!(
        "{LORA}create_new_adapter: true\nadapter_name_or_path: {first}\nlora_target: q_proj\nlearning_rate: 3e-2\n"
    );
    run(bench.config("second", &keys), None).unwrap();
    let both = format!("{first},{}", bench.out("second").display());
    let mut job = infer(&bench, &both);
    let adapted = job_logits(&job, true);
    assert!(rel_norm(&adapted, &job_logits(&infer(&bench, &first), true)) > 1e-4);
    export(&mut job, &bench.out("merged2"), StoredDType::F32, 1 << 30).unwrap();
    let keys = format!("model_name_or_path: {}\nfinetuning_type: full\n", bench.out("merged2").display());
    let mut merged = Job::prepare(bench.config("unused", &keys), Use::Infer).unwrap();
    merged.load(None).unwrap();
    assert!(rel_norm(&job_logits(&merged, false), &adapted) < 1e-5);
}

#[test]
fn an_adapter_that_rounding_would_wipe_out_is_not_shipped() {
    let bench = Bench::new("wiped", 6);
    std::fs::remove_dir_all(bench.out("model")).unwrap();
    write_model(&bench.out("model"), 2, false, StoredDType::Bf16);
    run(bench.config("tiny", &format!("{LORA}learning_rate: 1e-10\n")), None).unwrap();
    let tiny = bench.out("tiny").display().to_string();
    let e = export(&mut infer(&bench, &tiny), &bench.out("low"), StoredDType::Bf16, 1 << 30).unwrap_err().to_string();
    assert!(e.contains("rounding step") && e.contains("float32"), "{e}");
    assert!(!bench.out("low").exists());
    export(&mut infer(&bench, &tiny), &bench.out("exact"), StoredDType::F32, 1 << 30).unwrap();
    // Merged into bf16 weights under a second adapter it would vanish without a word.
    let keys = format!("{LORA}create_new_adapter: true\nadapter_name_or_path: {tiny}\nbf16: true\n");
    let mut job = Job::prepare(bench.config("on-top", &keys), Use::Train).unwrap();
    let e = job.load(None).unwrap_err().to_string();
    assert!(e.contains("rounding") && e.contains("bf16"), "{e}");
}

#[test]
fn what_an_adapter_trained_in_full_is_not_dropped_when_training_goes_on() {
    let bench = Bench::new("dropped", 6);
    run(bench.config("first", &format!("{LORA}additional_target: lm_head\n")), None).unwrap();
    let first = bench.out("first").display().to_string();
    let mut job =
        Job::prepare(bench.config("x", &format!("{LORA}adapter_name_or_path: {first}\n")), Use::Train).unwrap();
    let e = job.load(None).unwrap_err().to_string();
    assert!(e.contains("lm_head.weight") && e.contains("additional_target"), "{e}");
    let keys = format!("{LORA}adapter_name_or_path: {first}\nadditional_target: lm_head\n");
    let job = self::job(&bench, &keys);
    let head = job.model.parameters().into_iter().find(|p| p.name() == "lm_head.weight").unwrap();
    let saved = weights(&bench.out("first")).into_iter().find(|(n, _)| n.ends_with("lm_head.weight")).unwrap().1;
    assert_eq!(value(&head), saved);
}

/// Training goes on with an adapter at the adapter's own rank and scale; another one that somebody wrote would be ignored.
#[test]
fn a_rank_that_is_not_the_adapters_is_told() {
    let bench = Bench::new("other-rank", 6);
    run(bench.config("first", LORA), None).unwrap();
    let first = bench.out("first").display().to_string();
    let load = |keys: &str| {
        let keys = format!("finetuning_type: lora\nadapter_name_or_path: {first}\n{keys}");
        Job::prepare(bench.config("x", &keys), Use::Train).unwrap().load(None)
    };
    let e = load("lora_rank: 7\n").unwrap_err().to_string();
    assert!(e.contains("lora_rank") && e.contains("is 7") && e.contains("create_new_adapter"), "{e}");
    load("lora_rank: 7\ncreate_new_adapter: true\n").unwrap();
    load("").unwrap();
}

/// A second adapter, begun on the base model merged with a first one, is right on that merged model only, and remembers it.
#[test]
fn an_adapter_brings_what_it_stands_on() {
    let bench = Bench::new("stands-on", 6);
    run(bench.config("first", LORA), None).unwrap();
    let first = bench.out("first").display().to_string();
    let keys = format!("{LORA}adapter_name_or_path: {first}\ncreate_new_adapter: true\n");
    run(bench.config("second", &keys), None).unwrap();
    let second = bench.out("second").display().to_string();
    let both = job_logits(&infer(&bench, &format!("{first}, {second}")), true);
    let alone = job_logits(&infer(&bench, &second), true);
    assert_eq!(bits(&alone), bits(&both));
    assert_ne!(bits(&alone), bits(&job_logits(&infer(&bench, &first), true)));
    // A third, in a run that is stopped and goes on.
    let keys = format!("{LORA}adapter_name_or_path: {second}\ncreate_new_adapter: true\nsave_steps: 1\n");
    run(bench.config("third", &keys), Some(1)).unwrap();
    run(bench.config("third", &keys), None).unwrap();
    run(bench.config("whole", &keys), None).unwrap();
    let of = |name: &str| job_logits(&infer(&bench, &bench.out(name).display().to_string()), true);
    assert_eq!(bits(&of("third")), bits(&of("whole")));
    std::fs::remove_file(bench.out("first").join("adapter_config.json")).unwrap();
    let keys = format!("finetuning_type: lora\nadapter_name_or_path: {second}\n");
    let e = Job::prepare(bench.config("x", &keys), Use::Infer).unwrap().load(None).unwrap_err().to_string();
    assert!(e.contains("merged with the adapter in") && e.contains("first"), "{e}");
}

#[test]
fn ranks_that_do_not_fit_are_told() {
    let bench = Bench::new("rank", 4);
    let keys = "finetuning_type: lora\nlora_rank: 17\n";
    let mut job = Job::prepare(bench.config("x", keys), Use::Train).unwrap();
    let e = job.load(None).unwrap_err().to_string();
    assert!(e.contains("lora_rank") && e.contains("k_proj") && e.contains("use 1 to 16"), "{e}");
}

/// Masters keep what bf16 cannot: updates far below a rounding step add up.
#[test]
fn updates_below_a_bf16_step_are_not_lost() {
    let bench = Bench::new("masters", 16);
    let job = job(&bench, "bf16: true\n");
    let params = job.trained();
    let before: Vec<_> = params.iter().map(value).collect();
    let options =
        AdamWOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, decay_norms_and_biases: false };
    let mut optimizer = AdamW::new(&job.rt, &params, &|p| job.dtype_of(p.name()), options).unwrap();
    for _ in 0..200 {
        for p in &params {
            let ones = vec![1f32; p.len()];
            p.grad()
                .accumulate(&job.rt, p.shape(), |g, _| {
                    g.copy_from_slice(&ones);
                    Ok::<_, phalanx_autograd::AutogradError>(())
                })
                .unwrap();
        }
        // A step of 1e-5 beside weights of about 0.1, whose bf16 neighbours are 5e-4 away.
        optimizer.step(&job.rt, 1e-5, 1.0).unwrap();
    }
    let (p, old) = params.iter().zip(&before).find(|(p, _)| p.name().ends_with("up_proj.weight")).unwrap();
    let master = job.rt.to_vec(optimizer.exact(p).unwrap()).unwrap();
    for (m, o) in master.iter().zip(old) {
        assert!((o - m - 2e-3).abs() < 1e-4, "{o} became {m}");
    }
    assert_eq!(p.value().unwrap().dtype(), DType::Bf16);
    let rounded = job.rt.cast(optimizer.exact(p).unwrap(), DType::Bf16, Category::Weights).unwrap();
    assert_eq!(value(p), job.rt.to_vec(&rounded).unwrap());
    let norm = params.iter().find(|p| p.name().ends_with("input_layernorm.weight")).unwrap();
    assert_eq!(norm.value().unwrap().dtype(), DType::F32);
}

#[test]
fn the_loss_in_bf16_follows_the_loss_in_f32() {
    let bench = Bench::new("bf16", 16);
    let keys = "num_train_epochs: 4\nlearning_rate: 3e-3\n";
    let (_, exact) = run(bench.config("f32", keys), None).unwrap();
    let (_, low) = run(bench.config("low", &format!("{keys}bf16: true\n")), None).unwrap();
    assert!(exact.steps.last().unwrap().1 < 0.9 * exact.steps[0].1);
    for (a, b) in exact.steps.iter().zip(&low.steps) {
        assert!((a.1 - b.1).abs() < 0.02 * a.1, "step {}: {} and {}", a.0, a.1, b.1);
    }
}
