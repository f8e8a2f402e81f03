//! Frozen parts stay as they are, and cost no optimizer state.

use phalanx_formats::WeightFolder;
use phalanx_models::StoredDType;
use phalanx_train::job::{Job, Use};

use crate::common::{Bench, bits, run, weights, write_model};

fn trained(keys: &str) -> Vec<String> {
    let bench = Bench::new("freeze", 8);
    std::fs::remove_dir_all(bench.out("model")).unwrap();
    write_model(&bench.out("model"), 4, false, StoredDType::F32);
    let keys = format!("{keys}weight_decay: 0.5\ndecay_norms_and_biases: true\nsave_steps: 2\n");
    run(bench.config("out", &keys), None).unwrap();
    let (before, after) = (weights(&bench.out("model")), weights(&bench.out("out")));
    assert_eq!(before.len(), after.len());
    let moved: Vec<String> = before
        .iter()
        .filter(|(n, x)| bits(x) != bits(&after.iter().find(|(m, _)| m == n).unwrap().1))
        .map(|(n, _)| n.clone())
        .collect();
    // State for exactly what moved.
    let state = WeightFolder::open_file(bench.out("out").join("checkpoint-2/optimizer.safetensors")).unwrap();
    let mut with_state: Vec<String> =
        state.names().filter_map(|n| n.strip_suffix("/exp_avg")).map(str::to_owned).collect();
    with_state.sort();
    let mut sorted = moved.clone();
    sorted.sort();
    assert_eq!(sorted, with_state);
    moved
}

#[test]
fn the_last_layers_or_the_first_or_parts_of_them() {
    let last = trained("finetuning_type: freeze\nfreeze_trainable_layers: 2\n");
    assert!(last.iter().all(|n| n.starts_with("model.layers.2.") || n.starts_with("model.layers.3.")), "{last:?}");
    assert_eq!(last.len(), 18);
    let first = trained("finetuning_type: freeze\nfreeze_trainable_layers: -1\nfreeze_trainable_modules: mlp\n");
    assert!(first.iter().all(|n| n.starts_with("model.layers.0.mlp.")), "{first:?}");
    assert_eq!(first.len(), 3);
    let more = trained("finetuning_type: freeze\nfreeze_trainable_layers: 1\nfreeze_extra_modules: lm_head,norm\n");
    assert!(more.contains(&"lm_head.weight".to_owned()) && more.contains(&"model.norm.weight".to_owned()), "{more:?}");
}

#[test]
fn by_plan() {
    let moved = trained("plan: {freeze: [model.embed_tokens, 'model.layers.{0-2}', lm_head]}\n");
    assert!(moved.iter().all(|n| n.starts_with("model.layers.3.") || n == "model.norm.weight"), "{moved:?}");
}

#[test]
fn numbers_of_layers_and_tied_heads_that_do_not_fit_are_told() {
    let bench = Bench::new("freeze-refused", 4);
    let refused = |keys: &str| match Job::prepare(bench.config("out", keys), Use::Train) {
        Ok(_) => panic!("{keys} was accepted"),
        Err(e) => e.to_string(),
    };
    for n in ["3", "-3"] {
        let e = refused(&format!("finetuning_type: freeze\nfreeze_trainable_layers: {n}\n"));
        assert!(e.contains("freeze_trainable_layers") && e.contains("2 blocks"), "{e}");
    }
    let e = refused("finetuning_type: freeze\nfreeze_trainable_layers: 1\nfreeze_trainable_modules: nlp\n");
    assert!(e.contains("nlp") && e.contains("matches no module"), "{e}");
    std::fs::remove_dir_all(bench.out("model")).unwrap();
    write_model(&bench.out("model"), 2, true, StoredDType::F32);
    let e = refused("plan: {freeze: lm_head}\n");
    assert!(e.contains("tied") && e.contains("model.embed_tokens") && e.contains("lm_head"), "{e}");
    Job::prepare(bench.config("out", "plan: {freeze: [lm_head, model.embed_tokens]}\n"), Use::Train).unwrap();
}
