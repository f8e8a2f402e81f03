//! Which stages of a pipeline a rank holds, and what of the model is in them.

use phalanx_comm::{Communicator, Group, Pp};
use phalanx_nn::{Describe, Parameter, Walk};
use serde::{Deserialize, Serialize};

use crate::DistributedError;
use crate::pipeline::{
    LayerSplit, Schedule, ScheduleKind, Sends, StageLayers, build, split_layers, with_communication,
};

/// How a model is cut into stages, and in which order they work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PipelinePlan {
    /// The schedule.
    pub schedule: ScheduleKind,
    /// Stages a rank, where the schedule leaves the choice.
    pub chunks: Option<usize>,
    /// How layers are given to stages.
    pub layers: LayerSplit,
}

impl Default for PipelinePlan {
    fn default() -> PipelinePlan {
        PipelinePlan { schedule: ScheduleKind::OneForwardOneBackward, chunks: None, layers: LayerSplit::default() }
    }
}

/// The stages of a model over the ranks of a pipeline.
pub struct Stages {
    plan: PipelinePlan,
    ranks: usize,
    rank: usize,
    /// What each stage holds.
    pub layers: Vec<StageLayers>,
    /// The rank of each stage.
    pub rank_of_stage: Vec<usize>,
}

impl Stages {
    /// Cuts a model of `blocks` blocks.
    ///
    /// # Errors
    /// If the schedule or the split does not fit the numbers.
    pub fn new(plan: &PipelinePlan, blocks: usize, group: &Group<Pp>) -> Result<Stages, DistributedError> {
        let (ranks, rank) = (group.size(), group.rank());
        // The placement does not depend on the number of micro-batches; this one suits every schedule.
        let schedule = build(plan.schedule, ranks, 2 * ranks, plan.chunks).map_err(refused)?;
        let rank_of_stage = schedule.placement.rank_of_stage;
        let layers = split_layers(blocks, rank_of_stage.len(), &plan.layers).map_err(refused)?;
        Ok(Stages { plan: plan.clone(), ranks, rank, layers, rank_of_stage })
    }

    /// What each rank does for a window of `micro_batches`, messages included; sends do not wait.
    ///
    /// # Errors
    /// If the schedule cannot do so many.
    pub fn schedule(&self, micro_batches: usize) -> Result<Schedule, DistributedError> {
        let schedule = build(self.plan.schedule, self.ranks, micro_batches, self.plan.chunks).map_err(refused)?;
        with_communication(&schedule, Sends::Buffer).map_err(refused)
    }

    /// Whether this rank holds the stage with the loss.
    pub fn has_loss(&self) -> bool {
        self.rank_of_stage.last() == Some(&self.rank)
    }

    /// The ranks that use each parameter of `model`, each list ascending by stage.
    pub(crate) fn users(&self, model: &dyn Describe) -> Vec<(Parameter, Vec<usize>)> {
        let mut block: Option<(usize, String)> = None;
        let mut users: Vec<(Parameter, Vec<usize>)> = vec![];
        phalanx_nn::walk(model, &mut |event| match event {
            Walk::Module(path, m) if m.kind() == "block" => {
                block = Some((block.as_ref().map_or(0, |b| b.0 + 1), path.to_owned()))
            }
            Walk::Module(..) => {}
            Walk::Parameter(path, p) => {
                let stage = match &block {
                    None => 0,
                    Some((i, inside)) if path.starts_with(inside.as_str()) => {
                        self.layers.iter().position(|s| s.layers.contains(i)).unwrap_or(0)
                    }
                    Some(_) => self.layers.len() - 1,
                };
                let rank = self.rank_of_stage[stage];
                match users.iter_mut().find(|(q, _)| q.is(p)) {
                    Some((_, ranks)) if !ranks.contains(&rank) => ranks.push(rank),
                    Some(_) => {}
                    None => users.push((p.clone(), vec![rank])),
                }
            }
        });
        users
    }
}

/// Parameters that several stages on several ranks use (a head tied to the embedding), and the group of those ranks.
pub(crate) struct Tied {
    pub parameters: Vec<Parameter>,
    pub group: Communicator,
}

fn refused(e: impl std::fmt::Display) -> DistributedError {
    DistributedError::Plan { what: e.to_string(), mend: "change `pipeline` or the mesh".into() }
}
