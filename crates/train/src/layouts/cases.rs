//! The layouts that fit a number of ranks.

use phalanx_comm::MeshShape;
use phalanx_models::ModelConfig;
use phalanx_parallel::ParallelPlan;
use phalanx_parallel::fsdp::Reshard;

use super::Case;

/// Every layout of 2 to `ranks` ranks that fits the model.
pub fn cases(_config: &ModelConfig, ranks: usize) -> Vec<Case> {
    let mut out = vec![];
    for world in 2..=ranks {
        for mesh in meshes(world) {
            out.push(Case { name: name(&mesh), mesh, plan: ParallelPlan::default() });
            if mesh.dp_shard > 1 {
                for (suffix, plan) in variants() {
                    out.push(Case { name: format!("{} {suffix}", name(&mesh)), mesh, plan });
                }
            }
        }
    }
    out
}

fn meshes(world: usize) -> Vec<MeshShape> {
    let mut out = vec![];
    for dp_replicate in divisors(world) {
        out.push(MeshShape { dp_replicate, dp_shard: world / dp_replicate, ..MeshShape::default() });
    }
    out
}

/// What can be chosen beside the mesh, each once.
fn variants() -> Vec<(&'static str, ParallelPlan)> {
    let base = ParallelPlan::default;
    vec![
        ("zero-2", ParallelPlan { reshard: Reshard::AfterBackward, ..base() }),
        ("zero-1", ParallelPlan { reshard: Reshard::AfterStep, ..base() }),
        ("no prefetch, reduced once", ParallelPlan { prefetch: 0, reduce_each_micro_batch: false, ..base() }),
        (
            "units of half a block, 3 ahead",
            ParallelPlan {
                units: vec!["model.layers.{*}.self_attn".into(), "model.layers.{*}.mlp".into()],
                prefetch: 3,
                ..base()
            },
        ),
    ]
}

fn divisors(n: usize) -> Vec<usize> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

/// The dimensions that are not 1.
fn name(mesh: &MeshShape) -> String {
    let MeshShape { pp, dp_replicate, dp_shard, cp, tp, ep } = *mesh;
    let dims = [("pp", pp), ("rep", dp_replicate), ("shard", dp_shard), ("cp", cp), ("tp", tp), ("ep", ep)];
    let named: Vec<String> = dims.iter().filter(|d| d.1 > 1).map(|(n, size)| format!("{n}{size}")).collect();
    named.join("×")
}
