//! Any layout gives the numbers of one rank.

use phalanx_models::ModelConfig;
use phalanx_train::layouts::{chosen, tiny_models, verify};
use serde_json::Value;

/// The tiny dense model; its head tied to the embedding, or not.
fn dense(tied: bool) -> ModelConfig {
    let (_, config) = tiny_models().unwrap().swap_remove(0);
    let mut raw = Value::Object(config.raw.clone());
    raw["tie_word_embeddings"] = tied.into();
    ModelConfig::from_json("dense", raw).unwrap()
}

fn all_pass(config: &ModelConfig, ranks: usize, only: &str) {
    let cases = chosen(config, ranks, only).unwrap();
    let mut failed = vec![];
    let results = verify(config, &cases, &mut |r| {
        if !r.pass {
            failed.push(format!("{r:#?}"));
        }
    })
    .unwrap();
    assert_eq!(results.len(), cases.len());
    assert!(failed.is_empty(), "{} of {} layouts:\n{}", failed.len(), cases.len(), failed.join("\n"));
}

#[test]
fn every_layout_of_up_to_six_ranks() {
    all_pass(&dense(true), 6, "");
}

#[test]
fn with_experts_and_with_latent_attention() {
    for (name, config) in tiny_models().unwrap().split_off(1) {
        println!("{name}");
        all_pass(&config, 4, "");
    }
}

#[test]
fn with_a_head_of_its_own() {
    all_pass(&dense(false), 4, "");
}
