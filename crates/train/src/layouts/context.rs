//! Context parallelism among the layouts: which forms fit, and what they have to move.

use phalanx_comm::{Kind, MeshShape};
use phalanx_models::ModelConfig;
use phalanx_parallel::ParallelPlan;
use phalanx_parallel::context::{ContextForm, Partition};
use phalanx_parallel::fsdp::Reshard;

use super::Case;

/// The meshes of `world` ranks with several in `cp`.
pub(super) fn meshes(world: usize) -> Vec<MeshShape> {
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut out = vec![];
    for cp in divisors(world).filter(|&cp| cp > 1) {
        for dp_replicate in divisors(world / cp) {
            out.push(MeshShape { cp, dp_replicate, dp_shard: world / cp / dp_replicate, ..MeshShape::default() });
        }
    }
    out
}

/// What can be chosen on such a mesh: each form that fits the heads, its parameters kept in one of the ways so that all of them meet.
pub(super) fn variants(config: &ModelConfig, mesh: MeshShape) -> Vec<(String, ParallelPlan)> {
    let mut forms = vec![(ContextForm::AllGather, None), (ContextForm::Ring, None)];
    if mesh.cp * mesh.dp_shard * mesh.dp_replicate == mesh.cp {
        forms.push((ContextForm::AllGather, Some(Partition::Contiguous)));
        forms.push((ContextForm::Ring, Some(Partition::Contiguous)));
    }
    if config.num_attention_heads.is_multiple_of(mesh.cp) {
        forms.push((ContextForm::Ulysses, None));
    }
    for ulysses in 2..mesh.cp {
        if mesh.cp.is_multiple_of(ulysses) && config.num_attention_heads.is_multiple_of(ulysses) {
            forms.push((ContextForm::Hybrid { ulysses }, None));
        }
    }
    let reshards = [Reshard::AfterForward, Reshard::AfterBackward, Reshard::AfterStep];
    let variant = |(i, (context, context_partition)): (usize, (ContextForm, Option<Partition>))| {
        let name = match context {
            ContextForm::AllGather => "all_gather".to_owned(),
            ContextForm::Ring => "ring".to_owned(),
            ContextForm::Ulysses => "ulysses".to_owned(),
            ContextForm::Hybrid { ulysses } => format!("hybrid {ulysses}"),
        };
        let name = if context_partition.is_some() { format!("{name}, contiguous") } else { name };
        let reshard = reshards[(i + mesh.dp_shard + mesh.dp_replicate) % 3];
        (name, ParallelPlan { context, context_partition, reshard, ..ParallelPlan::default() })
    };
    forms.into_iter().enumerate().map(variant).collect()
}

/// A pipeline's mesh of two stages with the ranks of each in `cp` and not in `dp_shard`, where there are several.
pub(super) fn within_stages(mesh: MeshShape) -> Option<MeshShape> {
    (mesh.pp == 2 && mesh.dp_shard > 1).then_some(MeshShape { cp: mesh.dp_shard, dp_shard: 1, ..mesh })
}

/// Gives the forms that fit to cases in turn.
pub(super) fn each_another_form(config: &ModelConfig, cases: Vec<Case>) -> Vec<Case> {
    let turn = |(i, mut case): (usize, Case)| {
        let forms = variants(config, MeshShape { dp_replicate: 2, ..case.mesh });
        let (form, plan) = &forms[i % forms.len()];
        case.name = format!("{} {form}", case.name);
        case.plan.context = plan.context;
        case
    };
    cases.into_iter().enumerate().map(turn).collect()
}

/// Rows of a micro-batch of `rows` that each rank of `cp` holds.
pub(super) fn held(plan: &ParallelPlan, rows: usize, cp: usize) -> Vec<usize> {
    let partition = plan.context_partition.unwrap_or(plan.context.partition());
    let of = |ranges: &Vec<std::ops::Range<usize>>| ranges.iter().map(|r| r.len()).sum();
    partition.deal(rows, cp).iter().map(of).collect()
}

/// (group, kind, calls, bytes) that rank `at` of `cp` moves for one layer and one micro-batch of `rows` rows, forward and backward.
pub(super) fn traffic(
    config: &ModelConfig,
    plan: &ParallelPlan,
    rows: usize,
    cp: usize,
    at: usize,
) -> Vec<(&'static str, Kind, u64, u64)> {
    let (u, held) = (plan.context.ulysses(cp), held(plan, rows, cp));
    // The rows of each group of neighbours, and the heads that one of its ranks works on.
    let groups: Vec<usize> = held.chunks(u).map(|g| g.iter().sum()).collect();
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    let each = heads / u;
    let kv_each = (1..=each).filter(|s| each.is_multiple_of(*s) && (heads / kv_heads).is_multiple_of(*s));
    let kv_each = each / kv_each.max().unwrap_or(1);
    let bytes = |rows: usize, heads: usize| (4 * rows * heads * config.head_dim) as u64;
    let mut out = vec![];
    if u > 1 {
        let group = if u == cp { "cp" } else { "cp_ulysses" };
        let (own, all) = (held[at], groups[at / u]);
        // Rows given away with q, k and v or the gradient of the output; and back with the output or the gradients of q, k and v.
        let both = 2 * each + 2 * kv_each;
        out.push((group, Kind::AllToAll, 4, bytes(own * (u - 1) + all - own, both)));
    }
    let g = cp / u;
    if g > 1 && plan.context == ContextForm::AllGather {
        let width = 2 * kv_heads;
        out.push(("cp", Kind::AllGather, 1, bytes(held[at] * (cp - 1), width)));
        out.push(("cp", Kind::ReduceScatter, 1, bytes(rows - held[at], width)));
    } else if g > 1 {
        let group = if g == cp { "cp" } else { "cp_ring" };
        // Every group's keys but the next one's pass through here, forward and backward; all of their gradients do.
        let next = groups[(at / u + 1) % g];
        let hops = 3 * g as u64 - 2;
        out.push((group, Kind::Send, hops, bytes(3 * rows - 2 * next, 2 * kv_each)));
        out.push((group, Kind::Receive, hops, 0));
    }
    out
}
