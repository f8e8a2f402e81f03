//! The binary as a person uses it: verbs, exit codes, JSON lines, and what a bad input gets.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn fixtures(path: &str) -> String {
    format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))
}

/// A folder of its own for each test, gone afterwards.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("phalanx-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn phalanx(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_phalanx")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Trains a tiny model from nothing into `out`.
fn train(out: &Path, more: &[&str]) -> Output {
    let tokenizer = format!("tokenizer_name_or_path={}", fixtures("crates/data/tests/fixtures/tiny-chatml"));
    let dataset = format!("dataset={}", fixtures("crates/data/tests/fixtures/data/alpaca_tiny.json"));
    let out = format!("output_dir={}", out.display());
    let model = "model={model_type: qwen3, vocab_size: 1024, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, \
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: true}";
    let mut args = vec!["train", "train_from_scratch=true", model, &tokenizer, &dataset, &out];
    args.extend(["finetuning_type=full", "cutoff_len=128", "per_device_train_batch_size=2", "learning_rate=0.01"]);
    args.extend(["num_train_epochs=3", "logging_steps=1", "threads=2", "plot_loss=true"]);
    args.extend(more);
    phalanx(&args)
}

fn ok(o: &Output) -> String {
    assert!(o.status.success(), "{}\n{}", text(&o.stdout), text(&o.stderr));
    text(&o.stdout)
}

/// Fails, and the message on standard error holds all of `words`.
fn refused(o: &Output, words: &[&str]) {
    let e = text(&o.stderr);
    assert_eq!(o.status.code(), Some(1), "{e}");
    assert!(words.iter().all(|w| e.contains(w)), "{words:?} not all in: {e}");
}

#[test]
fn train_then_generate_evaluate_export_and_chat() {
    let dir = Dir::new("whole");
    let out = dir.path("out");
    let lines = ok(&train(&out, &["--json"]));
    let events: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let losses: Vec<f64> =
        events.iter().filter_map(|e| (e["event"] == "step").then(|| e["loss"].as_f64().unwrap())).collect();
    assert!(losses.len() > 3 && losses[losses.len() - 1] < losses[0], "{losses:?}");
    assert_eq!(events.last().unwrap()["event"], "summary");
    for file in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "metrics.jsonl",
        "trainer_state.json",
        "training_loss.png",
        "training_loss.svg",
    ] {
        assert!(out.join(file).is_file(), "{file} is missing");
    }
    let model = out.display().to_string();
    let args =
        ["generate", &model, "--prompt", "What", "--prompt", "How are", "--greedy", "--max-new-tokens", "5", "--json"];
    let lines = ok(&phalanx(&args));
    let answers: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0]["token_ids"].as_array().unwrap().len(), answers[0]["logprobs"].as_array().unwrap().len());

    let named = format!("model_name_or_path={model}");
    let data = format!("dataset={}", fixtures("crates/data/tests/fixtures/data/alpaca_tiny.json"));
    let evaluated: Value = serde_json::from_str(&ok(&phalanx(&["eval", &named, &data, "--json"]))).unwrap();
    assert!(evaluated["eval_loss"].as_f64().unwrap() < losses[0]);

    // A LoRA run on it, its merge, and the merge's agreement.
    let lora = dir.path("lora");
    let lora_out = format!("output_dir={}", lora.display());
    ok(&phalanx(&["train", &named, &data, &lora_out, "lora_rank=2", "max_steps=3", "save_strategy=no", "--json"]));
    let merged = dir.path("merged");
    let (adapter, export) =
        (format!("adapter_name_or_path={}", lora.display()), format!("export_dir={}", merged.display()));
    let done: Value = serde_json::from_str(&ok(&phalanx(&["export", &named, &adapter, &export, "--json"]))).unwrap();
    assert_eq!(done["merged_layers"], 14);
    assert!(done["logits_rel"].as_f64().unwrap() < 1e-4, "{done}");
    let again = phalanx(&["export", &named, &adapter, &export]);
    refused(&again, &["export_dir", "holds files"]);
    let prompt = ["--prompt", "What", "--greedy", "--max-new-tokens", "6", "--json"];
    let by_merge = ok(&phalanx(&[&["generate", merged.to_str().unwrap()], &prompt[..]].concat()));
    let by_adapter = ok(&phalanx(&[&["generate", &model, "--adapter", lora.to_str().unwrap()], &prompt[..]].concat()));
    let ids = |s: &str| serde_json::from_str::<Value>(s).unwrap()["token_ids"].clone();
    assert_eq!(ids(&by_merge), ids(&by_adapter));

    let mut chat = Command::new(env!("CARGO_BIN_EXE_phalanx"))
        .args(["chat", &model, "--max-new-tokens", "4"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut chat.stdin.take().unwrap(), b"Hello\n/clear\n/exit\n").unwrap();
    ok(&chat.wait_with_output().unwrap());
}

#[test]
fn a_finished_run_is_not_overwritten_and_a_changed_one_is_told_apart() {
    let dir = Dir::new("again");
    let out = dir.path("out");
    ok(&train(&out, &[]));
    refused(&train(&out, &["learning_rate=0.5"]), &["learning_rate", "0.01", "0.5"]);
}

#[test]
fn parity_says_pass_and_an_unsupported_family_ends_with_code_3() {
    let golden = |c: &str| fixtures(&format!("testkit/fixtures/golden/{c}"));
    let line = ok(&phalanx(&["verify", "parity", &golden("llama-gqa"), "--json"]));
    let v: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(v["pass"], true, "{v}");
    for field in [
        "case",
        "logits_abs",
        "loss_abs",
        "grad_rel_max",
        "grad_worst",
        "train_loss_abs_max",
        "grad_norm_rel_max",
        "greedy_equal",
    ] {
        assert!(v.get(field).is_some(), "{field}");
    }
    let o = phalanx(&["verify", "parity", &golden("qwen3-moe")]);
    assert_eq!(o.status.code(), Some(3));
    assert!(text(&o.stderr).contains("qwen3_moe"), "{}", text(&o.stderr));
    assert_eq!(phalanx(&["verify", "parity", "/no/such/folder"]).status.code(), Some(1));
}

#[test]
fn mistakes_name_the_key_the_file_and_the_mend() {
    let dir = Dir::new("mistakes");
    refused(&phalanx(&["train", "learning_rat=1"]), &["learning_rat", "did you mean `learning_rate`"]);
    refused(&phalanx(&["train", "no-such.yaml"]), &["no-such.yaml"]);
    let out = dir.path("out");
    refused(&train(&out, &["plan={recompute: \"model.layers.{0-9}.mpl\"}"]), &["recompute", "matches no module"]);
    refused(&train(&out, &["plan={freeze: \"**\"}"]), &["nothing is left to train"]);
    refused(&train(&out, &["cutoff_len=4"]), &["cutoff_len"]);
    let broken = dir.path("broken.jsonl");
    std::fs::write(&broken, "{\"instruction\": \"a\", \"output\": \"b\"}\n{\"instruction\": \n").unwrap();
    refused(&train(&out, &[&format!("dataset={}", broken.display())]), &["broken.jsonl:2"]);
    std::fs::write(&broken, "").unwrap();
    refused(&train(&out, &[&format!("dataset={}", broken.display())]), &["broken.jsonl", "no record"]);
    assert!(
        !out.exists() || std::fs::read_dir(&out).unwrap().next().is_none() || !out.join("model.safetensors").exists()
    );
    refused(&phalanx(&["generate", out.to_str().unwrap(), "--prompt", "x", "--temperature", "-1"]), &["config.json"]);
}

#[test]
fn plan_show_and_bench_and_data_check_speak_json() {
    let base = format!("tokenizer_name_or_path={}", fixtures("crates/data/tests/fixtures/tiny-chatml"));
    let args = [
        "train_from_scratch=true",
        "shape=tiny-15m",
        &base,
        "finetuning_type=full",
        "plan={recompute: \"model.layers.{1-2}\"}",
    ];
    let plan: Value =
        serde_json::from_str(&ok(&phalanx(&[&["plan", "show"], &args[..], &["--json"]].concat()))).unwrap();
    assert_eq!(plan["modules"]["model.layers.1"]["recompute"], true);
    assert_eq!(plan["modules"]["model.layers.0"]["recompute"], false);
    assert!(ok(&phalanx(&[&["plan", "show"], &args[..]].concat())).contains("model.layers.{1-2}"));

    let bench = [
        "bench", "train", "--shape", "tiny-15m", "--batch", "1", "--seq", "8", "--warmup", "0", "--steps", "1",
        "--json",
    ];
    let bench: Value = serde_json::from_str(&ok(&phalanx(&bench))).unwrap();
    assert!(bench["tokens_per_s"].as_f64().unwrap() > 0.0 && bench["params"].as_u64().unwrap() > 10_000_000);

    let data = format!("dataset={}", fixtures("crates/data/tests/fixtures/data/alpaca_tiny.json"));
    let report: Value = serde_json::from_str(&ok(&phalanx(&["data", "check", &base, &data, "--json"]))).unwrap();
    assert_eq!(report["ok"], true);
    let doctor: Value = serde_json::from_str(&ok(&phalanx(&["doctor", "--json", "--threads", "1"]))).unwrap();
    assert!(doctor["peak_fma_gflops"].as_f64().unwrap() > 0.0);
}
