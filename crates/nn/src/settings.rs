//! What a resolved plan says of each module: plain data, looked up by scope path.

use std::collections::BTreeMap;

use phalanx_tensor::DType;

/// The settings of one module.
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleSettings {
    /// Forget what the module computes and run it again in backward.
    pub recompute: bool,
    /// Type that its parameters are computed with (the optimizer keeps f32 masters).
    pub precision: DType,
    /// Whether its own parameters are trained.
    pub trainable: bool,
    /// Whether a low-rank adapter sits beside its weight.
    pub adapter: bool,
}

impl Default for ModuleSettings {
    fn default() -> Self {
        ModuleSettings { recompute: false, precision: DType::F32, trainable: true, adapter: false }
    }
}

/// Settings by scope path. A path that is not listed has the default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResolvedPlan {
    /// Sorted by path.
    pub modules: BTreeMap<String, ModuleSettings>,
}

impl ResolvedPlan {
    /// Whether the module at `path` is to be recomputed.
    pub fn recompute(&self, path: &str) -> bool {
        self.modules.get(path).is_some_and(|m| m.recompute)
    }
}
