//! A run that is stopped, or killed, and goes on is the run that was never stopped, to the bit.

use std::path::Path;
use std::process::{Command, Stdio};

use phalanx_config::Config;

use crate::common::{Bench, assert_same_weights, metrics, run};

/// Losses, norms and rates of the whole run, then again with two stops, each part on another number of threads.
fn stopped_twice(name: &str, keys: &str, stops: [u64; 2]) {
    let bench = Bench::new(name, 20);
    let (whole, seen) = run(bench.config("whole", keys), None).unwrap();
    assert!(stops[1] < whole.total_steps, "{}", whole.total_steps);
    let mut samples = vec![];
    for (threads, stop) in [(3, Some(stops[0])), (1, Some(stops[1])), (2, None)] {
        let keys = format!("{keys}threads: {threads}\n");
        let (part, seen) = run(bench.config("parts", &keys), stop).unwrap();
        assert_eq!(part.interrupted.is_some(), stop.is_some());
        samples.extend(seen.samples);
        if stop.is_none() {
            assert_eq!(part.state.step, whole.state.step);
            assert_eq!((part.state.tokens, part.state.label_tokens), (whole.state.tokens, whole.state.label_tokens));
            assert_eq!((part.state.moment, part.state.updates), (whole.state.moment, whole.state.updates));
        }
    }
    assert_eq!(samples, seen.samples, "every sample once, in the same order");
    let (a, b) = (metrics(&bench.out("whole")), metrics(&bench.out("parts")));
    assert!(!a.is_empty());
    assert_eq!(a, b);
    assert_same_weights(&bench.out("whole"), &bench.out("parts"));
}

/// 20 rows, 2 a micro-batch, 3 micro-batches a step: 4 steps an epoch, the last of one micro-batch.
#[test]
fn full_training() {
    stopped_twice("resume-full", "", [2, 6]);
}

#[test]
fn at_the_end_of_an_epoch_and_after_the_first_step() {
    stopped_twice("resume-edges", "", [1, 4]);
}

#[test]
fn adapters_with_dropout() {
    let keys = "finetuning_type: lora\nlora_rank: 4\nlora_dropout: 0.2\nadditional_target: lm_head\n";
    stopped_twice("resume-lora", keys, [3, 5]);
}

#[test]
fn bf16_with_packing_and_recompute() {
    let keys = "bf16: true\npacking: true\nplan: {recompute: 'model.layers.{*}'}\nper_device_train_batch_size: 1\n\
                gradient_accumulation_steps: 2\nnum_train_epochs: 3\n";
    stopped_twice("resume-bf16", keys, [2, 5]);
}

/// The scales of a step follow from the steps before it, also those before a stop; evaluations in between leave them alone.
#[test]
fn fp8_with_delayed_scales() {
    let keys = "plan: {arithmetic: fp8_delayed, recompute: 'model.layers.{*}'}\nval_size: 4\neval_strategy: steps\neval_steps: 1\n";
    stopped_twice("resume-delayed", keys, [2, 4]);
}

#[test]
fn frozen_layers_and_entries_over_several_steps() {
    let keys = "finetuning_type: freeze\nfreeze_trainable_layers: 1\nlogging_steps: 3\nlr_scheduler_type: cosine\nwarmup_steps: 2\n";
    stopped_twice("resume-freeze", keys, [2, 7]);
}

#[test]
fn plain_text() {
    let bench = Bench::new("resume-text", 2);
    let text = (0..60).map(|i| format!("line {i} of a tale about {} birds. ", i * i % 17)).collect::<String>();
    std::fs::write(bench.out("tale.txt"), text).unwrap();
    let keys = format!(
        "stage: pt\ntemplate: DROP\ndataset: {}\ncutoff_len: 32\nper_device_train_batch_size: 4\nlearning_rate: 3e-3\n",
        bench.out("tale.txt").display()
    );
    run(bench.config("whole", &keys), None).unwrap();
    let half = metrics(&bench.out("whole")).len() as u64 / 2 + 1;
    run(bench.config("parts", &keys), Some(half)).unwrap();
    run(bench.config("parts", &keys), None).unwrap();
    assert_eq!(metrics(&bench.out("whole")), metrics(&bench.out("parts")));
    assert_same_weights(&bench.out("whole"), &bench.out("parts"));
}

#[test]
fn on_a_merged_base() {
    let bench = Bench::new("resume-merged", 20);
    let lora = "finetuning_type: lora\nlora_rank: 4\nlearning_rate: 3e-2\n";
    run(bench.config("first", lora), None).unwrap();
    let first = bench.out("first").display().to_string();
    let new = format!("{lora}create_new_adapter: true\nadapter_name_or_path: {first}\n");
    let (_, whole) = run(bench.config("whole", &new), None).unwrap();
    run(bench.config("parts", &new), Some(3)).unwrap();
    run(bench.config("parts", &new), None).unwrap();
    assert_eq!(metrics(&bench.out("whole")), metrics(&bench.out("parts")));
    assert_same_weights(&bench.out("whole"), &bench.out("parts"));
    assert!(whole.steps.len() == 8);
}

/// Runs one training in this process; the tests below start this binary again with it and kill it.
#[test]
#[ignore = "the child of tests that kill it; does nothing by itself"]
fn child() {
    let path = Path::new("run.yaml");
    if path.exists() {
        run(Config::load(path, &[]).unwrap(), None).unwrap();
    }
}

/// A child that trains by the configuration file `run.yaml`, from whose folder it starts.
pub fn spawn(yaml: &Path) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["resume::child", "--exact", "--ignored"])
        .current_dir(yaml.parent().unwrap())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn lines(out: &Path) -> usize {
    std::fs::read(out.join("metrics.jsonl")).map_or(0, |b| b.iter().filter(|&&c| c == b'\n').count())
}

/// Killed after some log lines, three times; then run to the end.
fn killed(name: &str, keys: &str, at: [usize; 3]) {
    let bench = Bench::new(name, 20);
    let keys = format!("{keys}save_steps: 2\nsave_total_limit: 2\n");
    let (whole, _) = run(bench.config("whole", &keys), None).unwrap();
    assert!((at[2] as u64) < whole.total_steps - 1, "{}", whole.total_steps);
    let out = bench.out("parts");
    std::fs::write(bench.out("run.yaml"), bench.yaml("parts", &keys)).unwrap();
    for at in at {
        let mut child = spawn(&bench.out("run.yaml"));
        while lines(&out) < at && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert!(!status.success() || lines(&out) as u64 == whole.total_steps);
    }
    assert!(spawn(&bench.out("run.yaml")).wait().unwrap().success());
    assert_eq!(metrics(&bench.out("whole")), metrics(&out));
    assert_same_weights(&bench.out("whole"), &out);
}

/// 24 steps, epochs end at 4, 8, …: killed in the first, third and fifth.
#[test]
fn killed_with_adapters() {
    killed("killed-lora", "finetuning_type: lora\nlora_rank: 4\nlora_dropout: 0.1\nnum_train_epochs: 6\n", [3, 10, 17]);
}

#[test]
fn killed_in_bf16_with_packing() {
    let keys = "bf16: true\npacking: true\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nnum_train_epochs: 6\n";
    killed("killed-bf16", keys, [3, 7, 11]);
}
