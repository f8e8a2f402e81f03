//! What a resolved plan says of each module: plain data, looked up by scope path.

use std::collections::BTreeMap;

pub use phalanx_kernels::gemm::Arithmetic;
pub use phalanx_kernels::lowp::Recipe;
use phalanx_tensor::DType;

/// The settings of one module.
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleSettings {
    /// Forget what the module computes and run it again in backward.
    pub recompute: bool,
    /// Type that its parameters are computed with (the optimizer keeps f32 masters).
    pub precision: DType,
    /// How exact its products must be.
    pub arithmetic: Arithmetic,
    /// Whether a block recipe rounds its gradients at random, not to nearest.
    pub stochastic_gradients: bool,
    /// Whether its own parameters are trained.
    pub trainable: bool,
    /// Whether a low-rank adapter sits beside its weight.
    pub adapter: bool,
}

impl Default for ModuleSettings {
    fn default() -> Self {
        ModuleSettings {
            recompute: false,
            precision: DType::F32,
            arithmetic: Arithmetic::F32,
            stochastic_gradients: false,
            trainable: true,
            adapter: false,
        }
    }
}

/// Settings by scope path. A path that is not listed has the default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResolvedPlan {
    /// Sorted by path.
    pub modules: BTreeMap<String, ModuleSettings>,
}

impl ResolvedPlan {
    /// How exact the products of the module at `path` must be.
    pub fn arithmetic(&self, path: &str) -> Arithmetic {
        self.modules.get(path).map_or(Arithmetic::F32, |m| m.arithmetic)
    }
    /// Whether the module at `path` is to be recomputed.
    pub fn recompute(&self, path: &str) -> bool {
        self.modules.get(path).is_some_and(|m| m.recompute)
    }
}
