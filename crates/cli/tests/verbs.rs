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

fn data_set() -> String {
    format!("dataset={}", fixtures("crates/data/tests/fixtures/data/alpaca_tiny.json"))
}

/// Trains a tiny model from nothing into `out`.
fn train(out: &Path, more: &[&str]) -> Output {
    train_command(out, more).output().unwrap()
}

fn train_command(out: &Path, more: &[&str]) -> Command {
    let tokenizer = format!("tokenizer_name_or_path={}", fixtures("crates/data/tests/fixtures/tiny-chatml"));
    let dataset = data_set();
    let out = format!("output_dir={}", out.display());
    let model = "model={model_type: qwen3, vocab_size: 1024, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, \
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: true}";
    let mut args = vec!["train", "train_from_scratch=true", model, &tokenizer, &dataset, &out];
    args.extend(["finetuning_type=full", "cutoff_len=128", "per_device_train_batch_size=2", "learning_rate=0.01"]);
    args.extend(["num_train_epochs=3", "logging_steps=1", "threads=2", "plot_loss=true"]);
    args.extend(more);
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.args(args);
    command
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
fn a_gguf_file_generates_as_it_is() {
    let file = fixtures("crates/formats/tests/fixtures/qwen3-bpe.gguf");
    let generate = |more: &[&str]| {
        phalanx(&[&["generate", &file, "--prompt", "ab", "--greedy", "--max-new-tokens", "4", "--json"], more].concat())
    };
    let answer = |more: &[&str]| -> Value { serde_json::from_str(&ok(&generate(more))).unwrap() };
    let stored = answer(&[]);
    assert_eq!(stored["logprobs"].as_array().unwrap().len(), stored["token_ids"].as_array().unwrap().len());
    // Widened, it is what an imported folder is.
    let dir = Dir::new("gguf");
    let folder = dir.path("model").display().to_string();
    ok(&phalanx(&["import", "gguf", &file, &folder]));
    let imported = ["generate", &folder, "--prompt", "ab", "--greedy", "--max-new-tokens", "4", "--json"];
    assert_eq!(ok(&phalanx(&imported)), ok(&generate(&["--weights", "exact"])));
    for form in ["q8", "q4"] {
        answer(&["--weights", form]);
        ok(&phalanx(&[&imported[..], &["--weights", form]].concat()));
    }
    let wrong = generate(&["--weights", "q6"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("q8") && text(&wrong.stderr).contains("q4"), "{}", text(&wrong.stderr));
    let (named, out) = (format!("model_name_or_path={file}"), format!("output_dir={}", dir.path("out").display()));
    let refusal = phalanx(&["train", &named, &data_set(), &out, "stage=sft", "finetuning_type=lora", "max_steps=1"]);
    refused(&refusal, &["model_name_or_path", "cannot be trained", "phalanx import gguf"]);
    let missing = phalanx(&["generate", "/no/such/model.gguf", "--prompt", "a"]);
    refused(&missing, &["/no/such/model.gguf"]);
}

#[test]
fn train_then_generate_evaluate_export_and_chat() {
    let dir = Dir::new("whole");
    let out = dir.path("out");
    let lines = ok(&train(&out, &["--json"]));
    let events: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let losses: Vec<f64> =
        events.iter().filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect();
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
    assert_eq!(ok(&phalanx(&[&args[..], &["--max-batch", "10000000000000000000"]].concat())), lines);
    assert_eq!(answers[0]["token_ids"].as_array().unwrap().len(), answers[0]["logprobs"].as_array().unwrap().len());

    let named = format!("model_name_or_path={model}");
    let data = format!("dataset={}", fixtures("crates/data/tests/fixtures/data/alpaca_tiny.json"));
    let evaluated: Value = serde_json::from_str(&ok(&phalanx(&["eval", &named, &data, "--json"]))).unwrap();
    assert!(evaluated["eval_loss"].as_f64().unwrap() < losses[0]);

    // Data to train on is not touched where there is data to evaluate on.
    let (eval, absent) = (data.replacen("dataset", "eval_dataset", 1), "dataset=/no/such/file.jsonl");
    let again: Value = serde_json::from_str(&ok(&phalanx(&["eval", &named, absent, &eval, "--json"]))).unwrap();
    assert_eq!(again, evaluated);

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
fn a_reader_that_goes_away_ends_the_run_with_everything_saved() {
    use std::io::BufRead;
    let dir = Dir::new("pipe");
    let out = dir.path("out");
    // More steps than a pipe holds lines.
    let mut run = train_command(&out, &["--json", "max_steps=3000", "logging_steps=1", "save_strategy=no"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    std::io::BufReader::new(run.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("\"event\""), "{first}");
    let ended = run.wait_with_output().unwrap();
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    assert!(said.contains("standard output") && said.contains("saved") && !said.contains("panicked"), "{said}");
    let step = |e: std::io::Result<std::fs::DirEntry>| e.unwrap().file_name().to_string_lossy().into_owned();
    let saved = std::fs::read_dir(&out).unwrap().map(step).find(|n| n.starts_with("checkpoint-")).unwrap();
    assert!(out.join(saved).join("phalanx_state.json").is_file());
    // The summary for people is not worth a panic either.
    let mut run = train_command(&dir.path("short"), &["max_steps=1"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(run.stdout.take());
    let ended = run.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
}

/// `phalanx doctor | head -1`, and a disk that is full behind a redirection.
#[test]
fn a_closed_or_full_standard_output_is_no_panic() {
    let dir = Dir::new("closed");
    let out = dir.path("out");
    ok(&train(&out, &["max_steps=1"]));
    let model = out.display().to_string();
    let (named, data) = (format!("model_name_or_path={model}"), data_set());
    let commands: [&[&str]; 4] = [
        &["plan", "show", &named],
        &["data", "check", &named, &data],
        &["eval", &named, &data],
        &["generate", &model, "--prompt", "What", "--greedy", "--max-new-tokens", "3"],
    ];
    for args in commands {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.args(args).stderr(std::process::Stdio::piped());
        let mut run = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        drop(run.stdout.take());
        let ended = run.wait_with_output().unwrap();
        let said = text(&ended.stderr);
        assert!(ended.status.success() && !said.contains("panicked") && !said.contains("error"), "{args:?}: {said}");
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ended = command.stdout(full).spawn().unwrap().wait_with_output().unwrap();
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("standard output") && !said.contains("panicked"), "{args:?}: {said}");
    }
}

/// A signal is answered at once, the run is saved after the step, and the exit code tells which signal it was.
#[test]
fn a_signal_saves_the_run_and_shows_in_the_exit_code() {
    use std::io::BufRead;
    for (signal, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143), (libc::SIGHUP, 129)] {
        let dir = Dir::new(&format!("signal-{signal}"));
        let out = dir.path("out");
        let mut run = train_command(&out, &["--json", "max_steps=100000", "logging_steps=1", "save_strategy=no"])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(run.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().any(|l| l.unwrap().contains("\"step\"")));
        // SAFETY: a signal to a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(run.id() as i32, signal) }, 0);
        let last = lines.map(Result::unwrap).last().unwrap();
        assert!(last.contains("\"interrupted\""), "{last}");
        let ended = run.wait_with_output().unwrap();
        let said = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(code), "{said}");
        assert!(said.contains("stopping when this step is done"), "{said}");
        let names = std::fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        assert!(names.into_iter().any(|n| n.starts_with("checkpoint-")), "{signal}");
    }
}

#[test]
fn a_template_that_prints_the_day_keeps_it_over_midnight() {
    let dir = Dir::new("midnight");
    let out = dir.path("out");
    let tokenizer = format!("tokenizer_name_or_path={}", fixtures("crates/data/tests/fixtures/tiny-llama3"));
    ok(&train(&out, &[&tokenizer, "max_steps=4", "save_steps=2", "template_date=2024-07-29"]));

    // As if the run had begun on that day by itself, and stopped after step 2.
    for name in ["model.safetensors", "config.json", "checkpoint-4"] {
        let path = out.join(name);
        if path.is_dir() { std::fs::remove_dir_all(path).unwrap() } else { std::fs::remove_file(path).unwrap() }
    }
    let path = out.join("checkpoint-2/phalanx_state.json");
    let mut state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(state["stream"]["template_date"], "2024-07-29");
    state["config"]["template_date"] = Value::Null;
    std::fs::write(&path, state.to_string()).unwrap();
    let said = text(&train(&out, &[&tokenizer, "max_steps=4", "save_steps=2"]).stderr);
    assert!(said.contains("going on from") && out.join("model.safetensors").is_file(), "{said}");

    // Today is another day, which is refused only when it is asked for.
    let today = train(&out, &[&tokenizer, "max_steps=6", "template_date=2024-07-30", "resume_from_checkpoint=true"]);
    refused(&today, &["set template_date: 2024-07-29"]);
}

#[test]
fn what_a_file_says_about_answers_counts_in_generate() {
    let dir = Dir::new("stops");
    let out = dir.path("out");
    ok(&train(&out, &["max_steps=2", "save_strategy=no"]));
    let file = |keys: &str| {
        let path = dir.path("generate.yaml");
        std::fs::write(&path, format!("model_name_or_path: {}\ndo_sample: false\n{keys}", out.display())).unwrap();
        path.display().to_string()
    };
    let ask = |keys: &str, more: &[&str]| -> Value {
        let path = file(keys);
        let args = ["generate", &path, "--prompt", "What", "--max-new-tokens", "6", "--json"];
        serde_json::from_str(&ok(&phalanx(&[&args[..], more].concat()))).unwrap()
    };
    let plain = ask("", &[]);
    let ids = plain["token_ids"].as_array().unwrap();
    assert_eq!((ids.len(), &plain["finish_reason"]), (6, &Value::from("length")), "{plain}");
    let stopped = ask(&format!("stop_token_ids: [{}]\n", ids[0]), &[]);
    assert_eq!(stopped["finish_reason"], "stop", "{stopped}");
    let whole = plain["text"].as_str().unwrap();
    let first = whole.chars().find(|c| c.is_ascii_alphanumeric()).unwrap().to_string();
    let stopped = ask(&format!("stop: ['{first}']\n"), &[]);
    assert_eq!(stopped["text"].as_str(), whole.split_once(&first).map(|(before, _)| before), "{stopped}");
    // The command line wins.
    assert_eq!(ask(&format!("stop: ['{first}']\n"), &["--stop", "no such text"])["text"], plain["text"]);
    let path = file("stop_token_ids: [1024]\n");
    refused(&phalanx(&["generate", &path, "--prompt", "What"]), &["stop_token_ids: 1024", "1024"]);
}

#[test]
fn examples_beyond_the_models_positions_are_pointed_out() {
    let dir = Dir::new("positions");
    let out = dir.path("out");
    let short = "model={model_type: qwen3, vocab_size: 1024, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, \
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 16}";
    let said = text(&train(&out, &[short, "max_steps=1", "save_strategy=no"]).stderr);
    assert!(said.contains("max_position_embeddings") && said.contains("cutoff_len: 16"), "{said}");
    // The trained folder knows its positions.
    let args = [format!("model_name_or_path={}", out.display()), data_set()];
    let report: Value = serde_json::from_str(&ok(&phalanx(&["data", "check", &args[0], &args[1], "--json"]))).unwrap();
    let found = report["findings"].as_array().unwrap();
    assert!(found.iter().any(|f| f["kind"] == "beyond_positions"), "{found:?}");
    // So does the configuration, wherever its tokenizer lies: the one of another folder, without a model beside it.
    let other = format!("tokenizer_name_or_path={}", fixtures("crates/data/tests/fixtures/tiny-chatml"));
    let kinds = |more: &[&str]| -> Vec<String> {
        let words = [&["data", "check", &other, &args[1], "--json"], more].concat();
        let report: Value = serde_json::from_str(&ok(&phalanx(&words))).unwrap();
        report["findings"].as_array().unwrap().iter().map(|f| f["kind"].as_str().unwrap().to_owned()).collect()
    };
    let beyond = "beyond_positions".to_owned();
    assert!(kinds(&[&args[0]]).contains(&beyond));
    let config = format!("config_name_or_path={}", out.join("config.json").display());
    assert!(kinds(&["train_from_scratch=true", "finetuning_type=full", &config]).contains(&beyond));
    assert!(!kinds(&[]).contains(&beyond));
    // A tokenizer's folder is enough of a model to look at data.
    let bare = format!("model_name_or_path={}", fixtures("crates/data/tests/fixtures/tiny-chatml"));
    assert!(!kinds(&[&bare]).contains(&beyond));
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
    // The same folder under the name of a family that is none.
    let dir = Dir::new("unknown-family");
    for file in std::fs::read_dir(golden("llama-gqa")).unwrap() {
        let path = file.unwrap().path();
        std::fs::copy(&path, dir.path(path.file_name().unwrap().to_str().unwrap())).unwrap();
    }
    let config = std::fs::read_to_string(dir.path("config.json")).unwrap();
    std::fs::write(dir.path("config.json"), config.replace("\"llama\"", "\"gronk\"")).unwrap();
    let unknown = dir.0.display().to_string();
    let o = phalanx(&["verify", "parity", &unknown]);
    assert_eq!(o.status.code(), Some(3));
    assert!(text(&o.stderr).contains("gronk") && text(&o.stderr).contains("qwen3_moe"), "{}", text(&o.stderr));
    assert_eq!(phalanx(&["verify", "parity", "/no/such/folder"]).status.code(), Some(1));
    // A line for every folder, also where there are no numbers.
    let o = phalanx(&["verify", "parity", "/no/such/folder", &unknown, "--json"]);
    assert_eq!(o.status.code(), Some(1));
    let lines: Vec<Value> = text(&o.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for (line, why) in lines.iter().zip(["/no/such/folder", "gronk"]) {
        assert_eq!(line["pass"], false, "{line}");
        assert!(line["error"].as_str().unwrap().contains(why), "{line}");
    }
    assert_eq!(lines.len(), 2);
    let o = phalanx(&["verify", "parity", &unknown, "--json"]);
    assert_eq!((o.status.code(), text(&o.stdout).lines().count()), (Some(3), 1));
}

#[test]
fn mistakes_name_the_key_the_file_and_the_mend() {
    let dir = Dir::new("mistakes");
    refused(&phalanx(&["train", "learning_rat=1"]), &["learning_rat", "did you mean `learning_rate`"]);
    refused(&phalanx(&["train", "no-such.yaml"]), &["no-such.yaml"]);
    let out = dir.path("out");
    refused(&train(&out, &["plan={recompute: \"model.layers.{0-9}.mpl\"}"]), &["recompute", "matches no module"]);
    refused(&train(&out, &["plan={adapters: \"q_prj\"}"]), &["matches no module", "did you mean `q_proj`?"]);
    refused(&train(&out, &["plan={freeze: \"**\"}"]), &["nothing is left to train"]);
    let typo = train(&out, &["plan={adapters: \"q_prj\"}"]);
    assert!(!text(&typo.stderr).contains("nothing is left"), "{}", text(&typo.stderr));
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

#[test]
fn rates_stand_beside_the_ceilings_of_the_same_run() {
    let dir = Dir::new("rates");
    let out = dir.path("out");
    ok(&train(&out, &["max_steps=1"]));
    let json = |args: &[&str]| -> Vec<Value> {
        ok(&phalanx(args)).lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    };
    for arithmetic in ["f32", "bf16x2", "bf16"] {
        let lines = json(&["bench", "gemm", "1x1536x576", "--rounds", "1", "--json", "--arithmetic", arithmetic]);
        assert_eq!(lines.len(), 1);
        for key in ["gflops", "fraction_of_peak", "peak", "gbs", "fraction_of_read"] {
            assert!(lines[0][key].as_f64().unwrap() > 0.0, "{key}: {}", lines[0]);
        }
    }
    refused(&phalanx(&["bench", "gemm", "no-such"]), &["no shape", "no-such"]);
    let trace = dir.path("trace.json");
    let args =
        ["bench", "gemm", "1x1536x576", "--rounds", "1", "--json", "--profile", "--trace", trace.to_str().unwrap()];
    let lines = json(&args);
    assert_eq!((&lines[1]["kernel"], &lines[1]["shape"]), (&"gemm forward".into(), &"1x1536x576 f32".into()));
    assert!(lines[1]["share"].as_f64().unwrap() > 0.5 && lines[2]["profile"] == "total", "{lines:?}");
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 2);
    let alone = phalanx(&["bench", "gemm", "--trace", "x.json"]);
    assert!(!alone.status.success() && text(&alone.stderr).contains("--profile"), "{alone:?}");
    let model = out.display().to_string();
    let lines =
        json(&["bench", "decode", &model, "--batch", "1", "--batch", "3", "--tokens", "4", "--rounds", "1", "--json"]);
    assert_eq!(lines.iter().map(|l| l["batch"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3]);
    assert!(lines.iter().all(|l| l["decode_tokens_per_s"].as_f64().unwrap() > 0.0), "{lines:?}");
    let shown =
        ok(&phalanx(&["bench", "decode", &model, "--batch", "1", "--tokens", "4", "--rounds", "1", "--profile"]));
    for part in ["profile of rank 0: 1 × generation", "attention decoding", "gemm forward", "not in any kernel"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn a_profiled_run_says_what_its_kernels_took() {
    let dir = Dir::new("profile");
    let out = dir.path("out");
    let told = train(&out, &["max_steps=3", "profile=true", "profile_steps=1"]);
    let shown = ok(&told);
    for part in
        ["profile of rank 0: 1 × step", "gemm wgrad", "adamw", "phases: data ", "profile.json", "trace-rank0.json"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(out.join("trace-rank0.json").exists());
    let lines = ok(&train(&out, &["max_steps=3", "overwrite_output_dir=true", "profile=true", "--json"]));
    let events: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let profile: Vec<_> = events.iter().filter(|e| e["event"] == "profile").collect();
    assert!(profile.len() > 10 && profile.last().unwrap()["regions"][0]["calls"] == 3, "{profile:?}");
    refused(&train(&dir.path("no"), &["profil=true"]), &["`profil`: unknown key", "did you mean `profile`"]);
    refused(&train(&dir.path("no"), &["profile=maybe"]), &["`profile`", "maybe"]);
    refused(&train(&dir.path("no"), &["profile=true", "profile_steps=0"]), &["`profile_steps`: expected 1 or more"]);
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let dir = Dir::new("lock");
    let out = dir.path("out");
    std::fs::create_dir_all(&out).unwrap();
    let held = std::fs::File::create(out.join(".lock")).unwrap();
    held.lock().unwrap();
    refused(&train(&out, &[]), &["output_dir", "in use by another run"]);
    drop(held);
    ok(&train(&out, &["--json"]));
}

#[test]
fn the_template_trained_with_goes_with_the_model() {
    let dir = Dir::new("template");
    let out = dir.path("out");
    ok(&train(&out, &["template=llama3", "num_train_epochs=1"]));
    let template = std::fs::read_to_string(out.join("chat_template.jinja")).unwrap();
    assert!(template.contains("start_header_id"), "{template}");
}

#[test]
fn a_run_that_ends_in_broken_steps_is_no_success() {
    let dir = Dir::new("diverged");
    let out = dir.path("out");
    refused(&train(&out, &["learning_rate=1e30", "save_strategy=no"]), &["not finite", "learning_rate"]);
    assert!(!out.join("model.safetensors").exists());
}

/// Kept block sizes that cannot be used are named and do no harm; those of another processor are passed over; `tune --reset` forgets.
#[test]
fn kept_block_sizes() {
    let dir = Dir::new("tune");
    let file = dir.path("phalanx/tune.json");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.args(args).env("XDG_CACHE_HOME", dir.path("")).output().unwrap()
    };
    let bench = ["bench", "gemm", "--threads", "1", "--rounds", "1", "forward", "2048x192x576"];
    let unit = |unit: &str, kc: usize| {
        format!(
            r#"{{"processor": "PROCESSOR", "sizes": [{{"unit": "{unit}", "kc": {kc}, "mc": 64, "stretch": 65536, "narrow": 64, "narrow_rows": 512, "narrow_values": 1000, "narrow_kc": 256}}]}}"#
        )
    };
    for (content, note) in [
        ("{".to_owned(), true),
        (r#"{"processor": 3}"#.to_owned(), true),
        (unit("avx512", 0), false),
        (String::new(), true),
    ] {
        std::fs::write(&file, &content).unwrap();
        let out = run(&bench);
        let said = text(&out.stderr);
        assert!(out.status.success(), "{content}: {said}");
        assert_eq!(said.contains("tune.json is not used"), note, "{content}: {said}");
    }
    let out = run(&["tune", "--reset"]);
    assert!(out.status.success() && !file.exists() && text(&out.stdout).contains("tune.json"));
    assert!(run(&["tune", "--reset"]).status.success(), "forgetting twice is no error");
}

#[test]
fn plan_draw_draws_and_refuses() {
    let dir = Dir::new("draw");
    let file = dir.path("1f1b.svg").display().to_string();
    let draw = |args: &[&str]| phalanx(&[&["plan", "draw"], args].concat());
    let text = ok(&draw(&["--schedule", "1f1b", "--ranks", "4", "--micro-batches", "8", "--svg", &file]));
    assert!(text.contains("total 33, computing 72.7 %") && text.contains("wrote "), "{text}");
    assert!(std::fs::read_to_string(&file).unwrap().contains("</svg>"));
    let json = ok(&draw(&["--schedule", "dualpipev", "--micro-batches", "10", "--overlapped", "2.5", "--json"]));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["total"], 59.0);
    assert_eq!(json["schedule"], "dualpipev");
    assert_eq!(json["ranks"][3][0]["action"], "F3.0");
    let uneven = ok(&draw(&["--layout", "Et*2|tt|tt|tL", "--latency", "0.5"]));
    assert!(uneven.contains("rank 3"), "{uneven}");

    refused(&draw(&["--schedule", "1f1p"]), &["no pipeline schedule \"1f1p\"", "did you mean \"1f1b\"?"]);
    refused(&draw(&["--schedule", "interleaved", "--micro-batches", "10"]), &["10 micro-batches", "8 or 12"]);
    refused(&draw(&["--schedule", "dualpipev", "--micro-batches", "7"]), &["at least 8", "zb-v"]);
    refused(&draw(&["--ranks", "0"]), &["0 ranks", "at least 1"]);
    refused(&draw(&["--forward", "-1"]), &["forward is -1"]);
    refused(&draw(&["--layout", "Et|tx|t|tL"]), &["column 5", "\"x\""]);
    refused(&draw(&["--svg", "/nowhere/at/all.svg"]), &["--svg /nowhere/at/all.svg"]);
}

/// The drawings of docs/pipeline-schedules.md are what the commands above them print.
#[test]
fn the_drawings_of_the_documentation_are_real() {
    let page = std::fs::read_to_string(fixtures("docs/pipeline-schedules.md")).unwrap();
    let mut count = 0;
    for block in page.split("```text\n").skip(1).filter_map(|b| b.split("```").next()) {
        let Some(command) = block.strip_prefix("$ phalanx ") else { continue };
        let (command, printed) = command.split_once('\n').unwrap();
        let output = ok(&phalanx(&command.split_whitespace().collect::<Vec<_>>()));
        assert!(output == printed, "docs/pipeline-schedules.md: `phalanx {command}` prints\n{output}");
        count += 1;
    }
    assert_eq!(count, 8);
}
