//! Any layout gives the numbers of one rank.

use phalanx_models::ModelConfig;
use phalanx_train::layouts::{chosen, verify};
use serde_json::{Value, json};

fn dense(tied: bool) -> ModelConfig {
    let config: Value = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 103, "hidden_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 44, "tie_word_embeddings": tied, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu", "initializer_range": 0.2, "attention_bias": false, "dtype": "float32"
    });
    ModelConfig::from_json("dense", config).unwrap()
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
fn data_parallel_layouts() {
    all_pass(&dense(true), 6, "");
}

#[test]
fn with_a_head_of_its_own() {
    all_pass(&dense(false), 3, "");
}
