//! The dimensions of a mesh and which ranks form which group: pure arithmetic, for planners and simulators as for runs.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{CommError, Result};

/// The sizes of a mesh's dimensions; all 1 by default. It is what stands in a configuration under `mesh:`.
///
/// Ranks are numbered with `pp` outermost, then `dp_replicate`, `dp_shard`, `cp`, and `tp` innermost:
/// `rank = (((pp · DP_REPLICATE + dp_replicate) · DP_SHARD + dp_shard) · CP + cp) · TP + tp`.
///
/// Experts see the same ranks otherwise: the dp_shard · cp · tp ranks of one pipeline stage and one replica are cut into
/// `efsdp × ep`, `ep` innermost. So `ep` adds no ranks, and must divide dp_shard · cp · tp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MeshShape {
    /// Pipeline stages.
    pub pp: usize,
    /// Data-parallel replicas of the parameters.
    pub dp_replicate: usize,
    /// Data-parallel ranks over which parameters are sharded.
    pub dp_shard: usize,
    /// Context-parallel ranks: pieces of a sequence.
    pub cp: usize,
    /// Tensor-parallel ranks: pieces of a layer.
    pub tp: usize,
    /// Expert-parallel ranks: pieces of the list of experts.
    pub ep: usize,
}

impl Default for MeshShape {
    fn default() -> MeshShape {
        MeshShape { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1, ep: 1 }
    }
}

impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MeshShape { pp, dp_replicate, dp_shard, cp, tp, ep } = self;
        write!(f, "pp {pp}, dp_replicate {dp_replicate}, dp_shard {dp_shard}, cp {cp}, tp {tp}, ep {ep}")
    }
}

/// The axes that a group can run along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AxisKind {
    /// All ranks.
    World,
    /// Pipeline stages.
    Pp,
    /// Replicas of the same shard.
    DpReplicate,
    /// Shards of the same replica.
    DpShard,
    /// Pieces of the same sequences.
    Cp,
    /// Pieces of the same layers.
    Tp,
    /// All data-parallel ranks: dp_replicate × dp_shard.
    Dp,
    /// Ranks that parameters are sharded over: dp_shard × cp.
    Fsdp,
    /// Ranks that losses and token counts are summed over: dp_replicate × dp_shard × cp.
    Loss,
    /// Pieces of the list of experts.
    Ep,
    /// Shards of the same experts.
    Efsdp,
    /// Replicas of the same shard of the same experts.
    Edp,
}

impl AxisKind {
    /// All axes, in the order in which a mesh makes its groups.
    pub const ALL: [AxisKind; 12] = [
        AxisKind::World,
        AxisKind::Pp,
        AxisKind::DpReplicate,
        AxisKind::DpShard,
        AxisKind::Cp,
        AxisKind::Tp,
        AxisKind::Dp,
        AxisKind::Fsdp,
        AxisKind::Loss,
        AxisKind::Ep,
        AxisKind::Efsdp,
        AxisKind::Edp,
    ];

    /// Its name in plans, errors and reports.
    pub fn name(self) -> &'static str {
        match self {
            AxisKind::World => "world",
            AxisKind::Pp => "pp",
            AxisKind::DpReplicate => "dp_replicate",
            AxisKind::DpShard => "dp_shard",
            AxisKind::Cp => "cp",
            AxisKind::Tp => "tp",
            AxisKind::Dp => "dp",
            AxisKind::Fsdp => "fsdp",
            AxisKind::Loss => "loss",
            AxisKind::Ep => "ep",
            AxisKind::Efsdp => "efsdp",
            AxisKind::Edp => "edp",
        }
    }
}

/// Where a rank lies in a mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Pipeline stage.
    pub pp: usize,
    /// Replica.
    pub dp_replicate: usize,
    /// Shard of the replica.
    pub dp_shard: usize,
    /// Piece of the sequence.
    pub cp: usize,
    /// Piece of the layer.
    pub tp: usize,
    /// Shard of the experts' parameters.
    pub efsdp: usize,
    /// Piece of the list of experts.
    pub ep: usize,
}

impl MeshShape {
    fn error(&self, what: impl Into<String>, mend: impl Into<String>) -> CommError {
        CommError::Mesh { shape: self.to_string(), what: what.into(), mend: mend.into() }
    }

    /// Checks the dimensions, and gives the number of ranks that they need.
    ///
    /// # Errors
    /// If one is 0, the product is beyond any machine, or `ep` does not divide dp_shard · cp · tp.
    pub fn num_ranks(&self) -> Result<usize> {
        let sizes = [self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp];
        let names = ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"];
        if let Some((name, _)) = names.iter().zip(sizes.iter().chain([&self.ep])).find(|(_, n)| **n == 0) {
            return Err(self.error(format!("{name} is 0"), format!("set {name} to 1 to turn it off")));
        }
        let product = sizes.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let product =
            product.ok_or_else(|| self.error("the product is beyond any number of ranks", "lower a dimension"))?;
        let inner = self.dp_shard * self.cp * self.tp;
        if !inner.is_multiple_of(self.ep) {
            let fits: Vec<String> = (1..=inner).filter(|d| inner.is_multiple_of(*d)).map(|d| d.to_string()).collect();
            let what = format!("ep = {} does not divide dp_shard · cp · tp = {inner}", self.ep);
            return Err(self.error(what, format!("choose ep among {}", fits.join(", "))));
        }
        Ok(product)
    }

    /// Checks the dimensions against the number of ranks at hand.
    ///
    /// # Errors
    /// As [`MeshShape::num_ranks`], and if the product is not `world_size`.
    pub fn check(&self, world_size: usize) -> Result<()> {
        let needed = self.num_ranks()?;
        if needed == world_size {
            return Ok(());
        }
        let what = format!("pp · dp_replicate · dp_shard · cp · tp = {needed}, there are {world_size} ranks");
        let others = needed / self.dp_shard;
        let mend = if world_size.is_multiple_of(others) && world_size > 0 {
            format!("set dp_shard to {}, or run {needed} ranks", world_size / others)
        } else {
            format!("run {needed} ranks, or make the product {world_size}")
        };
        Err(self.error(what, mend))
    }

    /// Size of the efsdp dimension: dp_shard · cp · tp / ep.
    pub fn efsdp(&self) -> usize {
        self.dp_shard * self.cp * self.tp / self.ep
    }

    /// Where `rank` lies. The shape has been checked, and the rank is below its product.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        let inner = rank % (self.dp_shard * self.cp * self.tp);
        let outer = rank / (self.dp_shard * self.cp * self.tp);
        Coordinates {
            pp: outer / self.dp_replicate,
            dp_replicate: outer % self.dp_replicate,
            dp_shard: inner / (self.cp * self.tp),
            cp: inner / self.tp % self.cp,
            tp: inner % self.tp,
            efsdp: inner / self.ep,
            ep: inner % self.ep,
        }
    }

    /// The ranks that are in one group with `rank` along `axis`, ascending; that is the order of ranks in the group.
    pub fn members(&self, axis: AxisKind, rank: usize) -> Vec<usize> {
        // What all members of a group along the axis have in common.
        let shared = |r: usize| {
            let Coordinates { pp, dp_replicate, dp_shard, cp, tp, efsdp, ep } = self.coordinates(r);
            match axis {
                AxisKind::World => [0, 0, 0, 0, 0],
                AxisKind::Pp => [0, dp_replicate, dp_shard, cp, tp],
                AxisKind::DpReplicate => [pp, 0, dp_shard, cp, tp],
                AxisKind::DpShard => [pp, dp_replicate, 0, cp, tp],
                AxisKind::Cp => [pp, dp_replicate, dp_shard, 0, tp],
                AxisKind::Tp => [pp, dp_replicate, dp_shard, cp, 0],
                AxisKind::Dp => [pp, 0, 0, cp, tp],
                AxisKind::Fsdp => [pp, dp_replicate, 0, 0, tp],
                AxisKind::Loss => [pp, 0, 0, 0, tp],
                AxisKind::Ep => [pp, dp_replicate, efsdp, 0, 0],
                AxisKind::Efsdp => [pp, dp_replicate, 0, ep, 0],
                AxisKind::Edp => [pp, 0, efsdp, ep, 0],
            }
        };
        let (own, all) = (shared(rank), self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp);
        (0..all).filter(|&r| shared(r) == own).collect()
    }
}
