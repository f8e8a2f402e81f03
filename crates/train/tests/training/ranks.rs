//! A run on several ranks is the run on one, and a checkpoint of any layout goes on in any other.

use crate::common::{Bench, metrics, run, weights};

/// Twelve rows a step, whatever the mesh: 2 a micro-batch.
const MESHES: [(&str, &str); 12] = [
    ("{dp_shard: 2}", "3"),
    ("{dp_shard: 3}", "2"),
    ("{dp_replicate: 2}", "3"),
    ("{dp_replicate: 2, dp_shard: 3}", "1"),
    ("{tp: 2}", "6"),
    ("{tp: 4, dp_shard: 2}", "3"),
    ("{cp: 2}", "6"),
    ("{cp: 3, dp_shard: 2}", "3"),
    ("{pp: 2, cp: 2, dp_replicate: 2}", "3"),
    ("{pp: 2}", "6"),
    ("{pp: 2, dp_shard: 3}", "2"),
    ("{pp: 2, dp_replicate: 3}", "2"),
];

fn keys(mesh: &str, accumulation: &str) -> String {
    format!("mesh: {mesh}\ngradient_accumulation_steps: {accumulation}\n")
}

/// Losses, norms and weights of two runs, equal but for rounding.
fn assert_close(bench: &Bench, one: &str, other: &str) {
    let (a, b) = (metrics(&bench.out(one)), metrics(&bench.out(other)));
    assert_eq!(a.len(), b.len(), "{other}");
    for (x, y) in a.iter().zip(&b) {
        assert_eq!((x[0], x[3]), (y[0], y[3]), "{other}");
        for i in 1..3 {
            assert!((x[i] - y[i]).abs() <= 2e-5 * x[i].abs(), "{other}: step {}: {x:?} {y:?}", x[0]);
        }
    }
    for ((name, x), (_, y)) in weights(&bench.out(one)).iter().zip(&weights(&bench.out(other))) {
        let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|d| f64::from(d).powi(2)).sum::<f64>().sqrt();
        let (difference, size) = (norm(&mut x.iter().zip(y).map(|(a, b)| a - b)), norm(&mut x.iter().copied()));
        assert!(x.len() == y.len() && difference <= 1e-4 * size, "{other}: {name}: {difference:e} of {size:e}");
    }
}

/// 31 rows: the last window of an epoch is short, and some ranks have nothing in it.
#[test]
fn every_mesh_trains_the_same_model() {
    let common =
        "num_train_epochs: 2\nval_size: 5\neval_strategy: steps\neval_steps: 2\nper_device_eval_batch_size: 2\n";
    let bench = Bench::new("ranks", 36);
    let (one, seen) = run(bench.config("one", &format!("{common}{}", keys("{}", "6"))), None).unwrap();
    for (i, (mesh, accumulation)) in MESHES.iter().enumerate() {
        let out = format!("mesh-{i}");
        let (f, s) = run(bench.config(&out, &format!("{common}{}", keys(mesh, accumulation))), None).unwrap();
        assert_eq!(s.samples, seen.samples, "{mesh}");
        assert_eq!((f.state.tokens, f.state.label_tokens), (one.state.tokens, one.state.label_tokens), "{mesh}");
        let (a, b) = (one.eval_loss.unwrap(), f.eval_loss.unwrap());
        assert!((a - b).abs() <= 1e-5 * a, "{mesh}: evaluation {a} {b}");
        assert_close(&bench, "one", &out);
    }
}

#[test]
fn a_checkpoint_of_one_layout_goes_on_in_another() {
    let bench = Bench::new("relayout", 31);
    let bf16 = "bf16: true\n";
    let go = |out: &str, mesh: &str, accumulation: &str, stop| {
        run(bench.config(out, &format!("{bf16}{}", keys(mesh, accumulation))), stop).unwrap()
    };
    go("one", "{}", "6", None);
    for (mesh, accumulation, stop) in [("{dp_shard: 3}", "2", Some(1)), ("{pp: 2}", "6", Some(3)), ("{}", "6", None)] {
        go("parts", mesh, accumulation, stop);
    }
    assert_close(&bench, "one", "parts");
}

#[test]
fn adapters_over_a_sharded_base() {
    let bench = Bench::new("ranks-lora", 31);
    let lora = "finetuning_type: lora\nlora_rank: 4\nlora_dropout: 0.2\n";
    run(bench.config("one", &format!("{lora}{}", keys("{}", "6"))), None).unwrap();
    run(bench.config("two", &format!("{lora}{}", keys("{dp_shard: 2}", "3"))), None).unwrap();
    assert_close(&bench, "one", "two");
    run(bench.config("three", &format!("{lora}{}", keys("{cp: 2, dp_replicate: 2}", "3"))), None).unwrap();
    assert_close(&bench, "one", "three");
}

#[test]
fn what_cannot_be_is_said_before_anything_starts() {
    let bench = Bench::new("ranks-refused", 12);
    let refused = |keys: &str| run(bench.config("out", keys), None).unwrap_err().to_string();
    assert!(refused("mesh: {dp: 2}\n").contains("dp_shard"));
    assert!(refused("mesh: {dp_shard: 0}\n").contains("dp_shard"));
    assert!(refused("mesh: {pp: 3}\n").contains("2 layers"), "{}", refused("mesh: {pp: 3}\n"));
    assert!(refused("mesh: {pp: 2}\nfinetuning_type: lora\n").contains("pipeline stages"));
    assert!(refused("mesh: {ep: 2, dp_shard: 2}\n").contains("ep"));
    assert!(refused("mesh: {tp: 3}\n").contains("heads"), "{}", refused("mesh: {tp: 3}\n"));
    assert!(refused("mesh: {pp: 2, tp: 2}\n").contains("yet"));
    assert!(refused("mesh: {cp: 2, tp: 2}\n").contains("yet"));
    assert!(!bench.out("out").join("metrics.jsonl").exists());
}
