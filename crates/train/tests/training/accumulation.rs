//! Any split of a window into micro-batches is one big batch.

use phalanx_tensor::{DType, Runtime};
use phalanx_testkit::rel_norm;
use phalanx_train::optimizer::{AdamW, AdamWOptions, clip_factor};
use phalanx_train::step::{LossCount, forward_backward};

use crate::common::{Bench, batch, clear, env, grads, model, run, value};

/// Eight documents; from one counted token to all of many.
const DOCS: [(usize, usize); 8] = [(9, 1), (31, 31), (5, 2), (12, 12), (40, 3), (7, 7), (22, 1), (17, 16)];

/// Loss, gradients by name, and weights after an update.
type Outcome = (LossCount, Vec<(String, Vec<f32>)>, Vec<Vec<f32>>);

fn split(sizes: &[usize]) -> Outcome {
    let rt = Runtime::new(1);
    let m = model(&rt, 2, false);
    let params = m.parameters();
    let options = AdamWOptions { beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1, decay_norms_and_biases: false };
    let mut optimizer = AdamW::new(&rt, &params, &|_| DType::F32, options).unwrap();
    let all = batch(&DOCS, 1);
    let (mut sum, mut at) = (LossCount::default(), 0);
    for &n in sizes {
        let docs: Vec<(u64, Vec<u32>, Vec<bool>)> = (at..at + n)
            .map(|d| {
                let ids = all.ids[all.docs[d].clone()].to_vec();
                let (len, trained) = DOCS[d];
                (d as u64, ids, (0..len).map(|t| t >= len - trained).collect())
            })
            .collect();
        let part =
            phalanx_data::Batch::from_documents(docs.iter().map(|(i, ids, on)| (*i, ids.as_slice(), on.as_slice())));
        sum.add(forward_backward(&m, &env(&rt, &part), &part).unwrap());
        at += n;
    }
    assert_eq!(at, 8);
    let g = grads(&params);
    let n = sum.count as f64;
    let norm = optimizer.grad_norm(&rt).unwrap() / n;
    optimizer.step(&rt, 1e-2, (clip_factor(norm, 0.5) / n) as f32).unwrap();
    (sum, g, params.iter().map(value).collect())
}

#[test]
fn every_split_gives_the_loss_gradients_and_update_of_one_batch() {
    let (one, grads_one, update_one) = split(&[8]);
    assert_eq!(one.count, DOCS.iter().map(|d| d.1.min(d.0 - 1) as u64).sum::<u64>());
    for sizes in [&[1usize; 8][..], &[3, 3, 2], &[7, 1]] {
        let (sum, g, update) = split(sizes);
        assert_eq!(sum.count, one.count);
        assert!((sum.sum - one.sum).abs() <= 1e-6 * one.sum, "{sizes:?}: {} and {}", sum.sum, one.sum);
        for ((name, a), (_, b)) in g.iter().zip(&grads_one) {
            assert!(rel_norm(a, b) <= 1e-6, "{sizes:?} {name}: {}", rel_norm(a, b));
        }
        for (a, b) in update.iter().zip(&update_one) {
            assert!(rel_norm(a, b) <= 1e-6, "{sizes:?}: {}", rel_norm(a, b));
        }
    }
}

#[test]
fn a_micro_batch_without_targets_adds_nothing() {
    let rt = Runtime::new(1);
    let m = model(&rt, 2, false);
    let params = m.parameters();
    let (full, masked) = (batch(&[(12, 5), (9, 9)], 3), batch(&[(8, 0), (20, 0)], 4));
    let alone = forward_backward(&m, &env(&rt, &full), &full).unwrap();
    let want = grads(&params);
    clear(&params);
    let mut sum = LossCount::default();
    for b in [&masked, &full, &masked] {
        sum.add(forward_backward(&m, &env(&rt, b), b).unwrap());
    }
    assert_eq!(sum, alone);
    assert_eq!(grads(&params), want);
    clear(&params);
    // A whole window without targets: a loss of 0 over 0, no gradient at all, nothing that is not a number.
    let none = forward_backward(&m, &env(&rt, &masked), &masked).unwrap();
    assert_eq!((none.sum, none.count, none.mean()), (0.0, 0, 0.0));
    assert!(grads(&params).is_empty());
    let options = AdamWOptions { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, decay_norms_and_biases: false };
    let optimizer = AdamW::new(&rt, &params, &|_| DType::F32, options).unwrap();
    assert_eq!(optimizer.grad_norm(&rt).unwrap(), 0.0);
}

/// Through the trainer: 8 rows are one step an epoch however they are cut, the last micro-batch being short.
#[test]
fn runs_agree_however_the_window_is_cut() {
    let bench = Bench::new("windows", 8);
    let keys = "disable_shuffling: true\nnum_train_epochs: 3\nmax_grad_norm: 0.5\n";
    let run = |name: &str, batch: usize, windows: usize| {
        let keys = format!("{keys}per_device_train_batch_size: {batch}\ngradient_accumulation_steps: {windows}\n");
        let (finished, watch) = run(bench.config(name, &keys), None).unwrap();
        assert_eq!(finished.state.step, 3, "{name}");
        watch.steps
    };
    let want = run("whole", 8, 1);
    for (name, batch, windows) in [("ones", 1, 8), ("threes", 3, 3), ("pairs", 2, 4), ("long", 3, 50)] {
        for (a, b) in run(name, batch, windows).iter().zip(&want) {
            assert!((a.1 - b.1).abs() <= 1e-5 * b.1, "{name} step {}: loss {} and {}", a.0, a.1, b.1);
            assert!((a.2 - b.2).abs() <= 1e-4 * b.2, "{name} step {}: norm {} and {}", a.0, a.2, b.2);
        }
    }
}
