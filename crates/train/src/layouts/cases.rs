//! The layouts that fit a number of ranks.

use phalanx_comm::MeshShape;
use phalanx_models::ModelConfig;
use phalanx_parallel::fsdp::Reshard;
use phalanx_parallel::pipeline::{ScheduleKind, build};
use phalanx_parallel::tensor::{Style, Tensor};
use phalanx_parallel::{ParallelPlan, PipelinePlan};

use super::{Case, context};

/// Every layout of 2 to `ranks` ranks that fits the model.
pub fn cases(config: &ModelConfig, ranks: usize) -> Vec<Case> {
    let mut out = vec![];
    // Latent attention has no form over ranks yet.
    let latent = config.model_type == "deepseek_v3";
    for world in 2..=ranks {
        let context = if latent { vec![] } else { context::meshes(world) };
        for mesh in context {
            let case = |(suffix, plan): (String, ParallelPlan)| Case {
                name: named(&mesh, &suffix),
                mesh,
                plan,
                micro_batches: 2,
                recompute: false,
            };
            out.extend(context::variants(config, mesh).into_iter().map(case));
        }
        for mesh in meshes(config, world) {
            if mesh.pp > 1 {
                out.extend(pipelines(config, mesh));
                if let Some(mesh) = context::within_stages(mesh).filter(|_| !latent) {
                    out.extend(context::each_another_form(config, pipelines(config, mesh)));
                }
                continue;
            }
            let mut add = |suffix: &str, plan, recompute| {
                out.push(Case { name: named(&mesh, suffix), mesh, plan, micro_batches: 2, recompute });
            };
            add("", ParallelPlan::default(), false);
            if mesh.dp_shard > 1 {
                variants().into_iter().for_each(|(suffix, plan)| add(suffix, plan, false));
            }
            if mesh.dp_shard > 1 || mesh.tp > 1 {
                add("recomputed", ParallelPlan::default(), true);
            }
            if mesh.tp == world {
                tensor_variants().into_iter().for_each(|(suffix, plan)| add(suffix, plan, false));
            }
        }
    }
    out
}

fn meshes(config: &ModelConfig, world: usize) -> Vec<MeshShape> {
    let mut out = vec![];
    for tp in divisors(world).into_iter().filter(|&tp| cuts(config, tp)) {
        for pp in divisors(world / tp).into_iter().filter(|&pp| pp == 1 || tp == 1) {
            for dp_replicate in divisors(world / tp / pp) {
                let dp_shard = world / tp / pp / dp_replicate;
                out.push(MeshShape { pp, dp_replicate, dp_shard, tp, ..MeshShape::default() });
            }
        }
    }
    out
}

/// Whether the model can be cut into `tp`: whole heads, and as many units of the feed-forward on each rank.
fn cuts(config: &ModelConfig, tp: usize) -> bool {
    let kv = config.num_key_value_heads;
    let heads = config.num_attention_heads.is_multiple_of(tp)
        && (kv.is_multiple_of(tp) || tp.is_multiple_of(kv))
        && config.intermediate_size.is_multiple_of(tp);
    tp == 1 || (heads && config.experts.is_none())
}

/// What can be chosen of tensor parallelism, each once.
fn tensor_variants() -> Vec<(&'static str, ParallelPlan)> {
    let plan = |tensor| ParallelPlan { tensor, ..ParallelPlan::default() };
    let styles = |lines: &[(&str, Style)]| {
        let styles = lines.iter().map(|&(pattern, style)| (pattern.into(), style)).collect();
        plan(Tensor { styles, ..Tensor::default() })
    };
    vec![
        ("gathered rows kept", plan(Tensor { keep_gathered: true, ..Tensor::default() })),
        ("attention whole", styles(&[("**.self_attn", Style::Replicate)])),
        ("feed-forward on rows", styles(&[("**.mlp", Style::Sequence)])),
        (
            "feed-forward and vocabulary whole",
            styles(&[
                ("**.mlp", Style::Replicate),
                ("**.embed_tokens", Style::Replicate),
                ("lm_head", Style::Replicate),
            ]),
        ),
    ]
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
        out.push(Case { name: named(&mesh, schedule.name()), mesh, plan, micro_batches, recompute: false });
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
