//! Keeping the experts of a mixture evenly loaded: from configuration keys to what routers go by, and what a step does with what they tell.

use phalanx_config::{Config, MoeDrop, MoeLayers, MoeScope};
use phalanx_kernels::moe::Drop;
use phalanx_models::{Model, ModelConfig};
use phalanx_nn::{
    BalanceLayers, BalanceLoss, BalanceScope, BalanceWindow, Cx, Env, ExpertCapacity, RouterStep, Routing, update_bias,
};
use phalanx_report::Entry;

use crate::step::layout;
use crate::window::MicroBatch;
use crate::{Result, TrainError};

/// Keys that say something about experts.
const KEYS: [&str; 6] = [
    "moe_aux_loss_coef",
    "moe_aux_loss_scope",
    "moe_aux_loss_layers",
    "moe_bias_update_speed",
    "moe_capacity_factor",
    "moe_drop_policy",
];

/// What routers go by in a run of this configuration.
///
/// # Errors
/// If biases are to move that the model does not have.
pub fn routing(config: &Config, model: &ModelConfig) -> Result<Routing> {
    let e = &config.experts;
    let Some(experts) = &model.experts else { return Ok(Routing::default()) };
    if e.moe_bias_update_speed > 0.0 && !experts.corrected {
        return Err(TrainError::setting(
            "moe_bias_update_speed",
            format!("{} has no e_score_correction_bias that could move; use moe_aux_loss_coef", model.model_type),
        ));
    }
    let coefficient = e.moe_aux_loss_coef.or(experts.balance.map(|b| b.coefficient));
    let balance = BalanceLoss {
        coefficient: coefficient.unwrap_or(0.0),
        scope: match e.moe_aux_loss_scope {
            MoeScope::MicroBatch => BalanceScope::MicroBatch,
            MoeScope::Sequence => BalanceScope::Sequence,
            MoeScope::Global => BalanceScope::Global,
        },
        layers: match e.moe_aux_loss_layers {
            MoeLayers::Together => BalanceLayers::Together,
            MoeLayers::Each => BalanceLayers::Each,
        },
    };
    let drop = match e.moe_drop_policy {
        MoeDrop::Position => Drop::Position,
        MoeDrop::Probability => Drop::Probability,
    };
    Ok(Routing {
        capacity: e.moe_capacity_factor.map(|factor| ExpertCapacity { factor, drop }),
        balance: (balance.coefficient > 0.0).then_some(balance),
        window: None,
    })
}

/// The keys about experts that somebody wrote for a model without any.
pub fn idle_keys(config: &Config, model: &ModelConfig) -> Vec<&'static str> {
    if model.experts.is_some() { vec![] } else { KEYS.into_iter().filter(|k| config.is_set(k)).collect() }
}

/// Counts the choices of an accumulation window before its first backward, for a balancing loss of global scope. `None` where there is no such
/// loss, or the window is one micro-batch, which knows its own choices.
///
/// # Errors
/// If a forward fails.
pub fn count_window(model: &Model, env: &Env, window: &[MicroBatch]) -> Result<Option<std::sync::Arc<BalanceWindow>>> {
    let global = env.routing.balance.is_some_and(|b| b.scope == BalanceScope::Global);
    // A micro-batch without targets is passed over later, too.
    let counted = || window.iter().filter(|m| global && m.tokens.num_targets > 0);
    if counted().count() < 2 {
        return Ok(None);
    }
    let mut all = BalanceWindow::default();
    for MicroBatch { tokens: batch, moment } in counted() {
        let env = env.for_batch(layout(batch), *moment);
        let Some(pass) = env.routing.balance_pass(env.batch(), &batch.targets) else { continue };
        let mut cx = Cx::eval(&env);
        cx.set_balance(Some(std::sync::Arc::clone(&pass)));
        model.hidden(&mut cx, &batch.ids.as_slice().into())?;
        all.add(&pass);
    }
    Ok(Some(all.into()))
}

/// Moves the correction bias of each router by the loads of a step, once for the whole step.
///
/// # Errors
/// If a bias has no value.
pub fn move_biases(model: &Model, step: &RouterStep, speed: f64) -> Result<()> {
    if speed == 0.0 {
        return Ok(());
    }
    for p in model.parameters().iter().filter(|p| p.is_buffer()) {
        let load = p.name().rsplit_once('.').and_then(|(router, _)| step.layers.get(router));
        if let Some(load) = load {
            p.update(|bias| -> Result<()> {
                update_bias(bias.f32_mut()?, &load.counts, speed as f32);
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Adds to a line of metrics what the routers did in its step: `aux_loss` (per counted target), and over layers the greatest and the mean of
/// `max / mean` of the experts' loads; for each layer its own; the share of choices that were dropped.
pub fn log(mut entry: Entry, step: &RouterStep, counted: u64) -> Entry {
    if step.layers.is_empty() {
        return entry;
    }
    let loads: Vec<f64> = step.layers.values().map(phalanx_nn::LayerLoad::max_over_mean).collect();
    let (all, dropped) = step
        .layers
        .values()
        .fold((0, 0), |(all, dropped), l| (all + l.counts.iter().sum::<u64>(), dropped + l.dropped));
    if step.balance != 0.0 {
        entry = entry.with("aux_loss", step.balance / counted.max(1) as f64);
    }
    entry = entry
        .with("expert_load_max", loads.iter().copied().fold(0.0, f64::max))
        .with("expert_load_mean", loads.iter().sum::<f64>() / loads.len() as f64);
    for (router, load) in &step.layers {
        // model.layers.3.mlp.gate → layers.3
        let layer = router.trim_start_matches("model.").trim_end_matches(".mlp.gate");
        entry = entry.with(&format!("expert_load/{layer}"), load.max_over_mean());
    }
    if dropped > 0 {
        entry = entry.with("dropped_share", dropped as f64 / all.max(1) as f64);
    }
    entry
}
