//! A model on a mesh: which part of each parameter is where, and what happens around its modules.

use std::sync::Arc;

use phalanx_comm::{
    CommError, Communicator, Cp, Dp, DpReplicate, Fsdp as FsdpAxis, Group, Loss, Mesh, Pp, ReduceOp, Traffic, World,
};
use phalanx_nn::{Cx, Describe, NnError, Parameter, Placement, ScopeHooks, Walk, chunk};
use phalanx_tensor::{Category, Runtime, Tensor};
use serde::{Deserialize, Serialize};

use crate::PatternError;
use crate::context::{Context, ContextForm, Partition};
use crate::fsdp::{Fsdp, Reshard, units};
use crate::stages::{PipelinePlan, Stages, Tied};

/// How a model is laid over a mesh, apart from the sizes of the mesh's dimensions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelPlan {
    /// Modules whose parameters are gathered together.
    pub units: Vec<String>,
    /// When gathered parameters are given back.
    pub reshard: Reshard,
    /// Units gathered ahead of the one that computes.
    pub prefetch: usize,
    /// Gradients are reduced in each micro-batch of an accumulation window, not only in its last.
    pub reduce_each_micro_batch: bool,
    /// Stages and their schedule.
    pub pipeline: PipelinePlan,
    /// How attention reaches the keys of the ranks of `cp`.
    pub context: ContextForm,
    /// How the rows of a micro-batch are dealt to the ranks of `cp`; without it as suits the form.
    pub context_partition: Option<Partition>,
}

impl Default for ParallelPlan {
    fn default() -> ParallelPlan {
        ParallelPlan {
            units: vec!["model.layers.{*}".into()],
            reshard: Reshard::default(),
            prefetch: 1,
            reduce_each_micro_batch: true,
            pipeline: PipelinePlan::default(),
            context: ContextForm::default(),
            context_partition: None,
        }
    }
}

/// A parameter, and over which ranks it lies.
struct Placed {
    parameter: Parameter,
    /// Whether its rows are dealt to the ranks of the sharding group.
    sharded: bool,
    /// Whether an earlier rank of the pipeline uses it too, and counts it.
    counted_before: bool,
}

/// A model on a mesh, as one rank sees it. Also the hooks that its passes run with ([`phalanx_nn::Env::hooks`]).
pub struct Distributed {
    mesh: Mesh,
    plan: ParallelPlan,
    fsdp: Option<Arc<Fsdp>>,
    stages: Option<Stages>,
    context: Option<Arc<Context>>,
    tied: Option<Tied>,
    /// Those that this rank uses.
    parameters: Vec<Placed>,
}

/// What can go wrong with a model on a mesh.
#[derive(Debug, thiserror::Error)]
pub enum DistributedError {
    /// A pattern cannot be read.
    #[error("plan: units: {0}")]
    Pattern(#[from] PatternError),
    /// The plan cannot be applied.
    #[error("plan: {what}; {mend}")]
    Plan {
        /// What is wrong.
        what: String,
        /// What to do.
        mend: String,
    },
    /// A parameter cannot be placed.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] phalanx_tensor::TensorError),
}

type Result<T, E = DistributedError> = std::result::Result<T, E>;

impl Distributed {
    /// Places the parameters of `model`, which have no values yet, on `mesh`.
    ///
    /// # Errors
    /// If a pattern matches nothing, units lie inside one another, or a parameter has a value already.
    pub fn new(model: &dyn Describe, mesh: Mesh, plan: ParallelPlan) -> Result<Arc<Distributed>> {
        let pp = mesh.group::<Pp>();
        let stages = match pp.size() {
            1 => None,
            _ => Some(Stages::new(&plan.pipeline, blocks(model), pp)?),
        };
        let users = match &stages {
            None => phalanx_nn::parameters(model).into_iter().map(|p| (p, vec![0])).collect(),
            Some(stages) => stages.users(model),
        };
        let group: &Communicator = mesh.group::<FsdpAxis>();
        let (ranks, rank) = (group.size(), group.rank());
        let mut parameters = vec![];
        for (parameter, users) in &users {
            if !users.contains(&pp.rank()) {
                parameter.place(Placement::nowhere(parameter.shape()))?;
                continue;
            }
            let mut placement = Placement::whole(parameter.shape());
            let rows = placement.working_shape().first().copied();
            let sharded = ranks > 1 && rows.is_some();
            if let (true, Some(rows)) = (sharded, rows) {
                placement = placement.keep(chunk(rows, ranks, rank));
            }
            parameter.place(placement)?;
            let counted_before = users[0] != pp.rank();
            parameters.push(Placed { parameter: parameter.clone(), sharded, counted_before });
        }
        let fsdp = if ranks > 1 {
            let mut units = units(model, &plan.units)?;
            units.iter_mut().for_each(|u| u.parameters.retain(|p| parameters.iter().any(|q| q.parameter.is(p))));
            units.retain(|u| u.path.is_empty() || !u.parameters.is_empty());
            Some(Arc::new(Fsdp::new(group.clone(), units, plan.reshard, plan.prefetch)))
        } else {
            None
        };
        let tied = tied(&users, pp)?;
        let cp = mesh.group::<Cp>();
        let context = match cp.size() {
            1 => None,
            _ => Some(Context::new(cp, plan.context, plan.context_partition)?),
        };
        Ok(Arc::new(Distributed { mesh, plan, fsdp, stages, context, tied, parameters }))
    }

    /// What this rank sent in each group of more than one rank, and where its time went.
    pub fn traffic(&self) -> Vec<(String, Traffic)> {
        let axes = self.mesh.traffic().into_iter().map(|(axis, traffic)| (axis.name().to_owned(), traffic));
        let tied = self.tied.iter().map(|t| (t.group.name().to_owned(), t.group.traffic()));
        axes.chain(tied).chain(self.context.iter().flat_map(|c| c.traffic())).collect()
    }

    /// How micro-batches are dealt to the ranks of `cp`, where there are several.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.context.as_ref()
    }

    /// The stages, where the model is cut into some.
    pub fn stages(&self) -> Option<&Stages> {
        self.stages.as_ref()
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Which share of the data this rank gets, and into how many it is cut.
    pub fn data_share(&self) -> (usize, usize) {
        let dp = self.mesh.group::<Dp>();
        (dp.rank(), dp.size())
    }

    /// Before each micro-batch of an accumulation window: says whether it is the last one.
    pub fn begin_micro_batch(&self, last: bool) {
        if let Some(fsdp) = &self.fsdp {
            let once = !self.plan.reduce_each_micro_batch || fsdp.reshard() == Reshard::AfterStep;
            fsdp.reduce_gradients(last || !once);
        }
    }

    /// After each backward pass: the sums that were on their way have arrived.
    ///
    /// # Errors
    /// If a peer failed.
    pub fn finish_backward(&self, rt: &Runtime) -> Result<()> {
        match &self.fsdp {
            Some(fsdp) => Ok(fsdp.finish_backward(rt)?),
            None => Ok(()),
        }
    }

    /// Before a window in which gradients of all micro-batches add up before they are reduced ([`Distributed::reduce_gradients`]), as a pipeline
    /// has it, whose micro-batches end in no simple order.
    pub fn begin_pipeline(&self) {
        if let Some(fsdp) = &self.fsdp {
            fsdp.reduce_gradients(false);
        }
    }

    /// Reduces what has added up over a window.
    ///
    /// # Errors
    /// If a peer failed.
    pub fn reduce_gradients(&self, rt: &Runtime) -> Result<()> {
        if let Some(fsdp) = &self.fsdp {
            fsdp.reduce_all(rt)?;
        }
        self.finish_backward(rt)
    }

    /// At the end of an accumulation window: every kept gradient becomes the sum over all ranks. A parameter that got no gradient
    /// anywhere gets zeros where it is shared.
    ///
    /// # Errors
    /// If a peer failed or memory runs out.
    pub fn finish_window(&self, rt: &Runtime) -> Result<()> {
        // Rows that were reduced over the shards are still to be summed over the replicas; whole parameters over both.
        let of = |sharded| self.parameters.iter().filter(move |p| p.sharded == sharded).map(|p| &p.parameter);
        all_reduce(rt, self.mesh.group::<DpReplicate>(), of(true))?;
        all_reduce(rt, self.mesh.group::<Loss>(), of(false))?;
        // Each stage has the sum of its own uses.
        self.tied.as_ref().map_or(Ok(()), |tied| all_reduce(rt, &tied.group, tied.parameters.iter()))
    }

    /// Whether this rank is the one that counts what it keeps of a parameter in sums over all ranks.
    pub fn counts(&self, parameter: &Parameter) -> bool {
        let at = self.mesh.coordinates();
        let Some(placed) = self.parameters.iter().find(|p| p.parameter.is(parameter)) else { return false };
        let first = at.dp_replicate == 0 && (placed.sharded || (at.dp_shard == 0 && at.cp == 0)) && at.tp == 0;
        first && !placed.counted_before
    }

    /// Sums over the ranks that hold different tokens. In a pipeline the values of the stage with the loss count, and all stages get the sum.
    ///
    /// # Errors
    /// If a peer failed.
    pub fn sum_over_data(&self, values: &mut [f64]) -> Result<()> {
        if self.stages.as_ref().is_some_and(|s| !s.has_loss()) {
            values.fill(0.0);
        }
        self.mesh.group::<Loss>().all_reduce(ReduceOp::Sum, values)?;
        Ok(self.mesh.group::<Pp>().all_reduce(ReduceOp::Sum, values)?)
    }

    /// Sums over all ranks.
    ///
    /// # Errors
    /// If a peer failed.
    pub fn sum_over_world(&self, values: &mut [f64]) -> Result<()> {
        Ok(self.mesh.group::<World>().all_reduce(ReduceOp::Sum, values)?)
    }

    /// The optimizer has changed the parameters.
    pub fn parameters_changed(&self) {
        if let Some(fsdp) = &self.fsdp {
            fsdp.parameters_changed();
        }
    }
}

impl ScopeHooks for Distributed {
    fn enter(&self, cx: &mut Cx) -> phalanx_nn::Result<()> {
        self.fsdp.as_ref().map_or(Ok(()), |fsdp| fsdp.enter(cx))
    }
    fn input(&self, _cx: &mut Cx, x: Tensor) -> phalanx_nn::Result<Tensor> {
        Ok(x)
    }
    fn output(&self, _cx: &mut Cx, y: Tensor) -> phalanx_nn::Result<Tensor> {
        Ok(y)
    }
    fn leave(&self, cx: &mut Cx) -> phalanx_nn::Result<()> {
        self.fsdp.as_ref().map_or(Ok(()), |fsdp| fsdp.leave(cx))
    }
}

fn blocks(model: &dyn Describe) -> usize {
    let mut n = 0;
    phalanx_nn::walk(model, &mut |event| n += usize::from(matches!(event, Walk::Module(_, "block"))));
    n
}

/// The parameters that this rank shares with other stages. There is one set of ranks at most: those of embedding and head.
fn tied(users: &[(Parameter, Vec<usize>)], pp: &Group<Pp>) -> Result<Option<Tied>> {
    let shared: Vec<_> = users.iter().filter(|(_, ranks)| ranks.len() > 1 && ranks.contains(&pp.rank())).collect();
    let Some((_, ranks)) = shared.first() else { return Ok(None) };
    if let Some((p, other)) = shared.iter().find(|(_, r)| r != ranks) {
        return Err(DistributedError::Plan {
            what: format!("{} is used by pipeline ranks {other:?}, another parameter by {ranks:?}", p.name()),
            mend: "untie one of them".into(),
        });
    }
    let parameters = shared.iter().map(|(p, _)| p.clone()).collect();
    Ok(Some(Tied { parameters, group: pp.subgroup("tied", ranks)? }))
}

/// Sums the kept gradients of parameters over a group, in one call. A rank without one has zeros.
fn all_reduce<'a>(rt: &Runtime, group: &Communicator, of: impl Iterator<Item = &'a Parameter>) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    let (mut slots, mut grads) = (vec![], vec![]);
    for parameter in of.filter(|p| p.trainable()) {
        let slot = parameter.kept_grad();
        grads.push(match slot.take() {
            Some(grad) => grad,
            None => rt.zeros(&parameter.placement().kept_shape(), Category::Gradients)?,
        });
        slots.push(slot);
    }
    if grads.is_empty() {
        return Ok(());
    }
    let mut buffers = grads.iter_mut().map(Tensor::f32_mut).collect::<Result<Vec<_>, _>>()?;
    group.all_reduce_many(ReduceOp::Sum, &mut buffers)?;
    drop(buffers);
    slots.iter().zip(grads).for_each(|(slot, grad)| slot.put(grad));
    Ok(())
}
