//! `verify precision`: does training with a low-precision recipe lose anything?
//!
//! The measure is DeepSeek-V3's (arXiv 2412.19437, 3.3): the relative error of the smoothed loss against exact training on the same data
//! in the same order, below 0.25 %. A model of a few million parameters is only trusted with it if exact training from other seeds
//! differs more than the recipe does, so that comparison is made too. And training is chaotic: a run whose weights begin one bit off drifts
//! away from its twin as well. That run is made first, as the *control*: what it shows is no fault of any recipe.
//!
//! Errors count in the second half of the steps. Before, the loss falls so fast that being a step earlier or later shows as an error.
//!
//! The model reads bytes: four blocks of width 256, heads of 64, a gated unit of 768; every K is a multiple of 128 or more than one
//! block of scales long.

use std::sync::Arc;

use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, ModelConfig, initialise};
use phalanx_nn::{Batch, DelayedScales, Env};
use phalanx_parallel::{Exactness, Plan};
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Category, DType, Runtime};
use serde::Serialize;
use serde_json::json;

use crate::optimizer::{AdamW, AdamWOptions};
use crate::schedule::{Schedule, Shape};
use crate::window::{self, MicroBatch};
use crate::{Result, TrainError};

/// Most that a recipe's smoothed loss may be off, relative.
pub const MOST: f64 = 0.0025;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Optimizer steps of every run.
    pub steps: usize,
    /// Seeds of the weights; each recipe is compared with exact training from the same seed.
    pub seeds: usize,
    /// Sequences a step.
    pub batch: usize,
    /// Bytes a sequence.
    pub seq: usize,
    /// Peak of the learning rate.
    pub lr: f64,
    /// The recipes.
    pub recipes: Vec<Exactness>,
}

/// A recipe beside exact training.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Name of the recipe, or `control`: exact, from weights one bit off.
    pub recipe: String,
    /// Seed of the weights.
    pub seed: usize,
    /// Optimizer steps.
    pub steps: usize,
    /// Smoothed loss at the end.
    pub loss: f64,
    /// The same of exact training.
    pub exact_loss: f64,
    /// Greatest relative error of the smoothed loss in the second half of the steps.
    pub error_max: f64,
    /// Mean of that error.
    pub error_mean: f64,
    /// How far exact trainings from different seeds lie apart at the end, relative: greatest minus least.
    pub seed_spread: f64,
    /// Whether the greatest error is below [`MOST`] and the error at the end below the seeds' spread.
    pub pass: bool,
}

/// Trains with each recipe and each seed on `text`; tells `progress` which run begins.
///
/// # Errors
/// If the text is shorter than a batch or memory runs out.
pub fn verify(rt: &Runtime, text: &[u8], o: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Finding>> {
    if o.steps < 10 || o.seeds == 0 || o.batch == 0 || o.seq < 2 {
        return Err(TrainError::setting("precision", "needs steps ≥ 10, seeds ≥ 1, batch ≥ 1 and seq ≥ 2"));
    }
    if text.len() <= o.seq {
        return Err(TrainError::setting("text", format!("has {} bytes, a sequence takes {}", text.len(), o.seq + 1)));
    }
    let mut run = |recipe: Option<Exactness>, nudged, seed| {
        let name = recipe.map_or_else(|| "control".to_owned(), |r| r.to_string());
        progress(&format!("{}, seed {seed}", if nudged { &name } else { "f32" }));
        let plan = recipe.unwrap_or(Exactness::F32);
        losses(rt, text, o, (plan, nudged && recipe.is_none()), seed as u64).map(|l| (name, smoothed(&l)))
    };
    let exact =
        (0..o.seeds).map(|seed| run(Some(Exactness::F32), false, seed).map(|(_, l)| l)).collect::<Result<Vec<_>>>()?;
    let ends: Vec<f64> = exact.iter().map(|l| l[o.steps - 1]).collect();
    let most = ends.iter().copied().fold(f64::MIN, f64::max);
    let least = ends.iter().copied().fold(f64::MAX, f64::min);
    let seed_spread = (most - least) / least;
    let mut findings = Vec::new();
    for recipe in std::iter::once(None).chain(o.recipes.iter().copied().map(Some)) {
        for (seed, exact) in exact.iter().enumerate() {
            let (name, got) = run(recipe, true, seed)?;
            let errors: Vec<f64> = got.iter().zip(exact).map(|(a, b)| (a - b).abs() / b).collect();
            let counted = &errors[o.steps / 2..];
            let error_max = counted.iter().copied().fold(0.0, f64::max);
            let (loss, exact_loss) = (got[o.steps - 1], exact[o.steps - 1]);
            let within = o.seeds < 2 || (loss - exact_loss).abs() / exact_loss <= seed_spread;
            findings.push(Finding {
                recipe: name,
                seed,
                steps: o.steps,
                loss,
                exact_loss,
                error_max,
                error_mean: counted.iter().sum::<f64>() / counted.len() as f64,
                seed_spread,
                // A loss that is not a number passes no comparison.
                pass: error_max < MOST && within,
            });
        }
    }
    Ok(findings)
}

/// Exponential moving average over about fifty steps, without the start's bias.
fn smoothed(losses: &[f64]) -> Vec<f64> {
    const KEEP: f64 = 0.98;
    let (mut sum, mut weight) = (0.0, 0.0);
    let mut out = Vec::with_capacity(losses.len());
    for l in losses {
        sum = KEEP * sum + (1.0 - KEEP) * l;
        weight = KEEP * weight + (1.0 - KEEP);
        out.push(sum / weight);
    }
    out
}

/// The loss of each step.
fn losses(rt: &Runtime, text: &[u8], o: &Options, (recipe, nudged): (Exactness, bool), seed: u64) -> Result<Vec<f64>> {
    let config = ModelConfig::from_json(
        "precision",
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 256, "hidden_size": 256,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "intermediate_size": 768, "tie_word_embeddings": true, "max_position_embeddings": o.seq.max(2048),
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "hidden_act": "silu", "initializer_range": 0.02, "attention_bias": false, "dtype": "float32"
        }),
    )?;
    let model = Model::new(&config)?;
    initialise(rt, &model, seed)?;
    if nudged {
        for p in model.parameters() {
            let one_off: Vec<f32> = rt.to_vec(&p.value()?)?.into_iter().map(f32::next_up).collect();
            p.set(rt.from_f32(p.shape(), &one_off, Category::Weights)?)?;
        }
    }
    let options = AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, decay_norms_and_biases: false };
    let mut optimizer = AdamW::new(rt, &model.parameters(), &|_| DType::F32, options)?;
    let plan = Plan { arithmetic: vec![("**".into(), recipe)], ..Plan::default() };
    let resolved = phalanx_parallel::resolve(&phalanx_parallel::sites(&model), &plan).map_err(TrainError::Plan)?;
    let scales = Arc::new(DelayedScales::new(&model, &resolved));
    let resolved = Arc::new(resolved);
    let warmup = o.steps as u64 / 10;
    let shape = Shape::Cosine { cycles: 0.5, min_ratio: 0.1 };
    let schedule = Schedule { lr: o.lr, warmup_steps: warmup, total_steps: o.steps as u64, shape };
    // The order of the data does not depend on the weights' seed.
    let order = Stream::new(0, "precision.order");
    let trained = vec![true; o.seq];
    let mut out = Vec::with_capacity(o.steps);
    for step in 0..o.steps {
        let rows: Vec<Vec<u32>> = (0..o.batch)
            .map(|row| {
                let from = order.uniform((step * o.batch + row) as u64) as f64 * (text.len() - o.seq) as f64;
                text[from as usize..][..o.seq].iter().map(|&b| b.into()).collect()
            })
            .collect();
        let documents = rows.iter().enumerate().map(|(i, r)| (i as u64, r.as_slice(), trained.as_slice()));
        let batch = TokenBatch::from_documents(documents);
        let mut env = Env::new(rt.clone(), Batch::causal(&[]));
        env.seed = seed;
        env.plan = resolved.clone();
        env.scales = scales.clone();
        let lr = schedule.at(step as u64) as f32;
        let batch = [MicroBatch { tokens: batch, moment: step as u64 }];
        out.push(window::step(&model, &env, &batch, &mut optimizer, (lr, 1.0), None)?.loss.mean());
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_compared_with_exact_training_of_its_seed() {
        let text: Vec<u8> = (0..4000u32).map(|i| b"the quick brown fox "[i as usize % 20]).collect();
        let o = Options {
            steps: 12,
            seeds: 2,
            batch: 2,
            seq: 32,
            lr: 2e-3,
            recipes: vec![Exactness::F32, Exactness::Int8Block, Exactness::Fp8Delayed],
        };
        let mut runs = Vec::new();
        let found = verify(&Runtime::new(2), &text, &o, &mut |r| runs.push(r.to_owned())).unwrap();
        assert_eq!((found.len(), runs.len()), (8, 10));
        assert!(found[..2].iter().all(|f| f.recipe == "control" && f.error_max > 0.0 && f.error_max < 1e-4));
        assert!(found[2..4].iter().all(|f| f.recipe == "f32" && f.error_max == 0.0 && f.pass));
        assert!(found[4..6].iter().all(|f| f.recipe == "int8_block" && f.error_max > 0.0 && f.error_max < 0.02));
        assert!(found[6..].iter().all(|f| f.recipe == "fp8_delayed" && f.error_max > 0.0 && f.error_max < 0.05));
        assert!(found[0].seed_spread > 0.0 && found[0].loss < 5.0);
        let short = verify(&Runtime::new(1), b"abc", &o, &mut |_| ()).unwrap_err();
        assert!(short.to_string().contains("3 bytes"), "{short}");
    }
}
