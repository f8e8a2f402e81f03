//! Steps whose numbers are none.

use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_report::Step;
use phalanx_tensor::Category;
use phalanx_train::trainer::{Finished, Observer, train};

use crate::common::{Bench, metrics, prepared, value, weights};

/// Poisons a weight after step `at`, and heals it after `heal`.
struct Poison {
    param: phalanx_nn::Parameter,
    rt: phalanx_tensor::Runtime,
    at: u64,
    heal: u64,
    kept: Vec<f32>,
    steps: Vec<(u64, f64)>,
    messages: Vec<String>,
}

impl Observer for Poison {
    fn message(&mut self, text: &str) {
        self.messages.push(text.into());
    }
    fn step(&mut self, s: &Step, _logged: bool) {
        self.steps.push((s.step, s.loss));
        let set = |values: &[f32]| {
            let t = self.rt.from_f32(self.param.shape(), values, Category::Weights).unwrap();
            self.param.set(t).unwrap();
        };
        if s.step == self.at {
            self.kept = value(&self.param);
            let mut bad = self.kept.clone();
            bad[3] = f32::INFINITY;
            set(&bad);
        } else if s.step == self.heal {
            set(&self.kept);
        }
    }
}

fn poisoned(keys: &str, at: u64, heal: u64) -> (phalanx_train::Result<Finished>, Poison, Bench) {
    let bench = Bench::new("poison", 12);
    let (mut job, data) =
        prepared(bench.config("out", &format!("num_train_epochs: 4\nsave_steps: 2\n{keys}"))).unwrap();
    let param = job.model.parameters().into_iter().find(|p| p.name().ends_with("1.mlp.down_proj.weight")).unwrap();
    let mut watch = Poison { param, rt: job.rt.clone(), at, heal, kept: vec![], steps: vec![], messages: vec![] };
    let stop = AtomicBool::new(false);
    let outcome = train(&mut job, data.train, None, &phalanx_train::resume::Start::default(), &stop, &mut watch);
    assert!(!stop.load(Ordering::Relaxed));
    (outcome, watch, bench)
}

#[test]
fn broken_steps_are_skipped_and_counted() {
    let (finished, watch, bench) = poisoned("", 2, 4);
    let finished = finished.unwrap();
    assert_eq!((finished.state.step, finished.state.skipped, finished.state.updates), (8, 2, 6));
    assert_eq!(watch.messages.iter().filter(|m| m.contains("no update")).count(), 2, "{:?}", watch.messages);
    let lines = metrics(&bench.out("out"));
    let steps: Vec<f64> = lines.iter().map(|l| l[0]).collect();
    assert_eq!(steps, [1., 2., 5., 6., 7., 8.], "a skipped step has no loss");
    let all = std::fs::read_to_string(bench.out("out").join("metrics.jsonl")).unwrap();
    assert_eq!(all.lines().count(), 8, "but an entry");
    assert!(weights(&bench.out("out")).iter().all(|(_, v)| v.iter().all(|x| x.is_finite())));
}

#[test]
fn a_run_that_stays_broken_stops_after_n_steps_and_says_where_to_go_on() {
    let (outcome, watch, _bench) = poisoned("max_skipped_steps: 3\n", 2, 99);
    let e = outcome.unwrap_err().to_string();
    assert!(e.contains("3 times in a row") && e.contains("checkpoint-2") && e.contains("learning_rate"), "{e}");
    assert_eq!(watch.steps.len(), 4, "two good steps, two skipped ones, and the third ends it");
}

#[test]
fn without_the_guard_everything_passes() {
    let (finished, watch, bench) = poisoned("nan_guard: false\nsave_steps: 100\n", 6, 99);
    assert_eq!(finished.unwrap().state.skipped, 0);
    assert!(!watch.steps.last().unwrap().1.is_finite());
    // What is saved then can be read again.
    assert_eq!(phalanx_train::checkpoint::read_state(&bench.out("out").join("checkpoint-8")).unwrap().step, 8);
}
