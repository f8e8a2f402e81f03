//! A layout at work: ranks as threads, five steps.

use std::ops::Range;
use std::sync::Arc;

use phalanx_comm::{AxisKind, Communicator, Mesh, RunError, Traffic, run_ranks};
use phalanx_models::{Model, ModelConfig, initialise};
use phalanx_nn::{Batch, Env, Parameter, init};
use phalanx_parallel::{Distributed, Plan, resolve, sites};
use phalanx_tensor::{DType, Runtime, Tensor};

use super::data::{Sample, micro_batches};
use super::{Case, LOGITS_CHUNK_ROWS, STEPS};
use crate::optimizer::{AdamW, AdamWOptions};
use crate::window::{WindowResult, env_on, gradients, update};
use crate::{Result, TrainError};

/// A part of a parameter, and its values.
pub(super) struct Part {
    pub name: String,
    pub at: Vec<Range<usize>>,
    pub values: Vec<f32>,
}

/// What one rank ends with.
pub(super) struct Rank {
    pub steps: Vec<WindowResult>,
    /// Summed gradients of the first step.
    pub gradients: Vec<Part>,
    pub weights: Vec<Part>,
    /// Of all steps.
    pub traffic: Vec<(AxisKind, Traffic)>,
}

/// Runs a case on as many threads as it has ranks.
pub(super) fn run(config: &ModelConfig, case: &Case, samples: &[Sample]) -> Result<Vec<Rank>> {
    let world = case.mesh.num_ranks()?;
    run_ranks(world, |comm| rank(config, case, samples, &comm)).map_err(|e| match e {
        RunError::Failed { rank, error } => {
            TrainError::Rank { layout: case.name.clone(), rank, error: Box::new(error) }
        }
        e => TrainError::setting("layout", format!("{}: {e}", case.name)),
    })
}

fn rank(config: &ModelConfig, case: &Case, samples: &[Sample], comm: &Communicator) -> Result<Rank> {
    let rt = Runtime::try_new(1)?;
    let model = Model::new(config)?;
    let mesh = Mesh::new(comm, case.mesh)?;
    let distributed = Distributed::new(&model, mesh, case.plan.clone())?;
    initialise(&rt, &model, 5)?;
    let parameters = model.parameters();
    // Zeros would hide a bias that is added twice or on no rank.
    for bias in parameters.iter().filter(|p| p.name().ends_with(".bias")) {
        init::normal(&rt, bias, 5, config.initializer_range)?;
    }
    // AdamW divides a gradient by its own size, so that where it is 1e-5 of the others its rounding alone makes 3 % of an update. This epsilon is above
    // the rounding (gradients are some 1e-3) and far below the rest; the gradients themselves are compared as they are.
    let options = AdamWOptions { beta1: 0.9, beta2: 0.95, eps: 1e-6, weight_decay: 0.1, decay_norms_and_biases: false };
    let mut optimizer = AdamW::new(&rt, &parameters, &|_| DType::F32, options)?;
    let (share, shares) = distributed.data_share();
    let batches = micro_batches(samples, share, shares);
    let mut env = env_on(&Env::new(rt.clone(), Batch::causal(&[])), &distributed);
    env.logits_chunk_bytes = 4 * LOGITS_CHUNK_ROWS;
    if case.recompute {
        let plan = Plan { recompute: vec!["model.layers.{*}".into()], ..Plan::default() };
        let resolved = resolve(&sites(&model), &plan);
        env.plan = Arc::new(resolved.map_err(|c| TrainError::setting("plan", c[0].to_string()))?);
    }
    let (mut steps, mut first) = (vec![], vec![]);
    for i in 0..STEPS {
        let (loss, tokens) = gradients(&model, &env, &batches, Some(&distributed))?;
        if i == 0 {
            first = parts(&parameters, &|p| Ok(p.kept_grad().get()))?;
        }
        let grad_norm = update(&rt, &mut optimizer, loss.count, (1e-3, 1.0), Some(&distributed))?;
        steps.push(WindowResult { loss, grad_norm, tokens });
    }
    let traffic = distributed.traffic();
    let weights = parts(&parameters, &|p| Ok(Some(p.kept()?)))?;
    Ok(Rank { steps, gradients: first, weights, traffic })
}

fn parts(parameters: &[Parameter], of: &dyn Fn(&Parameter) -> Result<Option<Tensor>>) -> Result<Vec<Part>> {
    let part = |p: &Parameter| {
        let at = p.placement().kept_box();
        let values = match of(p)? {
            Some(t) => t.f32()?.to_vec(),
            // No gradient is a gradient of zeros.
            None => vec![0.0; at.iter().map(Range::len).product()],
        };
        Ok(Part { name: p.name().to_owned(), at, values })
    };
    parameters.iter().map(part).collect()
}
