//! The layouts that fit a number of ranks.

use phalanx_comm::MeshShape;
use phalanx_models::ModelConfig;
use phalanx_parallel::ParallelPlan;
use phalanx_parallel::fsdp::Reshard;
use phalanx_parallel::tensor::{Style, Tensor};

use super::Case;

/// Every layout of 2 to `ranks` ranks that fits the model.
pub fn cases(config: &ModelConfig, ranks: usize) -> Vec<Case> {
    let mut out = vec![];
    for world in 2..=ranks {
        for mesh in meshes(config, world) {
            let mut add = |suffix: &str, plan, recompute| {
                let name = [name(&mesh), suffix.to_owned()].join(" ").trim_end().to_owned();
                out.push(Case { name, mesh, plan, recompute });
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
        for dp_replicate in divisors(world / tp) {
            out.push(MeshShape { dp_replicate, dp_shard: world / tp / dp_replicate, tp, ..MeshShape::default() });
        }
    }
    out
}

/// Whether the model can be cut into `tp`: whole heads, and as many units of the feed-forward on each rank.
fn cuts(config: &ModelConfig, tp: usize) -> bool {
    let kv = config.num_key_value_heads;
    config.num_attention_heads.is_multiple_of(tp)
        && (kv.is_multiple_of(tp) || tp.is_multiple_of(kv))
        && config.intermediate_size.is_multiple_of(tp)
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

/// What can be chosen of sharding, each once.
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
