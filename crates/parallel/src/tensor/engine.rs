//! Tensor parallelism in the hooks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use phalanx_autograd::AutogradError;
use phalanx_autograd::functions::Across;
use phalanx_comm::{AxisKind, CommError, Communicator, Group, Tp, Traffic};
use phalanx_nn::{Cx, Parameter, Result, chunk};
use phalanx_tensor::Tensor;

use super::layout::{Input, Output};
use super::moves::{self, Gradient, Rows};
use super::{Layout, Slice};

/// The ranks of a tensor-parallel group at work on one model.
pub(crate) struct TensorParallel {
    group: Communicator,
    layout: Layout,
    keep_gathered: bool,
    /// Ranks that hold one slice together, other than all: by their range, the smallest ranges first.
    holders: BTreeMap<(usize, usize), Communicator>,
    across: Arc<dyn Across>,
}

/// The group, as the fused loss needs it.
struct Ranks(Communicator);

impl Across for Ranks {
    fn ranks(&self) -> usize {
        self.0.size()
    }
    fn all_gather(&self, mine: &[f64], all: &mut [f64]) -> phalanx_autograd::Result<()> {
        self.0.all_gather(mine, all).map_err(|e| AutogradError::Other(e.to_string()))
    }
}

impl TensorParallel {
    /// Takes charge of parameters that have been placed by `slices` of `layout`.
    ///
    /// # Errors
    /// If the world has failed.
    pub(crate) fn new<'a>(
        group: &Group<Tp>,
        layout: Layout,
        slices: impl Iterator<Item = &'a Slice>,
        keep_gathered: bool,
    ) -> std::result::Result<TensorParallel, CommError> {
        let group = group.communicator().clone();
        let mut holders = BTreeMap::new();
        for Slice { holders: r, .. } in slices.filter(|s| s.partial && s.holders.len() < group.size()) {
            if let std::collections::btree_map::Entry::Vacant(place) = holders.entry((r.len(), r.start)) {
                let members: Vec<usize> = r.clone().collect();
                place.insert(group.subgroup(&format!("tp {}-{}", r.start, r.end - 1), &members)?);
            }
        }
        let across = Arc::new(Ranks(group.clone()));
        Ok(TensorParallel { group, layout, keep_gathered, holders, across })
    }

    /// The groups over which partial gradients are summed, with the range of ranks that each is, in an order that is the same for all its members: ranks
    /// of a small group meet before those of a greater one.
    pub(crate) fn sums(&self) -> impl Iterator<Item = (Range<usize>, &Communicator)> {
        let all = (0..self.group.size(), &self.group);
        self.holders.iter().map(|(&(len, start), group)| (start..start + len, group)).chain([all])
    }

    /// What went through the groups of this form that are no axis of the mesh.
    pub(crate) fn traffic(&self) -> impl Iterator<Item = (AxisKind, Traffic)> {
        self.holders.values().map(|group| (AxisKind::Tp, group.traffic()))
    }

    pub(crate) fn across(&self) -> Arc<dyn Across> {
        Arc::clone(&self.across)
    }

    /// First row of this rank among `tokens`.
    pub(crate) fn first_row(&self, tokens: usize) -> usize {
        chunk(tokens, self.group.size(), self.group.rank()).start
    }

    fn rows(&self, cx: &Cx) -> Rows {
        Rows { group: self.group.clone(), total: cx.env().batch().tokens() }
    }

    /// Rows that the module in scope gets.
    pub(crate) fn input(&self, cx: &mut Cx, x: Tensor) -> Result<Tensor> {
        let Some(&input) = self.layout.inputs.get(cx.path()) else { return Ok(x) };
        let gradient = match input {
            Input::Gather => Gradient::Part,
            Input::GatherForAll => Gradient::Whole,
        };
        let again = !self.keep_gathered && !runs_again(cx);
        let rows = self.rows(cx);
        let (rt, tape) = cx.parts();
        Ok(moves::gather(rt, tape, rows, &x, gradient, again)?)
    }

    /// Rows that the caller of the module in scope gets.
    pub(crate) fn output(&self, cx: &mut Cx, y: Tensor) -> Result<Tensor> {
        let Some(output) = self.layout.outputs.get(cx.path()) else { return Ok(y) };
        let rows = self.rows(cx);
        let (rt, tape) = cx.parts();
        Ok(match output {
            Output::ReduceScatter(bias) => {
                let trains = bias.as_ref().is_some_and(Parameter::trainable);
                moves::reduce_scatter(rt, tape, rows, &y, trains)?
            }
            Output::Own => moves::take(rt, tape, rows, &y)?,
        })
    }
}

/// Whether the module in scope lies inside one that runs a second time: what is recorded then is used at once and need not be small.
fn runs_again(cx: &Cx) -> bool {
    let (path, plan) = (cx.path(), &cx.env().plan);
    path.match_indices('.').any(|(at, _)| plan.recompute(&path[..at]))
}
