//! Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685), applied beside a linear layer without touching it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::Parameter;

/// One adapter: y += scale · B(A(dropout(x))).
#[derive(Clone, Debug)]
pub struct LowRank {
    /// A [rank, in].
    pub a: Parameter,
    /// B [out, rank], zero at the start.
    pub b: Parameter,
    /// alpha / rank, or alpha / √rank (rank-stabilised, arXiv 2312.03732).
    pub scale: f32,
    /// Dropout on the adapter's input while training.
    pub dropout: f32,
}

/// Adapters by the scope path of the linear layer they sit beside.
#[derive(Clone, Debug, Default)]
pub struct AdapterSet {
    /// Sorted by path.
    pub by_path: BTreeMap<String, Arc<LowRank>>,
}

impl AdapterSet {
    /// All adapter parameters, in path order, A before B.
    pub fn parameters(&self) -> Vec<Parameter> {
        self.by_path.values().flat_map(|l| [l.a.clone(), l.b.clone()]).collect()
    }
}
