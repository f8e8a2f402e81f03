//! Any layout gives the numbers of one rank.

use phalanx_models::ModelConfig;
use phalanx_train::layouts::{chosen, tiny_models, verify};
use serde_json::{Value, json};

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

/// Six query heads over three key heads, biases everywhere (those of row layers too), no norms of heads.
fn biased() -> ModelConfig {
    let config: Value = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101, "hidden_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
        "intermediate_size": 42, "tie_word_embeddings": false, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu", "initializer_range": 0.2, "attention_bias": true, "mlp_bias": true, "dtype": "float32"
    });
    ModelConfig::from_json("biased", config).unwrap()
}

#[test]
fn with_biases_and_three_key_heads() {
    all_pass(&biased(), 6, "tp");
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
