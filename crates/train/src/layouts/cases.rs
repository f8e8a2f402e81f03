//! The layouts that fit a number of ranks.

use phalanx_comm::MeshShape;
use phalanx_models::ModelConfig;
use phalanx_parallel::fsdp::Reshard;
use phalanx_parallel::pipeline::{ScheduleKind, build};
use phalanx_parallel::{ParallelPlan, PipelinePlan};

use super::Case;

/// Every layout of 2 to `ranks` ranks that fits the model.
pub fn cases(config: &ModelConfig, ranks: usize) -> Vec<Case> {
    let mut out = vec![];
    for world in 2..=ranks {
        for mesh in meshes(world) {
            if mesh.pp > 1 {
                out.extend(pipelines(config, mesh));
                continue;
            }
            let case = |suffix: &str, plan| Case { name: named(&mesh, suffix), mesh, plan, micro_batches: 2 };
            out.push(case("", ParallelPlan::default()));
            if mesh.dp_shard > 1 {
                out.extend(variants().into_iter().map(|(suffix, plan)| case(suffix, plan)));
            }
        }
    }
    out
}

fn meshes(world: usize) -> Vec<MeshShape> {
    let mut out = vec![];
    for pp in divisors(world) {
        for dp_replicate in divisors(world / pp) {
            out.push(MeshShape { pp, dp_replicate, dp_shard: world / pp / dp_replicate, ..MeshShape::default() });
        }
    }
    out
}

/// The schedules that fit a mesh and the layers of the model.
fn pipelines(config: &ModelConfig, mesh: MeshShape) -> Vec<Case> {
    let mut out = vec![];
    for schedule in ScheduleKind::ALL {
        let micro_batches = 2 * mesh.pp;
        let chunks = (schedule == ScheduleKind::Interleaved).then_some(2);
        let stages = build(schedule, mesh.pp, micro_batches, chunks).map_or(usize::MAX, |s| s.num_stages());
        if stages > config.num_hidden_layers {
            continue;
        }
        // One of the ways to keep parameters for each schedule, so that all of them meet.
        let reshard = [Reshard::AfterForward, Reshard::AfterBackward, Reshard::AfterStep][schedule as usize % 3];
        let pipeline = PipelinePlan { schedule, chunks, ..PipelinePlan::default() };
        let plan = ParallelPlan { reshard, pipeline, ..ParallelPlan::default() };
        out.push(Case { name: named(&mesh, schedule.name()), mesh, plan, micro_batches });
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

/// The dimensions that are not 1, and what else tells a case from others.
fn named(mesh: &MeshShape, suffix: &str) -> String {
    let MeshShape { pp, dp_replicate, dp_shard, cp, tp, ep } = *mesh;
    let dims = [("pp", pp), ("rep", dp_replicate), ("shard", dp_shard), ("cp", cp), ("tp", tp), ("ep", ep)];
    let named: Vec<String> = dims.iter().filter(|d| d.1 > 1).map(|(n, size)| format!("{n}{size}")).collect();
    [named.join("×").as_str(), suffix].join(" ").trim_end().to_owned()
}
