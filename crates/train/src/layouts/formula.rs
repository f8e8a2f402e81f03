//! What a layout has to move, from its sizes alone.
//!
//! Per group: the calls of each rank, and the bytes that all ranks of the group send together, P ranks and N bytes the full buffer: an
//! all_gather or reduce_scatter (P − 1)·N, an all_reduce 2·(P − 1)·N.

use std::collections::BTreeMap;

use phalanx_comm::{AxisKind, Kind, Traffic};
use phalanx_models::{Model, ModelConfig};
use phalanx_parallel::fsdp::Reshard;

use super::data::MICRO_BATCHES;
use super::{Case, STEPS};
use crate::Result;

/// What was moved, and whether it is what had to be.
pub(super) struct Moved {
    pub collectives_ok: bool,
    pub bytes_ok: bool,
    pub bytes: u64,
}

/// Calls of a rank, and bytes over all ranks.
type Expected = BTreeMap<(AxisKind, &'static str), (u64, u64)>;

pub(super) fn check(
    config: &ModelConfig,
    case: &Case,
    ranks: &[&[(AxisKind, Traffic)]],
    faults: &mut Vec<String>,
) -> Result<Moved> {
    let expected = expected(config, case)?;
    let mut found: BTreeMap<(AxisKind, &'static str), (Vec<u64>, u64)> = BTreeMap::new();
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
        let (calls, bytes) = expected.get(&key).copied().unwrap_or_default();
        let (found_calls, found_bytes) = found.get(&key).cloned().unwrap_or((vec![0; ranks.len()], 0));
        let of = format!("{} over {}", key.1, key.0.name());
        if let Some(rank) = found_calls.iter().position(|&c| c != calls) {
            moved.collectives_ok = false;
            faults.push(format!("{of}: rank {rank} made {} calls, the formula has {calls}", found_calls[rank]));
        }
        if found_bytes != bytes {
            moved.bytes_ok = false;
            faults.push(format!("{of}: {found_bytes} bytes were sent, the formula has {bytes}"));
        }
    }
    Ok(moved)
}

fn expected(config: &ModelConfig, case: &Case) -> Result<Expected> {
    let mut out = Expected::new();
    let mesh = case.mesh;
    let world = mesh.num_ranks()? as u64;
    let mut add = |axis: AxisKind, kind: Kind, size: u64, calls: u64, bytes: u64| {
        // Every rank is in one group along an axis, so there are world / size of them.
        if size > 1 && calls > 0 {
            let entry = out.entry((axis, kind.name())).or_insert((0, 0));
            entry.0 += calls;
            entry.1 += bytes * (world / size);
        }
    };
    let (steps, micro) = (STEPS as u64, MICRO_BATCHES as u64);
    let (shards, replicas) = ((mesh.dp_shard * mesh.cp) as u64, mesh.dp_replicate as u64);
    let units = unit_sizes(config, &case.plan.units)?;
    for (i, &elements) in units.iter().enumerate().filter(|u| *u.1 > 0) {
        let gathers = match case.plan.reshard {
            Reshard::AfterStep => 1,
            Reshard::AfterForward if i > 0 => 2 * micro,
            _ => micro,
        };
        let once = !case.plan.reduce_each_micro_batch || case.plan.reshard == Reshard::AfterStep;
        let reductions = if once { 1 } else { micro };
        let bytes = 4 * elements * (shards - 1);
        add(AxisKind::Fsdp, Kind::AllGather, shards, steps * gathers, steps * gathers * bytes);
        add(AxisKind::Fsdp, Kind::ReduceScatter, shards, steps * reductions, steps * reductions * bytes);
    }
    let all: u64 = units.iter().sum();
    if shards > 1 {
        // The replicas of all shards together hold the whole model.
        let (bytes, groups) = (2 * 4 * all * (replicas - 1), world / replicas / shards);
        if replicas > 1 {
            let entry = out.entry((AxisKind::DpReplicate, Kind::AllReduce.name())).or_insert((0, 0));
            *entry = (steps, steps * bytes * groups);
        }
    } else {
        add(AxisKind::Loss, Kind::AllReduce, replicas, steps, steps * 2 * 4 * all * (replicas - 1));
    }
    let mut scalars = |axis, size: u64, values: u64| {
        if size > 1 {
            let entry = out.entry((axis, Kind::AllReduce.name())).or_insert((0, 0));
            entry.0 += steps;
            entry.1 += steps * 2 * 8 * values * (size - 1) * (world / size);
        }
    };
    // Loss, count, tokens; and the norm.
    scalars(AxisKind::Loss, shards * replicas, 3);
    scalars(AxisKind::World, world, 1);
    Ok(out)
}

/// Elements of each unit, that of the whole pass first.
fn unit_sizes(config: &ModelConfig, patterns: &[String]) -> Result<Vec<u64>> {
    let model = Model::new(config)?;
    let units = phalanx_parallel::fsdp::units(&model, patterns)?;
    let size = |u: &phalanx_parallel::fsdp::Unit| u.parameters.iter().map(|p| p.len() as u64).sum();
    Ok(units.iter().map(size).collect())
}
