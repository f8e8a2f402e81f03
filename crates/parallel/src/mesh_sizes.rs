//! The sizes of a mesh as they stand in a configuration under `mesh:`.

use phalanx_comm::MeshShape;
use serde::{Deserialize, Serialize};

/// A number of ranks for each axis; what is left out is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MeshSizes {
    /// Pipeline stages.
    pub pp: usize,
    /// Replicas.
    pub dp_replicate: usize,
    /// Shards of the parameters, each with data of its own.
    pub dp_shard: usize,
    /// Pieces of the sequences.
    pub cp: usize,
    /// Pieces of the layers.
    pub tp: usize,
    /// Pieces of the list of experts, over the same ranks.
    pub ep: usize,
}

impl Default for MeshSizes {
    fn default() -> MeshSizes {
        MeshSizes { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1, ep: 1 }
    }
}

impl From<MeshSizes> for MeshShape {
    fn from(m: MeshSizes) -> MeshShape {
        let MeshSizes { pp, dp_replicate, dp_shard, cp, tp, ep } = m;
        MeshShape { pp, dp_replicate, dp_shard, cp, tp, ep }
    }
}
