//! A model on a mesh: which part of each parameter is where, and what happens around its modules.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use phalanx_autograd::functions::Across;
use phalanx_comm::{
    CommError, Communicator, Cp, Dp, DpReplicate, Fsdp as FsdpAxis, Group, Loss, Mesh, Pp, ReduceOp, Tp, Traffic, World,
};
use phalanx_nn::{AdapterSet, Cx, Describe, NnError, Parameter, Placement, ScopeHooks, Walk, chunk};
use phalanx_tensor::{Category, Runtime, Tensor};
use serde::{Deserialize, Serialize};

use crate::PatternError;
use crate::context::{Context, ContextForm, Partition};
use crate::fsdp::{Fsdp, Reshard, units};
use crate::stages::{PipelinePlan, Stages, Tied};
use crate::tensor::{self, Layout, Slice, TensorParallel};

/// How a model is laid over a mesh, apart from the sizes of the mesh's dimensions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelPlan {
    /// Modules whose parameters are gathered together.
    #[serde(deserialize_with = "crate::plan::one_or_many")]
    pub units: Vec<String>,
    /// When gathered parameters are given back.
    pub reshard: Reshard,
    /// Units gathered ahead of the one that computes.
    pub prefetch: usize,
    /// Gradients are reduced in each micro-batch of an accumulation window, not only in its last.
    pub reduce_each_micro_batch: bool,
    /// Stages and their schedule.
    pub pipeline: PipelinePlan,
    /// How modules are cut over tensor-parallel ranks.
    pub tensor: tensor::Tensor,
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
            tensor: tensor::Tensor::default(),
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
    /// What of it this rank's tensor-parallel peers have.
    slice: Slice,
}

/// A model on a mesh, as one rank sees it. Also the hooks that its passes run with ([`phalanx_nn::Env::hooks`]).
pub struct Distributed {
    mesh: Mesh,
    plan: ParallelPlan,
    fsdp: Option<Arc<Fsdp>>,
    stages: Option<Stages>,
    context: Option<Arc<Context>>,
    tied: Option<Tied>,
    tensor: Option<TensorParallel>,
    /// Those that this rank uses.
    parameters: Vec<Placed>,
    /// Parameters beside the model's that every rank holds whole (adapters).
    beside: OnceLock<Vec<Parameter>>,
}

/// What can go wrong with a model on a mesh.
#[derive(Debug, thiserror::Error)]
pub enum DistributedError {
    /// A pattern cannot be read.
    #[error("plan: {0}")]
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
    /// If a pattern matches nothing, units lie inside one another, a size cannot be cut into as many pieces as there are ranks, or a parameter has a
    /// value already.
    pub fn new(model: &dyn Describe, mesh: Mesh, plan: ParallelPlan) -> Result<Arc<Distributed>> {
        Distributed::with_adapters(model, &AdapterSet::default(), mesh, plan)
    }

    /// As [`Distributed::new`], with low-rank adapters, which have no values yet either. They are cut as the layers beside them, and whole on
    /// every data-parallel rank.
    ///
    /// # Errors
    /// As [`Distributed::new`].
    pub fn with_adapters(
        model: &dyn Describe,
        adapters: &AdapterSet,
        mesh: Mesh,
        plan: ParallelPlan,
    ) -> Result<Arc<Distributed>> {
        let pp = mesh.group::<Pp>();
        if pp.size() > 1 && mesh.shape().tp > 1 {
            return Err(DistributedError::Plan {
                what: format!("mesh ({}): pipeline stages are not cut over tensor-parallel ranks yet", mesh.shape()),
                mend: "set pp or tp to 1".into(),
            });
        }
        if mesh.group::<Cp>().size() > 1 && (mesh.shape().tp > 1 || has_latent_attention(model)) {
            return Err(DistributedError::Plan {
                what: format!("mesh ({}): cp goes neither with tp nor with latent attention yet", mesh.shape()),
                mend: "set cp or tp to 1".into(),
            });
        }
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
        let tp = mesh.group::<Tp>();
        let layout = Layout::new(model, &plan.tensor, tp.size(), tp.rank())?;
        let mut parameters = vec![];
        for (parameter, users) in &users {
            if !users.contains(&pp.rank()) {
                parameter.place(Placement::nowhere(parameter.shape()))?;
                continue;
            }
            let slice = layout.slice_of(parameter);
            let mut placement = slice.of(Placement::whole(parameter.shape()));
            let rows = placement.working_shape().first().copied();
            let sharded = ranks > 1 && rows.is_some();
            if let (true, Some(rows)) = (sharded, rows) {
                placement = placement.keep(chunk(rows, ranks, rank));
            }
            parameter.place(placement)?;
            let counted_before = users[0] != pp.rank();
            parameters.push(Placed { parameter: parameter.clone(), sharded, counted_before, slice });
        }
        for (path, adapter) in &adapters.by_path {
            for (parameter, slice) in layout.slices_of_adapter(path, adapter) {
                parameter.place(slice.of(Placement::whole(parameter.shape())))?;
                parameters.push(Placed { parameter, sharded: false, counted_before: false, slice });
            }
        }
        let fsdp = if ranks > 1 {
            let mut units = units(model, &plan.units)?;
            units.iter_mut().for_each(|u| u.parameters.retain(|p| parameters.iter().any(|q| q.parameter.is(p))));
            units.retain(|u| u.path.is_empty() || !u.parameters.is_empty());
            Some(Arc::new(Fsdp::new(group.clone(), units, plan.reshard, plan.prefetch)))
        } else {
            None
        };
        let tensor = if tp.size() > 1 {
            let slices = parameters.iter().map(|p| &p.slice);
            Some(TensorParallel::new(tp, layout, slices, plan.tensor.keep_gathered)?)
        } else {
            None
        };
        let tied = tied(&users, pp)?;
        let cp = mesh.group::<Cp>();
        let context = match cp.size() {
            1 => None,
            _ => Some(Context::new(cp, plan.context, plan.context_partition)?),
        };
        let beside = OnceLock::new();
        Ok(Arc::new(Distributed { mesh, plan, fsdp, stages, context, tied, tensor, parameters, beside }))
    }

    /// What this rank sent in each group of more than one rank, and where its time went. Groups of some tensor-parallel ranks come under their
    /// axis, each by itself.
    pub fn traffic(&self) -> Vec<(String, Traffic)> {
        let some = self.tensor.iter().flat_map(TensorParallel::traffic);
        let axes = self.mesh.traffic().into_iter().chain(some).map(|(axis, traffic)| (axis.name().to_owned(), traffic));
        let tied = self.tied.iter().map(|t| (t.group.name().to_owned(), t.group.traffic()));
        axes.chain(tied).chain(self.context.iter().flat_map(|c| c.traffic())).collect()
    }

    /// How micro-batches are dealt to the ranks of `cp`, where there are several.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.context.as_ref()
    }

    /// Time in which computing has stood still for gathers and sums that run beside it, since the start. (Calls that do not run beside it are in
    /// [`Distributed::traffic`].)
    pub fn blocked(&self) -> Duration {
        self.fsdp.as_ref().map_or(Duration::ZERO, |fsdp| fsdp.blocked())
    }

    /// The stages, where the model is cut into some.
    pub fn stages(&self) -> Option<&Stages> {
        self.stages.as_ref()
    }

    /// Takes charge of parameters beside the model's, whole on every rank: their gradients are summed too. Only the first call counts.
    pub fn replicate(&self, parameters: Vec<Parameter>) {
        let _ = self.beside.set(parameters);
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
        let beside = self.beside.get().into_iter().flatten();
        all_reduce(rt, self.mesh.group::<Loss>(), of(false).chain(beside))?;
        // What each tensor-parallel rank has only a part of.
        for (holders, group) in self.tensor.iter().flat_map(TensorParallel::sums) {
            let partial = self.parameters.iter().filter(|p| p.slice.partial && p.slice.holders == holders);
            all_reduce(rt, group, partial.map(|p| &p.parameter))?;
        }
        // Each stage has the sum of its own uses.
        self.tied.as_ref().map_or(Ok(()), |tied| all_reduce(rt, &tied.group, tied.parameters.iter()))
    }

    /// Whether this rank is the one that counts what it keeps of a parameter in sums over all ranks.
    pub fn counts(&self, parameter: &Parameter) -> bool {
        let at = self.mesh.coordinates();
        let Some(placed) = self.parameters.iter().find(|p| p.parameter.is(parameter)) else {
            let beside = self.beside.get().into_iter().flatten().any(|p| p.is(parameter));
            return beside && self.mesh.group::<World>().rank() == 0;
        };
        let first = at.dp_replicate == 0 && (placed.sharded || (at.dp_shard == 0 && at.cp == 0));
        first && at.tp == placed.slice.holders.start && !placed.counted_before
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
    fn input(&self, cx: &mut Cx, x: Tensor) -> phalanx_nn::Result<Tensor> {
        match &self.tensor {
            Some(tensor) => tensor.input(cx, x),
            None => Ok(x),
        }
    }
    fn output(&self, cx: &mut Cx, y: Tensor) -> phalanx_nn::Result<Tensor> {
        match &self.tensor {
            Some(tensor) => tensor.output(cx, y),
            None => Ok(y),
        }
    }
    fn across(&self) -> Option<Arc<dyn Across>> {
        self.tensor.as_ref().map(TensorParallel::across)
    }
    fn first_row(&self, tokens: usize) -> usize {
        self.tensor.as_ref().map_or(0, |tensor| tensor.first_row(tokens))
    }
    fn leave(&self, cx: &mut Cx) -> phalanx_nn::Result<()> {
        self.fsdp.as_ref().map_or(Ok(()), |fsdp| fsdp.leave(cx))
    }
}

fn has_latent_attention(model: &dyn Describe) -> bool {
    let mut found = false;
    phalanx_nn::walk(model, &mut |event| {
        found |= matches!(event, Walk::Module(_, m) if m.kind() == "latent_attention")
    });
    found
}

fn blocks(model: &dyn Describe) -> usize {
    let mut n = 0;
    phalanx_nn::walk(model, &mut |event| n += usize::from(matches!(event, Walk::Module(_, m) if m.kind() == "block")));
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
