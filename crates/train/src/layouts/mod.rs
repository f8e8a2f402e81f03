//! `verify layouts`: a model on one rank and on every layout that fits, number by number.
//!
//! # Why
//! What goes wrong in distributed training is silent: a gradient that misses one sum, a norm that counts a shard twice, a loss divided by the
//! wrong count. The curve still looks plausible. So every layout must give the numbers of one rank: loss, norm, *every* gradient, the weights
//! after five clipped steps of AdamW, and the tokens it read. And it must not move more than it has to: calls and bytes of every group are
//! counted and compared with the formulas.
//!
//! The data hides nothing: packs of up to three documents of very different lengths, few labels here and many there, a document without any, two
//! micro-batches a step, and ranks that get nothing.

mod cases;
mod compare;
mod context;
mod data;
mod formula;
mod formula_tensor;
mod run;

use phalanx_comm::MeshShape;
use phalanx_models::ModelConfig;
use phalanx_parallel::ParallelPlan;
use serde::Serialize;
use serde_json::json;

use crate::{Result, TrainError};

pub use cases::cases;

/// A layout to be verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// How it is called in the table.
    pub name: String,
    /// The mesh.
    pub mesh: MeshShape,
    /// What else there is to choose.
    pub plan: ParallelPlan,
    /// Micro-batches a step.
    pub micro_batches: usize,
    /// Whether blocks are forgotten after forward and run again in backward.
    pub recompute: bool,
}

/// What a layout gave, beside one rank.
#[derive(Clone, Debug, Serialize)]
pub struct LayoutResult {
    /// Its name.
    pub layout: String,
    /// Ranks.
    pub world: usize,
    /// Largest relative difference of a step's loss.
    pub loss_rel: f64,
    /// Relative difference of the first step's gradient norm.
    pub norm_rel: f64,
    /// Largest ‖Δgrad‖ / ‖grad‖ over parameters, in the first step.
    pub grad_rel_max: f64,
    /// The parameter it belongs to.
    pub grad_worst: String,
    /// Largest ‖Δw‖ / ‖w‖ over parameters, after all steps.
    pub weights_rel_max: f64,
    /// The parameter it belongs to.
    pub weights_worst: String,
    /// Whether the same tokens were read and the same targets counted.
    pub tokens_equal: bool,
    /// Whether parts that several ranks hold are equal to the bit, and every element is somewhere.
    pub replicas_equal: bool,
    /// Whether every group made the calls of the formula.
    pub collectives_ok: bool,
    /// Whether every group moved the bytes of the formula.
    pub bytes_ok: bool,
    /// Whether parameters, gradients and moments of every rank have the bytes of the formula.
    pub memory_ok: bool,
    /// Bytes that all ranks sent in all groups, a step.
    pub bytes_a_step: u64,
    /// What is wrong, in words; empty if nothing is.
    pub faults: Vec<String>,
    /// Whether all is within tolerance.
    pub pass: bool,
}

/// The models that are verified where none is named: tiny, but with more than one of everything, and with sizes that do not divide.
///
/// # Errors
/// Never; the configs are fixed.
pub fn tiny_models() -> Result<Vec<(&'static str, ModelConfig)>> {
    let dense = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 103, "hidden_size": 24,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 44, "tie_word_embeddings": true, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu", "initializer_range": 0.2, "attention_bias": false, "dtype": "float32"
    });
    let experts = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "norm_topk_prob": true, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        "num_hidden_layers": 4, "tie_word_embeddings": false
    });
    let latent = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 6, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.5, "norm_topk_prob": true, "num_hidden_layers": 4, "tie_word_embeddings": false
    });
    let like_dense = |changes: serde_json::Value| {
        let mut config = dense.clone();
        if let (Some(config), serde_json::Value::Object(changes)) = (config.as_object_mut(), changes) {
            config.extend(changes);
        }
        config
    };
    let models = [("dense", dense.clone()), ("experts", like_dense(experts)), ("latent", like_dense(latent))];
    models.into_iter().map(|(name, config)| Ok((name, ModelConfig::from_json(name, config)?))).collect()
}

/// Tolerance of losses and norms.
pub const LOSS_TOLERANCE: f64 = 1e-6;
/// Tolerance of gradients and weights.
pub const TOLERANCE: f64 = 1e-5;

/// Optimizer steps.
pub const STEPS: usize = 5;

/// Rows of a chunk of the loss: the fewest there are, so that a batch has several, some without any target.
const LOGITS_CHUNK_ROWS: usize = 16;

/// Verifies each case and tells `on` of it as soon as it is known.
///
/// # Errors
/// If the model cannot be built or a rank fails.
pub fn verify(config: &ModelConfig, cases: &[Case], on: &mut dyn FnMut(&LayoutResult)) -> Result<Vec<LayoutResult>> {
    let data = data::samples(config.vocab_size);
    let (mesh, plan) = (MeshShape::default(), ParallelPlan::default());
    let one = Case { name: "one rank".into(), mesh, plan, micro_batches: 2, recompute: false };
    let reference = run::run(config, &one, &data)?;
    let mut out = Vec::with_capacity(cases.len());
    for case in cases {
        let ranks = run::run(config, case, &data)?;
        let result = compare::compare(config, case, &data, &reference[0], &ranks)?;
        on(&result);
        out.push(result);
    }
    Ok(out)
}

/// The cases of `world` ranks and fewer whose name contains `only` (all if empty).
///
/// # Errors
/// If no case is left.
pub fn chosen(config: &ModelConfig, ranks: usize, only: &str) -> Result<Vec<Case>> {
    let all: Vec<Case> = cases(config, ranks).into_iter().filter(|c| c.name.contains(only)).collect();
    if all.is_empty() {
        return Err(TrainError::setting(
            "only",
            format!("no layout of at most {ranks} ranks has \"{only}\" in its name"),
        ));
    }
    Ok(all)
}

fn refused(e: impl std::fmt::Display) -> TrainError {
    TrainError::setting("layout", e.to_string())
}
