//! Delayed scales of a model's linear layers (the recipe `fp8_delayed`): the state that a run keeps between its steps.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_autograd::LayerScales;
use phalanx_kernels::lowp::Delayed;

use crate::{Describe, ResolvedPlan, Walk, walk};

/// Scales by the scope path of the linear layer they belong to; a layer that is not listed rounds by its operands' own magnitudes.
#[derive(Debug, Default)]
pub struct DelayedScales {
    /// Sorted by path.
    pub by_path: BTreeMap<String, Arc<LayerScales>>,
}

impl DelayedScales {
    /// Empty histories for the linear layers of `model` that the plan gives a recipe with history; none for all others.
    pub fn new(model: &dyn Describe, plan: &ResolvedPlan) -> DelayedScales {
        let mut by_path = BTreeMap::new();
        walk(model, &mut |event| {
            if let Walk::Module(path, module) = event
                && module.kind() == "linear"
                && plan.arithmetic(path).has_history()
            {
                by_path.insert(path.to_owned(), Arc::new(LayerScales::new(Delayed::default())));
            }
        });
        DelayedScales { by_path }
    }

    /// Ends a step: every layer records what it saw in it. Belongs beside the optimizer's step.
    pub fn commit(&self) {
        self.by_path.values().for_each(|layer| layer.commit());
    }

    /// Ends a step that made no update: what was seen is forgotten.
    pub fn discard(&self) {
        self.by_path.values().for_each(|layer| layer.discard());
    }
}
