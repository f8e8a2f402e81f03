//! The demo end to end, small: a few steps of a tiny model in a temporary folder.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_demo::settings::Changes;
use phalanx_demo::{DemoError, Existing, Observer, Options, Outcome, folder, sample};
use serde_json::{Value, json};

/// Keeps what the demo says; asks it to stop after a step.
#[derive(Default)]
struct Watch<'s> {
    text: String,
    losses: Vec<f64>,
    stop_after: Option<(u64, Option<&'s AtomicBool>)>,
}

impl phalanx_train::trainer::Observer for Watch<'_> {
    fn message(&mut self, text: &str) {
        self.text += text;
        self.text.push('\n');
    }
    fn step(&mut self, step: &phalanx_report::Step, _logged: bool) {
        self.losses.push(step.loss);
        if let Some((at, Some(stop))) = self.stop_after
            && step.step == at
        {
            stop.store(true, Ordering::Relaxed);
        }
    }
}

impl Observer for Watch<'_> {}

struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> TempDir {
        let dir = std::env::temp_dir().join(format!("phalanx demo {name} {}", std::process::id()));
        std::fs::remove_dir_all(&dir).ok();
        TempDir(dir)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A tiny model: two layers of width 32, ten steps.
fn tiny(dir: &Path) -> Options {
    let mut changes = Changes::default();
    let model = json!({
        "model_type": "llama", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": true,
        "initializer_range": 0.05, "eos_token_id": 0
    });
    changes.set("model", model);
    for (key, value) in [
        ("cutoff_len", json!(128)),
        ("warmup_steps", json!(2)),
        ("learning_rate", json!(0.02)),
        ("val_size", json!(10)),
        ("logging_steps", json!(1)),
        ("save_steps", json!(4)),
    ] {
        changes.set(key, value);
    }
    Options {
        output_dir: dir.to_path_buf(),
        steps: Some(10),
        stories: 120,
        threads: Some(1),
        changes,
        ..Options::default()
    }
}

fn run(options: &Options, watch: &mut Watch<'_>) -> phalanx_demo::Result<Outcome> {
    let never = AtomicBool::new(false);
    phalanx_demo::run(options, watch.stop_after.and_then(|s| s.1).unwrap_or(&never), watch)
}

#[test]
fn from_nothing_to_a_model_that_others_can_open() {
    let dir = TempDir::new("whole");
    let mut watch = Watch::default();
    let outcome = run(&tiny(&dir.0), &mut watch).unwrap();

    assert_eq!((outcome.steps, watch.losses.len()), (10, 10));
    assert!(watch.losses[9] < watch.losses[0] - 0.5, "{:?}", watch.losses);
    let after = outcome.after.unwrap();
    assert!(after.starts_with(sample::PROMPT) && after != outcome.before, "{after}");
    for part in [
        "stories written by a grammar",
        "Before training",
        "The loss over 10 steps",
        "│",
        "Now it continues",
        "phalanx generate",
    ] {
        assert!(watch.text.contains(part), "without {part}:\n{}", watch.text);
    }
    for (what, path) in &outcome.files {
        assert!(path.exists(), "{what}: {}", path.display());
    }

    // The folder alone gives the sample again.
    let again = sample::sample_folder(&dir.0.join("model"), Some(2), 42, 280).unwrap();
    assert_eq!(again, after);
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.0.join("model/config.json")).unwrap()).unwrap();
    assert_eq!((config["model_type"].as_str(), config["hidden_size"].as_u64()), (Some("llama"), Some(32)));

    // It is done, and says so; nothing is touched.
    let refused = run(&tiny(&dir.0), &mut Watch::default()).unwrap_err();
    assert!(matches!(refused, DemoError::Finished { steps: 10, .. }), "{refused}");
    assert!(refused.to_string().contains("--continue") && refused.to_string().contains("--overwrite"));

    // It goes on, or starts anew and gives the same.
    let mut watch = Watch::default();
    let on = Options { existing: Existing::Continue, steps: Some(3), ..tiny(&dir.0) };
    let outcome = run(&on, &mut watch).unwrap();
    assert_eq!((outcome.steps, watch.losses.len()), (13, 3));
    let anew = Options { existing: Existing::Overwrite, threads: Some(2), ..tiny(&dir.0) };
    assert_eq!(run(&anew, &mut Watch::default()).unwrap().after, Some(after));
}

#[test]
fn stopped_and_started_again_it_ends_as_if_never_stopped() {
    let (whole, parts) = (TempDir::new("one go"), TempDir::new("two goes"));
    let mut straight = Watch::default();
    let reference = run(&tiny(&whole.0), &mut straight).unwrap();

    let stop = AtomicBool::new(false);
    let mut first = Watch { stop_after: Some((6, Some(&stop))), ..Watch::default() };
    let outcome = run(&tiny(&parts.0), &mut first).unwrap();
    assert!(outcome.interrupted.is_some() && outcome.after.is_none());
    assert_eq!(outcome.next.len(), 1, "{:?}", outcome.next);
    let look = folder::Folder::new(&parts.0).look().unwrap();
    assert!(matches!(look, folder::Contents::Stopped(6, _)), "{look:?}");

    let mut second = Watch::default();
    let outcome = run(&Options { steps: None, ..tiny(&parts.0) }, &mut second).unwrap();
    first.losses.extend(&second.losses);
    assert_eq!(first.losses, straight.losses);
    assert_eq!((outcome.after, outcome.steps), (reference.after, 10));
}

#[test]
fn minutes_become_steps() {
    let dir = TempDir::new("minutes");
    let options = Options { steps: None, minutes: Some(1e-6), ..tiny(&dir.0) };
    let outcome = run(&options, &mut Watch::default()).unwrap();
    assert_eq!((outcome.steps, outcome.total_steps), (10, 10));
    let written = std::fs::read_to_string(dir.0.join("demo.yaml")).unwrap();
    assert!(written.contains("\nmax_steps: 10\n"), "{written}");
}

#[test]
fn what_cannot_be_done_leaves_the_folder_alone() {
    let dir = TempDir::new("refused");
    let refused = |o: Options| run(&o, &mut Watch::default()).unwrap_err();
    let on = Options { existing: Existing::Continue, ..tiny(&dir.0) };
    assert!(matches!(refused(on), DemoError::NothingToContinue { .. }));
    let mut bad = tiny(&dir.0);
    bad.changes.set("learning_rat", json!(1));
    assert!(refused(bad).to_string().contains("learning_rate"));
    assert!(!dir.0.exists());
    std::fs::create_dir_all(&dir.0).unwrap();
    std::fs::write(dir.0.join("letter.txt"), "dear").unwrap();
    for existing in [Existing::Keep, Existing::Overwrite] {
        assert!(matches!(refused(Options { existing, ..tiny(&dir.0) }), DemoError::NotADemo { .. }));
    }
    assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1);
}
