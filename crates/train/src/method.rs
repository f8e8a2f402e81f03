//! From configuration keys to a plan: what `finetuning_type`, `bf16` and `gradient_checkpointing` mean for named modules.

use phalanx_config::{Config, FinetuningType};
use phalanx_models::ModelConfig;
use phalanx_parallel::{Plan, Precision, Site};

use crate::{Result, TrainError};

/// The plan of a configuration: its `plan:` with what the other keys add.
///
/// # Errors
/// If `plan:` cannot be read, or a key names something that the model does not have.
pub fn plan(config: &Config, model: &ModelConfig, sites: &[Site]) -> Result<Plan> {
    let document = config.plan()?;
    let mut plan: Plan = serde_json::from_value(document.root.to_json())
        .map_err(|e| TrainError::setting("plan", format!("{}: {e}", document.name)))?;
    let m = &config.method;
    match m.finetuning_type {
        FinetuningType::Full => {}
        FinetuningType::Freeze => {
            plan.train.extend(frozen_but(m.freeze_trainable_layers, &m.freeze_trainable_modules, model)?);
            plan.train.extend(m.freeze_extra_modules.iter().map(|n| anywhere(n)));
        }
        FinetuningType::Lora => {
            if plan.adapters.is_empty() {
                plan.adapters = lora_targets(&m.lora_target, sites);
            }
            plan.train.extend(m.additional_target.iter().map(|n| anywhere(n)));
        }
    }
    if config.train.bf16 {
        // Norm weights are tiny and decide the scale of everything after them, routers decide where tokens go; they stay f32. The plan's own lines come last and win.
        let mut lines = vec![("**".to_owned(), Precision::Bf16)];
        lines.extend(sites.iter().filter(|s| stays_f32(s)).map(|s| (s.path.clone(), Precision::F32)));
        lines.append(&mut plan.precision);
        plan.precision = lines;
    }
    match config.gradient_checkpointing() {
        Some(true) if plan.recompute.is_empty() => plan.recompute.push("model.layers.{*}".into()),
        Some(false) => plan.recompute.clear(),
        _ => {}
    }
    Ok(plan)
}

/// Whether a module keeps f32 parameters where others have 16 bits.
pub(crate) fn stays_f32(site: &Site) -> bool {
    matches!(site.kind.as_str(), "norm" | "router")
}

/// A bare name stands for every module of that last name.
fn anywhere(name: &str) -> String {
    if name.contains(['.', '*', '{']) { name.to_owned() } else { format!("**.{name}") }
}

/// `all`: every linear layer but the head; names and patterns beside it as they are.
fn lora_targets(targets: &[String], sites: &[Site]) -> Vec<String> {
    let all = targets.iter().any(|t| t == "all");
    let linear = sites.iter().filter(|s| all && s.kind == "linear").map(|s| s.path.clone());
    // What is named beside `all` must exist too, and may be no linear layer: resolving says so.
    linear.chain(targets.iter().filter(|t| *t != "all").map(|t| anywhere(t))).collect()
}

/// The last n blocks (n > 0) or the first −n, and in them the named modules or all.
fn frozen_but(n: i64, modules: &[String], model: &ModelConfig) -> Result<Vec<String>> {
    let layers = model.num_hidden_layers as i64;
    if n == 0 || n.unsigned_abs() > layers as u64 {
        return Err(TrainError::setting(
            "freeze_trainable_layers",
            format!("{n} does not fit a model of {layers} blocks; use 1 to {layers}, or negative for the first ones"),
        ));
    }
    let (first, last) = if n > 0 { (layers - n, layers - 1) } else { (0, -n - 1) };
    let block = format!("model.layers.{{{first}-{last}}}");
    if modules.iter().any(|m| m == "all") {
        return Ok(vec![block]);
    }
    Ok(modules.iter().map(|m| format!("{block}.{m}")).collect())
}
