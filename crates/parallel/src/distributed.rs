//! A model on a mesh: which part of each parameter is where, and what happens around its modules.

use std::sync::Arc;

use phalanx_comm::{CommError, Communicator, Dp, DpReplicate, Fsdp as FsdpAxis, Loss, Mesh, ReduceOp, World};
use phalanx_nn::{Cx, Describe, NnError, Parameter, Placement, ScopeHooks, chunk};
use phalanx_tensor::{Runtime, Tensor};
use serde::{Deserialize, Serialize};

use crate::PatternError;
use crate::fsdp::{Fsdp, Reshard, units};

/// How a model is laid over a mesh, apart from the sizes of the mesh's dimensions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl Default for ParallelPlan {
    fn default() -> ParallelPlan {
        ParallelPlan {
            units: vec!["model.layers.{*}".into()],
            reshard: Reshard::default(),
            prefetch: 1,
            reduce_each_micro_batch: true,
        }
    }
}

/// A parameter, and over which ranks it lies.
struct Placed {
    parameter: Parameter,
    /// Whether its rows are dealt to the ranks of the sharding group.
    sharded: bool,
}

/// A model on a mesh, as one rank sees it. Also the hooks that its passes run with ([`phalanx_nn::Env::hooks`]).
pub struct Distributed {
    mesh: Mesh,
    plan: ParallelPlan,
    fsdp: Option<Arc<Fsdp>>,
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
        let group: &Communicator = mesh.group::<FsdpAxis>();
        let (ranks, rank) = (group.size(), group.rank());
        let mut parameters = vec![];
        for parameter in phalanx_nn::parameters(model) {
            let mut placement = Placement::whole(parameter.shape());
            let rows = placement.working_shape().first().copied();
            let sharded = ranks > 1 && rows.is_some();
            if let (true, Some(rows)) = (sharded, rows) {
                placement = placement.keep(chunk(rows, ranks, rank));
            }
            parameter.place(placement)?;
            parameters.push(Placed { parameter, sharded });
        }
        let fsdp = if ranks > 1 {
            let units = units(model, &plan.units)?;
            Some(Arc::new(Fsdp::new(group.clone(), units, plan.reshard, plan.prefetch)))
        } else {
            None
        };
        Ok(Arc::new(Distributed { mesh, plan, fsdp, parameters }))
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

    /// At the end of an accumulation window: every kept gradient becomes the sum over all ranks. A parameter that got no gradient
    /// anywhere gets zeros where it is shared.
    ///
    /// # Errors
    /// If a peer failed or memory runs out.
    pub fn finish_window(&self, rt: &Runtime) -> Result<()> {
        // Rows that were reduced over the shards are still to be summed over the replicas; whole parameters over both.
        self.all_reduce(rt, self.mesh.group::<DpReplicate>(), true)?;
        self.all_reduce(rt, self.mesh.group::<Loss>(), false)
    }

    fn all_reduce(&self, rt: &Runtime, group: &Communicator, sharded: bool) -> Result<()> {
        if group.size() == 1 {
            return Ok(());
        }
        let (mut slots, mut grads) = (vec![], vec![]);
        for placed in self.parameters.iter().filter(|p| p.sharded == sharded && p.parameter.trainable()) {
            let slot = placed.parameter.kept_grad();
            grads.push(match slot.take() {
                Some(grad) => grad,
                None => rt.zeros(&placed.parameter.placement().kept_shape(), phalanx_tensor::Category::Gradients)?,
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

    /// Whether this rank is the one that counts what it keeps of a parameter in sums over all ranks.
    pub fn counts(&self, parameter: &Parameter) -> bool {
        let at = self.mesh.coordinates();
        let sharded = self.parameters.iter().any(|p| p.sharded && p.parameter.is(parameter));
        at.dp_replicate == 0 && (sharded || (at.dp_shard == 0 && at.cp == 0)) && at.tp == 0
    }

    /// Sums over the ranks that hold different tokens.
    ///
    /// # Errors
    /// If a peer failed.
    pub fn sum_over_data(&self, values: &mut [f64]) -> Result<()> {
        Ok(self.mesh.group::<Loss>().all_reduce(ReduceOp::Sum, values)?)
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
