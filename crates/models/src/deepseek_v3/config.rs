//! `config.json` of deepseek_v3.

use phalanx_kernels::moe::{Groups, Route, Scores};
use phalanx_nn::layers::{LatentAttentionConfig, RopeScaling};
use serde_json::Value;

use crate::config::Reader;
use crate::{ExpertsConfig, ModelConfig, Result};

/// The latent attention of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LatentConfig {
    /// Width of the narrow row of queries; none: they come from the hidden state itself.
    pub q_lora_rank: Option<usize>,
    /// Width of the narrow row of keys and values.
    pub kv_lora_rank: usize,
    /// Part of a head of q and k without positions.
    pub nope_dim: usize,
    /// Rotary part of a head of q and k.
    pub rope_dim: usize,
    /// A head of v.
    pub value_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether rotary pairs are neighbours.
    pub interleaved: bool,
}

pub(crate) fn read(r: &Reader<'_>) -> Result<ModelConfig> {
    refuse_other_forms(r)?;
    let (nope_dim, rope_dim) = (size(r, "qk_nope_head_dim", 128)?, size(r, "qk_rope_head_dim", 64)?);
    let head_dim = nope_dim + rope_dim;
    let c = r.decoder_of(head_dim, rope_dim)?;
    if c.num_key_value_heads != c.num_attention_heads {
        return r.refuse(
            "num_key_value_heads",
            "must equal num_attention_heads: every head has keys and values of its own",
        );
    }
    let latent = LatentConfig {
        // A key that is there and null says that there is no narrow row.
        q_lora_rank: if r.raw.contains_key("q_lora_rank") { r.opt_size("q_lora_rank")? } else { Some(1536) },
        kv_lora_rank: size(r, "kv_lora_rank", 512)?,
        nope_dim,
        rope_dim,
        value_dim: size(r, "v_head_dim", 128)?,
        scale: (head_dim as f64).powf(-0.5) as f32 * temperature(r, &c.rope.scaling)?,
        interleaved: r.bool("rope_interleave", true)?,
    };
    if latent.q_lora_rank == Some(0) {
        return r.refuse("q_lora_rank", "must be at least 1, or null for none");
    }
    let bias = r.bool("attention_bias", false)?;
    let experts = experts(r, c.num_hidden_layers)?;
    Ok(ModelConfig { o_bias: bias, experts, latent: Some(latent), ..c })
}

/// A size of at least 1.
fn size(r: &Reader<'_>, key: &str, default: usize) -> Result<usize> {
    match r.opt_size(key)? {
        Some(0) => r.refuse(key, "must be at least 1"),
        n => Ok(n.unwrap_or(default)),
    }
}

/// Keys of earlier code that would change the numbers.
fn refuse_other_forms(r: &Reader<'_>) -> Result<()> {
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(v) = r.get(key).filter(|v| v.as_str() != Some(only)) {
            return r.refuse(key, &format!("{v} is not supported, only \"{only}\""));
        }
    }
    if let Some(v) = r.get("moe_layer_freq").filter(|v| v.as_u64() != Some(1)) {
        return r.refuse("moe_layer_freq", &format!("{v} is not supported, only 1"));
    }
    Ok(())
}

/// What yarn multiplies scores by: the square of 0.1·mscale_all_dim·ln(factor) + 1.
fn temperature(r: &Reader<'_>, scaling: &RopeScaling) -> Result<f32> {
    let RopeScaling::Yarn { factor, .. } = *scaling else { return Ok(1.0) };
    let all_dim = ["rope_parameters", "rope_scaling"]
        .iter()
        .find_map(|key| r.get(key))
        .and_then(|section| section.get("mscale_all_dim"))
        .filter(|v| !v.is_null());
    let all_dim = match all_dim.map(Value::as_f64) {
        None => 0.0,
        Some(Some(x)) => x,
        Some(None) => return r.refuse("mscale_all_dim", "must be a number"),
    };
    let m = if all_dim == 0.0 || factor <= 1.0 { 1.0 } else { 0.1 * all_dim * factor.ln() + 1.0 };
    Ok((m * m) as f32)
}

fn experts(r: &Reader<'_>, layers: usize) -> Result<Option<ExpertsConfig>> {
    let first = r.opt_size("first_k_dense_replace")?.unwrap_or(3);
    if first >= layers {
        return Ok(None);
    }
    let num = match r.opt_size("n_routed_experts")? {
        Some(n) => n,
        None => r.opt_size("num_local_experts")?.unwrap_or(256),
    };
    let groups = Groups { num: size(r, "n_group", 8)?, chosen: size(r, "topk_group", 4)? };
    let intermediate = size(r, "moe_intermediate_size", 2048)?;
    let shared = size(r, "n_shared_experts", 1)?;
    let scale = r.float("routed_scaling_factor", 2.5)?;
    if !(scale > 0.0 && scale.is_finite()) {
        return r.refuse("routed_scaling_factor", &format!("must be above 0, found {scale}"));
    }
    Ok(Some(ExpertsConfig {
        route: Route {
            experts: num,
            top_k: size(r, "num_experts_per_tok", 8)?,
            scores: Scores::Sigmoid,
            // One group is no limit.
            groups: (groups.num > 1 || groups.chosen != 1).then_some(groups),
            normalise: r.bool("norm_topk_prob", true)?,
            scale: scale as f32,
        },
        intermediate_size: intermediate,
        shared_intermediate_size: Some(intermediate * shared),
        corrected: true,
        blocks: (0..layers).map(|i| i >= first).collect(),
        balance: None,
    }))
}

impl ModelConfig {
    /// The latent attention of a block.
    pub(crate) fn latent_attention(&self) -> LatentAttentionConfig {
        let l = self.latent.clone().unwrap_or_default();
        LatentAttentionConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            q_lora_rank: l.q_lora_rank,
            kv_lora_rank: l.kv_lora_rank,
            nope_dim: l.nope_dim,
            rope_dim: l.rope_dim,
            value_dim: l.value_dim,
            bias: self.o_bias,
            scale: l.scale,
            rope: std::sync::Arc::clone(&self.rope),
            interleaved: l.interleaved,
        }
    }
}
