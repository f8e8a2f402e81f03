//! What a layout has to move, from its sizes and the lengths of its batches alone.
//!
//! Per group: the calls of each rank, and the bytes that all ranks of the group send together, P ranks and N bytes the full buffer: an
//! all_gather or reduce_scatter (P − 1)·N, an all_reduce 2·(P − 1)·N.

use std::collections::BTreeMap;

use phalanx_comm::{AxisKind, Kind, Traffic};
use phalanx_models::{Model, ModelConfig};
use phalanx_parallel::fsdp::Reshard;
use phalanx_parallel::tensor::Style;

use super::data::{MICRO_BATCHES, Sample, micro_batches};
use super::{Case, LOGITS_CHUNK_ROWS, STEPS};
use crate::Result;

/// What was moved, and whether it is what had to be.
pub(super) struct Moved {
    pub collectives_ok: bool,
    pub bytes_ok: bool,
    pub bytes: u64,
}

/// Calls of each rank, and bytes over all ranks, by group and kind.
type Totals = BTreeMap<(AxisKind, &'static str), (Vec<u64>, u64)>;

/// What ranks have to move.
struct Expected {
    world: usize,
    by: Totals,
}

impl Expected {
    /// Every rank makes `calls` calls in its group of `size` along the axis, which move `bytes` in each group.
    fn add(&mut self, axis: AxisKind, kind: Kind, size: u64, calls: u64, bytes: u64) {
        // Every rank is in one group along an axis, so there are world / size of them.
        let groups = self.world as u64 / size;
        self.add_on(axis, kind, size, &|_| true, calls, bytes * groups);
    }

    /// Ranks that `on` names make `calls` calls, which move `bytes` in all.
    fn add_on(&mut self, axis: AxisKind, kind: Kind, size: u64, on: &dyn Fn(usize) -> bool, calls: u64, bytes: u64) {
        if size > 1 && calls > 0 {
            let entry = self.by.entry((axis, kind.name())).or_insert_with(|| (vec![0; self.world], 0));
            entry.0.iter_mut().enumerate().filter(|(rank, _)| on(*rank)).for_each(|(_, n)| *n += calls);
            entry.1 += bytes;
        }
    }
}

pub(super) fn check(
    config: &ModelConfig,
    case: &Case,
    samples: &[Sample],
    ranks: &[&[(AxisKind, Traffic)]],
    faults: &mut Vec<String>,
) -> Result<Moved> {
    let expected = expected(config, case, samples)?;
    let mut found = Totals::new();
    for (rank, groups) in ranks.iter().enumerate() {
        for (axis, traffic) in *groups {
            for (kind, t) in traffic.kinds() {
                let entry = found.entry((*axis, kind.name())).or_insert_with(|| (vec![0; ranks.len()], 0));
                entry.0[rank] += t.calls;
                entry.1 += t.bytes_sent;
            }
        }
    }
    let mut moved = Moved { collectives_ok: true, bytes_ok: true, bytes: found.values().map(|f| f.1).sum() };
    let keys: std::collections::BTreeSet<_> = expected.keys().chain(found.keys()).copied().collect();
    for key in keys {
        let (calls, bytes) = expected.get(&key).cloned().unwrap_or((vec![0; ranks.len()], 0));
        let (found_calls, found_bytes) = found.get(&key).cloned().unwrap_or((vec![0; ranks.len()], 0));
        let of = format!("{} over {}", key.1, key.0.name());
        if let Some(rank) = found_calls.iter().zip(&calls).position(|(found, want)| found != want) {
            moved.collectives_ok = false;
            let (found, want) = (found_calls[rank], calls[rank]);
            faults.push(format!("{of}: rank {rank} made {found} calls, the formula has {want}"));
        }
        if found_bytes != bytes {
            moved.bytes_ok = false;
            faults.push(format!("{of}: {found_bytes} bytes were sent, the formula has {bytes}"));
        }
    }
    Ok(moved)
}

fn expected(config: &ModelConfig, case: &Case, samples: &[Sample]) -> Result<Totals> {
    let mesh = case.mesh;
    let mut out = Expected { world: mesh.num_ranks()?, by: Totals::new() };
    parameters(config, case, &mut out)?;
    if mesh.tp > 1 {
        rows(config, case, samples, &mut out);
        partial_gradients(config, case, &mut out)?;
    }
    // Loss, count, tokens; and the norm.
    let (data, world) = ((mesh.dp_replicate * mesh.dp_shard * mesh.cp) as u64, out.world as u64);
    for (axis, size, values) in [(AxisKind::Loss, data, 3), (AxisKind::World, world, 1)] {
        out.add(axis, Kind::AllReduce, size, STEPS as u64, STEPS as u64 * 2 * 8 * values * (size - 1));
    }
    Ok(out.by)
}

/// Parameters are gathered, gradients reduced over shards and replicas. Bytes are over all tensor-parallel ranks, of which some hold the same elements.
fn parameters(config: &ModelConfig, case: &Case, out: &mut Expected) -> Result<()> {
    let mesh = case.mesh;
    let (steps, micro) = (STEPS as u64, MICRO_BATCHES as u64);
    let (shards, replicas) = ((mesh.dp_shard * mesh.cp) as u64, mesh.dp_replicate as u64);
    let everywhere = |_: usize| true;
    let units = unit_sizes(config, case)?;
    for (i, &elements) in units.iter().enumerate().filter(|u| *u.1 > 0) {
        let gathers = match case.plan.reshard {
            Reshard::AfterStep => 1,
            Reshard::AfterForward if i > 0 => 2 * micro,
            _ => micro,
        };
        let once = !case.plan.reduce_each_micro_batch || case.plan.reshard == Reshard::AfterStep;
        let (gathers, reductions) = (steps * gathers, steps * if once { 1 } else { micro });
        let bytes = 4 * elements * (shards - 1) * replicas;
        out.add_on(AxisKind::Fsdp, Kind::AllGather, shards, &everywhere, gathers, gathers * bytes);
        out.add_on(AxisKind::Fsdp, Kind::ReduceScatter, shards, &everywhere, reductions, reductions * bytes);
    }
    // The replicas of all shards together hold the whole model.
    let bytes = steps * 2 * 4 * units.iter().sum::<u64>() * (replicas - 1);
    let axis = if shards > 1 { AxisKind::DpReplicate } else { AxisKind::Loss };
    out.add_on(axis, Kind::AllReduce, replicas, &everywhere, steps, bytes);
    Ok(())
}

/// Rows that go between tensor-parallel ranks. In a block, attention and feed-forward each gather T rows and scatter T sums, and the other way round
/// in backward, where what forward gathered is gathered once more unless it was kept; embedding and head have one of each; and the loss takes
/// three numbers a token and rank.
fn rows(config: &ModelConfig, case: &Case, samples: &[Sample], out: &mut Expected) {
    let mesh = case.mesh;
    let (steps, ranks, layers) = (STEPS as u64, mesh.tp as u64, config.num_hidden_layers as u64);
    let shares = mesh.dp_replicate * mesh.dp_shard;
    let count = |style, modules: &[&str]| modules.iter().filter(|m| named(case, m, style)).count() as u64;
    // Parts of a block that are whole on every rank gather their rows, and the gradients of those that they give; they scatter nothing.
    let whole = count(Style::Replicate, &["self_attn", "mlp"]);
    let cut = 2 - whole - count(Style::Sequence, &["mlp"]);
    let (mut gathers, mut scatters) = (2 * (cut + whole), 2 * cut);
    if case.recompute {
        gathers += cut + whole;
        scatters += cut;
    } else if !case.plan.tensor.keep_gathered {
        gathers += cut + whole;
    }
    let head_whole = named(case, "lm_head", Style::Replicate);
    let (gathers, scatters) =
        (layers * gathers + 2, layers * scatters + 2 - count(Style::Replicate, &["lm_head", "embed_tokens"]));
    for share in 0..shares {
        let on = |rank: usize| {
            let at = mesh.coordinates(rank);
            at.dp_replicate * mesh.dp_shard + at.dp_shard == share
        };
        for batch in micro_batches(samples, share, shares) {
            // A rank without tokens takes part with one.
            let tokens = batch.ids.len().max(1) as u64;
            let bytes = 4 * tokens * config.hidden_size as u64 * (ranks - 1);
            for (kind, calls) in [(Kind::AllGather, gathers), (Kind::ReduceScatter, scatters)] {
                out.add_on(AxisKind::Tp, kind, ranks, &on, steps * calls, steps * calls * bytes);
            }
            // Chunks without a target say nothing.
            let chunks = batch.targets.chunks(LOGITS_CHUNK_ROWS).filter(|c| c.iter().any(|&t| t >= 0));
            for chunk in chunks.filter(|_| !head_whole) {
                let bytes = 3 * 8 * chunk.len() as u64 * ranks * (ranks - 1);
                out.add_on(AxisKind::Tp, Kind::AllGather, ranks, &on, steps, steps * bytes);
            }
        }
    }
}

/// Gradients of which tensor-parallel ranks have parts: over all ranks, and over those that share a key head.
fn partial_gradients(config: &ModelConfig, case: &Case, out: &mut Expected) -> Result<()> {
    let (mesh, steps, ranks) = (case.mesh, STEPS as u64, case.mesh.tp as u64);
    let sharers = sharers(config, mesh.tp);
    let (mut all, mut shared) = (0, 0);
    for p in Model::new(config)?.parameters() {
        match held(config, case, p.name()) {
            Held::Cut | Held::Whole => {}
            Held::Part => all += p.len() as u64,
            Held::Shared => shared += p.len() as u64,
        }
    }
    // Every replica sums, and its shards sum together what they keep.
    let replicas = mesh.dp_replicate as u64;
    let everywhere = |_: usize| true;
    let bytes = |elements: u64, size: u64| steps * 2 * 4 * elements * (size - 1) * replicas;
    if all > 0 {
        out.add_on(AxisKind::Tp, Kind::AllReduce, ranks, &everywhere, steps, bytes(all, ranks));
    }
    if shared > 0 {
        out.add_on(AxisKind::Tp, Kind::AllReduce, sharers, &everywhere, steps, bytes(shared, sharers));
    }
    Ok(())
}

/// How the elements of a parameter lie over tensor-parallel ranks.
enum Held {
    /// Each on one rank.
    Cut,
    /// All on every rank, which has a part of each gradient.
    Part,
    /// All on every rank, with the whole gradient.
    Whole,
    /// Each on some ranks, with parts of its gradient: key heads of which there are fewer than ranks.
    Shared,
}

fn held(config: &ModelConfig, case: &Case, name: &str) -> Held {
    let part_of = |modules: &[&str]| modules.iter().any(|m| name.contains(m));
    let styled = |style| {
        ["self_attn", "mlp", "lm_head", "embed_tokens"].iter().any(|m| name.contains(m) && named(case, m, style))
    };
    if styled(Style::Replicate) {
        Held::Whole
    } else if styled(Style::Sequence) || part_of(&["norm", "o_proj.bias", "down_proj.bias"]) {
        Held::Part
    } else if part_of(&["k_proj", "v_proj"]) && sharers(config, case.mesh.tp) > 1 {
        Held::Shared
    } else {
        Held::Cut
    }
}

/// Ranks that have one key head.
fn sharers(config: &ModelConfig, tp: usize) -> u64 {
    (tp / config.num_key_value_heads.min(tp)) as u64
}

/// Whether a line of the plan gives modules of this name this style.
fn named(case: &Case, module: &str, style: Style) -> bool {
    case.plan.tensor.styles.iter().any(|(pattern, s)| *s == style && pattern.ends_with(module))
}

/// Elements of each unit over all tensor-parallel ranks, that of the whole pass first.
fn unit_sizes(config: &ModelConfig, case: &Case) -> Result<Vec<u64>> {
    let model = Model::new(config)?;
    let units = phalanx_parallel::fsdp::units(&model, &case.plan.units)?;
    let copies = |name: &str| match held(config, case, name) {
        _ if case.mesh.tp == 1 => 1,
        Held::Cut => 1,
        Held::Part | Held::Whole => case.mesh.tp as u64,
        Held::Shared => sharers(config, case.mesh.tp),
    };
    let size = |u: &phalanx_parallel::fsdp::Unit| u.parameters.iter().map(|p| p.len() as u64 * copies(p.name())).sum();
    Ok(units.iter().map(size).collect())
}
