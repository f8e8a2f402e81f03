//! Checkpoints are whole or not there, and no more of them than asked for.

use std::path::Path;
use std::time::Duration;

use phalanx_formats::WeightFolder;
use phalanx_train::checkpoint::{self, list, read_state};

use crate::common::{Bench, assert_same_weights, metrics, run};
use crate::resume::spawn;

/// Everything of a checkpoint can be read.
fn assert_whole(dir: &Path) {
    let state = read_state(dir).unwrap();
    assert!(dir.ends_with(format!("checkpoint-{}", state.step)));
    let model = WeightFolder::open(dir).unwrap();
    let optimizer = WeightFolder::open_file(dir.join("optimizer.safetensors")).unwrap();
    assert_eq!(optimizer.names().count(), 2 * model.names().count());
    for name in optimizer.names() {
        assert!(optimizer.get(name).unwrap().first_non_finite().unwrap().is_none());
    }
}

/// Kills a run that saves after every step, again and again; each time it goes on from the last whole checkpoint.
fn killed(times: u32) {
    let bench = Bench::new("save-kills", 6);
    let keys = format!(
        "num_train_epochs: {}\nsave_steps: 1\nsave_total_limit: 2\nper_device_train_batch_size: 1\n",
        times / 2
    );
    let out = bench.out("out");
    std::fs::write(bench.out("run.yaml"), bench.yaml("out", &keys)).unwrap();
    let mut draw = 12345u64;
    let (mut last, mut stale) = (0, 0);
    for kill in 0..times {
        let mut child = spawn(&bench.out("run.yaml"));
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // From before the first step to the middle of some save.
        std::thread::sleep(Duration::from_millis(20 + (draw >> 33) % 180));
        // However slow the machine is: some of them get as far as a checkpoint.
        while kill % 4 == 0 && list(&out).is_empty() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        if let Some(status) = ended {
            let mut text = String::new();
            std::io::Read::read_to_string(child.stderr.as_mut().unwrap(), &mut text).unwrap();
            assert!(status.success(), "{text}");
        }
        // Not only those with a state: a folder of that name is whole, always.
        let found = checkpoint::all(&out);
        for (step, dir) in &found {
            assert_whole(dir);
            assert!(*step >= last || found.len() > 1);
        }
        let now = found.last().map_or(0, |(s, _)| *s);
        assert!(now >= last, "went back from {last} to {now}");
        last = now;
        if out.exists() {
            stale += std::fs::read_dir(&out).unwrap().filter(|e| name(e).starts_with(".tmp-")).count();
        }
    }
    assert!(last > 0, "no run came as far as a save");
    println!("{times} kills: {last} steps, {stale} left-overs of saves");
    assert!(spawn(&bench.out("run.yaml")).wait().unwrap().success());
    let left: Vec<String> =
        std::fs::read_dir(&out).unwrap().map(|e| name(&e)).filter(|n| n.starts_with(".tmp-")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(list(&out).len(), 2);
    run(bench.config("whole", &keys.replace("save_steps: 1\n", "save_steps: 100000\n")), None).unwrap();
    assert_eq!(metrics(&bench.out("whole")), metrics(&out));
    assert_same_weights(&bench.out("whole"), &out);
}

fn name(e: &std::io::Result<std::fs::DirEntry>) -> String {
    e.as_ref().unwrap().file_name().to_string_lossy().into_owned()
}

#[test]
fn killed_at_random_moments() {
    killed(40);
}

#[test]
#[ignore = "a minute: 200 kills, for the nightly run"]
fn killed_at_random_moments_often() {
    killed(200);
}

fn steps(out: &Path) -> Vec<u64> {
    checkpoint::all(out).into_iter().map(|(s, _)| s).collect()
}

#[test]
fn the_last_k_stay_and_the_best() {
    let bench = Bench::new("limit", 20);
    run(bench.config("plain", "save_steps: 1\nsave_total_limit: 3\n"), None).unwrap();
    assert_eq!(steps(&bench.out("plain")), [6, 7, 8]);
    // A rate that ruins the model: the best evaluation is an early one.
    let keys = "save_steps: 1\nsave_total_limit: 2\neval_strategy: steps\neval_steps: 1\nval_size: 4\n\
                load_best_model_at_end: true\nlearning_rate: 0.5\nlr_scheduler_type: constant\nmax_grad_norm: 0\n";
    let (finished, _) = run(bench.config("best", keys), None).unwrap();
    let (_, best) = finished.state.best.unwrap();
    let last = finished.state.step;
    assert!(best < last - 1, "best at {best} of {last}");
    assert_eq!(steps(&bench.out("best")), [best, last - 1, last]);
    // What lies in the output folder is the best model.
    assert_same_weights(&bench.out("best"), &bench.out("best").join(format!("checkpoint-{best}")));
    assert!(!bench.out("best").join("optimizer.safetensors").exists());
}

#[test]
fn the_best_is_one_that_was_saved() {
    let bench = Bench::new("best-saved", 20);
    // Evaluated at every step, saved at every third: the best evaluation of all (the first) has no checkpoint.
    let keys = "save_steps: 3\nsave_total_limit: 1\neval_strategy: steps\neval_steps: 1\nval_size: 4\n\
                load_best_model_at_end: DROP\nlearning_rate: 0.5\nlr_scheduler_type: constant\nmax_grad_norm: 0\n";
    let (finished, _) = run(bench.config("out", keys), None).unwrap();
    let (_, best) = finished.state.best.unwrap();
    assert!(
        bench.out("out").join(format!("checkpoint-{best}")).is_dir(),
        "best at {best}: {:?}",
        steps(&bench.out("out"))
    );
}

#[test]
fn an_interrupted_run_can_go_on_whatever_it_was_to_keep() {
    let bench = Bench::new("interrupted", 20);
    let keys = "save_strategy: no\nsave_steps: DROP\nsave_only_model: DROP\n";
    run(bench.config("out", keys), Some(3)).unwrap();
    let keys = format!("{keys}overwrite_output_dir: true\nresume_from_checkpoint: true\n");
    let (finished, _) = run(bench.config("out", &keys), None).unwrap();
    assert_eq!(finished.state.step, finished.total_steps);
    let only = "save_steps: 100\nsave_only_model: true\n";
    run(bench.config("only", only), Some(3)).unwrap();
    let (finished, _) = run(bench.config("only", &format!("{only}resume_from_checkpoint: true\n")), None).unwrap();
    assert_eq!(finished.state.step, finished.total_steps);
}

#[test]
fn models_without_optimizer_are_limited_too_and_cannot_be_gone_on_from() {
    let bench = Bench::new("only-model", 20);
    let keys = "save_steps: 1\nsave_total_limit: 2\nsave_only_model: true\n";
    run(bench.config("out", keys), None).unwrap();
    assert_eq!(steps(&bench.out("out")), [7, 8]);
    for resume in ["true".to_owned(), bench.out("out").join("checkpoint-8").display().to_string()] {
        let e = run(bench.config("out", &format!("{keys}resume_from_checkpoint: {resume}\n")), None)
            .unwrap_err()
            .to_string();
        assert!(e.contains("save_only_model"), "{e}");
    }
}
