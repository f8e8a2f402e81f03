//! `config.json` of qwen3_moe.

use phalanx_kernels::moe::{Route, Scores};
use phalanx_nn::{BalanceLayers, BalanceLoss, BalanceScope};

use crate::config::Reader;
use crate::{ExpertsConfig, ModelConfig, Result};

pub(crate) fn read(r: &Reader<'_>) -> Result<ModelConfig> {
    let c = r.decoder()?;
    let bias = r.bool("attention_bias", false)?;
    // All blocks slide or none: this family has no `max_window_layers`.
    let window = if r.bool("use_sliding_window", false)? { r.window()? } else { None };
    let windows = vec![window; c.num_hidden_layers];
    let experts = experts(r, c.num_hidden_layers)?;
    Ok(ModelConfig { qkv_bias: bias, o_bias: bias, qk_norm: true, windows, experts, ..c })
}

fn experts(r: &Reader<'_>, layers: usize) -> Result<Option<ExpertsConfig>> {
    // transformers 5 writes the second name.
    let num = match r.opt_size("num_experts")? {
        Some(n) => n,
        None => r.size("num_local_experts")?,
    };
    let dense = dense_blocks(r, layers)?;
    let step = r.opt_size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return r.refuse("decoder_sparse_step", "must be at least 1");
    }
    let blocks: Vec<bool> =
        (0..layers).map(|i| num > 0 && (i + 1).is_multiple_of(step) && !dense.contains(&i)).collect();
    if !blocks.contains(&true) {
        return Ok(None);
    }
    let coefficient = r.float("router_aux_loss_coef", 0.001)?;
    if !(coefficient >= 0.0 && coefficient.is_finite()) {
        return r.refuse("router_aux_loss_coef", &format!("must be 0 or more, found {coefficient}"));
    }
    let balance = BalanceLoss { coefficient, scope: BalanceScope::MicroBatch, layers: BalanceLayers::Together };
    Ok(Some(ExpertsConfig {
        route: Route {
            experts: num,
            top_k: r.opt_size("num_experts_per_tok")?.unwrap_or(8),
            scores: Scores::Softmax,
            groups: None,
            normalise: r.bool("norm_topk_prob", false)?,
            scale: 1.0,
        },
        intermediate_size: r.size("moe_intermediate_size")?,
        shared_intermediate_size: None,
        corrected: false,
        blocks,
        balance: r.bool("output_router_logits", false)?.then_some(balance),
    }))
}

/// `mlp_only_layers`: blocks that keep the dense feed-forward.
fn dense_blocks(r: &Reader<'_>, layers: usize) -> Result<Vec<usize>> {
    const KEY: &str = "mlp_only_layers";
    let Some(v) = r.get(KEY) else { return Ok(vec![]) };
    let Some(list) = v.as_array() else { return r.refuse(KEY, &format!("must be a list of block numbers, found {v}")) };
    let number = |v: &serde_json::Value| match v.as_u64() {
        Some(n) if n < layers as u64 => Ok(n as usize),
        _ => r.refuse(KEY, &format!("{v} is no block of a model of {layers}")),
    };
    list.iter().map(number).collect()
}
