//! What a layout has to move, from its sizes alone.
//!
//! Per group: the calls of each rank, and the bytes that all ranks of the group send together, P ranks and N bytes the full buffer: an
//! all_gather or reduce_scatter (P − 1)·N, an all_reduce 2·(P − 1)·N, a message N.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_comm::{AxisKind, Coordinates, Kind, Traffic};
use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, ModelConfig};
use phalanx_nn::Parameter;
use phalanx_parallel::fsdp::{Reshard, Unit, units};
use phalanx_parallel::pipeline::{Action, Schedule, ScheduleKind, StageLayers, build, split_layers};

use super::data::{Sample, micro_batches};
use super::formula_tensor::copies;
use super::run::{Bytes, Rank};
use super::{Case, STEPS, context};
use crate::Result;

/// What was moved, and whether it is what had to be.
pub(super) struct Moved {
    pub collectives_ok: bool,
    pub bytes_ok: bool,
    pub bytes: u64,
}

/// Calls of each rank, and bytes over all ranks.
#[derive(Clone)]
struct Amount {
    calls: Vec<u64>,
    bytes: u64,
}

type Amounts = BTreeMap<(String, &'static str), Amount>;

pub(super) fn check(
    config: &ModelConfig,
    case: &Case,
    samples: &[Sample],
    ranks: &[&[(String, Traffic)]],
    faults: &mut Vec<String>,
) -> Result<Moved> {
    let none = Amount { calls: vec![0; ranks.len()], bytes: 0 };
    let expected = Formula::new(config, case, samples)?.amounts();
    let mut found = Amounts::new();
    for (rank, groups) in ranks.iter().enumerate() {
        for (group, traffic) in *groups {
            for (kind, t) in traffic.kinds() {
                let entry = found.entry((group.clone(), kind.name())).or_insert_with(|| none.clone());
                entry.calls[rank] += t.calls;
                entry.bytes += t.bytes_sent;
            }
        }
    }
    let mut moved = Moved { collectives_ok: true, bytes_ok: true, bytes: found.values().map(|f| f.bytes).sum() };
    let keys: BTreeSet<_> = expected.keys().chain(found.keys()).cloned().collect();
    for key in keys {
        let want = expected.get(&key).unwrap_or(&none);
        let got = found.get(&key).unwrap_or(&none);
        let of = format!("{} over {}", key.1, key.0);
        if let Some(rank) = (0..ranks.len()).find(|&r| got.calls[r] != want.calls[r]) {
            moved.collectives_ok = false;
            let (made, due) = (got.calls[rank], want.calls[rank]);
            faults.push(format!("{of}: rank {rank} made {made} calls, the formula has {due}"));
        }
        if got.bytes != want.bytes {
            moved.bytes_ok = false;
            faults.push(format!("{of}: {} bytes were sent, the formula has {}", got.bytes, want.bytes));
        }
    }
    Ok(moved)
}

/// Parameters, gradients and moments that each rank keeps: of every parameter of its stages ⌈rows / shards⌉ rows, the last ranks
/// fewer; 4 bytes a value and 4 of gradient, 8 of moments.
pub(super) fn check_memory(
    config: &ModelConfig,
    case: &Case,
    samples: &[Sample],
    ranks: &[Rank],
    faults: &mut Vec<String>,
) -> Result<()> {
    let formula = Formula::new(config, case, samples)?;
    if case.mesh.tp > 1 {
        // Slices differ by style; all ranks together hold every element as often as it has holders.
        let all: u64 = formula.units.iter().map(|u| formula.unit_elements(u, case.mesh.coordinates(0))[0]).sum();
        let (want, got) =
            (4 * all as usize * case.mesh.dp_replicate, ranks.iter().map(|r| r.bytes.weights).sum::<usize>());
        let others =
            ranks.iter().all(|r| r.bytes.gradients == r.bytes.weights && r.bytes.moments == 2 * r.bytes.weights);
        if want != got || !others {
            faults.push(format!("all ranks keep {got} bytes of parameters, the formula has {want}"));
        }
        return Ok(());
    }
    for (r, rank) in ranks.iter().enumerate() {
        let [all, trained] = formula.kept_elements(case.mesh.coordinates(r));
        let want = Bytes { weights: 4 * all, gradients: 4 * trained, moments: 8 * trained };
        if rank.bytes != want {
            faults.push(format!("rank {r} keeps {:?} bytes, the formula has {want:?}", rank.bytes));
        }
    }
    Ok(())
}

/// The sizes that everything follows from.
pub(super) struct Formula<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) case: &'a Case,
    world: usize,
    /// Of a row of activations, bytes.
    pub(super) row: u64,
    pub(super) units: Vec<Unit>,
    /// Of the tied parameter, if there is one.
    tied: u64,
    /// A schedule and what its stages hold; with one stage, one that does the micro-batches in turn.
    schedule: Schedule,
    layers: Vec<StageLayers>,
    /// The micro-batches of each share of the data.
    pub(super) batches: Vec<Vec<TokenBatch>>,
    out: Amounts,
}

impl<'a> Formula<'a> {
    fn new(config: &'a ModelConfig, case: &'a Case, samples: &[Sample]) -> Result<Formula<'a>> {
        let model = Model::new(config)?;
        let (mesh, plan) = (case.mesh, &case.plan.pipeline);
        let schedule = match mesh.pp {
            1 => build(ScheduleKind::OneForwardOneBackward, 1, case.micro_batches, None),
            p => build(plan.schedule, p, case.micro_batches, plan.chunks),
        };
        let schedule = schedule.map_err(crate::layouts::refused)?;
        let layers = split_layers(config.num_hidden_layers, schedule.num_stages(), &plan.layers)
            .map_err(crate::layouts::refused)?;
        let shares = mesh.dp_replicate * mesh.dp_shard;
        let batches = |share| {
            let batches = micro_batches(samples, share, shares, case.micro_batches);
            batches.into_iter().map(|b| b.tokens).collect()
        };
        let tied = if config.tie_word_embeddings { config.vocab_size * config.hidden_size } else { 0 };
        Ok(Formula {
            config,
            case,
            world: mesh.num_ranks()?,
            row: 4 * config.hidden_size as u64,
            units: units(&model, &case.plan.units)?,
            tied: tied as u64,
            schedule,
            layers,
            batches: (0..shares).map(batches).collect(),
            out: Amounts::new(),
        })
    }

    fn amounts(mut self) -> Amounts {
        for rank in 0..self.world {
            let at = self.case.mesh.coordinates(rank);
            self.gathers_and_scatters(rank, at);
            self.sums(rank, at);
            self.messages(rank, at);
            self.rows_between_pieces(rank, at);
            self.partial_gradients(rank, at);
            self.attention_over_ranks(rank, at);
        }
        self.out.retain(|_, a| a.bytes > 0 || a.calls.iter().any(|&c| c > 0));
        self.out
    }

    /// Adds what one rank does in a step.
    pub(super) fn add(&mut self, group: &str, kind: Kind, rank: usize, calls: u64, bytes: u64) {
        let world = self.world;
        let entry = self.out.entry((group.to_owned(), kind.name()));
        let amount = entry.or_insert_with(|| Amount { calls: vec![0; world], bytes: 0 });
        amount.calls[rank] += STEPS as u64 * calls;
        amount.bytes += STEPS as u64 * bytes;
    }

    /// The share of the data that a rank has.
    pub(super) fn share(&self, at: Coordinates) -> usize {
        at.dp_replicate * self.case.mesh.dp_shard + at.dp_shard
    }

    fn replicas(&self) -> u64 {
        self.case.mesh.dp_replicate as u64
    }

    fn shards(&self) -> u64 {
        (self.case.mesh.dp_shard * self.case.mesh.cp) as u64
    }

    /// The stages of a pipeline rank.
    fn stages(&self, at: Coordinates) -> Vec<usize> {
        self.schedule.placement.stages_of(at.pp)
    }

    /// All, and those that are trained.
    fn kept_elements(&self, at: Coordinates) -> [usize; 2] {
        let (shards, index) = (self.shards() as usize, at.dp_shard * self.case.mesh.cp + at.cp);
        let kept = |p: &Parameter| {
            let rows = p.shape()[0];
            let each = rows.div_ceil(shards);
            (rows.saturating_sub(each * index)).min(each) * (p.len() / rows)
        };
        let here = || self.units.iter().flat_map(|u| &u.parameters).filter(|p| self.is_here(p.name(), at));
        [here().map(kept).sum(), here().filter(|p| p.trainable()).map(kept).sum()]
    }

    /// Elements of a unit that a pipeline rank and its tensor-parallel peers have together: all, and those that are trained.
    fn unit_elements(&self, unit: &Unit, at: Coordinates) -> [u64; 2] {
        let here = || unit.parameters.iter().filter(|p| self.is_here(p.name(), at));
        let count = |p: &Parameter| p.len() as u64 * copies(self.config, self.case, p.name());
        [here().map(count).sum(), here().filter(|p| p.trainable()).map(count).sum()]
    }

    /// Whether a stage of a pipeline rank uses a parameter.
    fn is_here(&self, name: &str, at: Coordinates) -> bool {
        let block = name.strip_prefix("model.layers.").and_then(|n| n.split('.').next()?.parse::<usize>().ok());
        self.stages(at).iter().any(|&s| {
            let stage = &self.layers[s];
            match block {
                Some(block) => stage.layers.contains(&block),
                None if name.starts_with("model.embed_tokens") => stage.embedding || (self.tied > 0 && stage.head),
                None => stage.head,
            }
        })
    }

    /// FSDP: a unit is gathered each time a use of it begins while no other is in progress.
    fn gathers_and_scatters(&mut self, rank: usize, at: Coordinates) {
        let (shards, plan) = (self.shards(), self.case.plan.clone());
        if shards == 1 {
            return;
        }
        for i in 0..self.units.len() {
            let [elements, trained] = self.unit_elements(&self.units[i], at);
            if elements == 0 {
                continue;
            }
            // The bytes of a rank's own shard differ; over the group they are (P − 1) · N.
            let first = at.dp_shard + at.cp + at.tp == 0;
            let exact = |n: u64, calls: u64| if first { 4 * n * (shards - 1) * calls } else { 0 };
            let gathers = self.gathers(&self.units[i].path, plan.reshard, at);
            let pipeline = self.case.mesh.pp > 1;
            let once = pipeline || !plan.reduce_each_micro_batch || plan.reshard == Reshard::AfterStep;
            let reductions = if once { 1 } else { self.case.micro_batches as u64 };
            self.add("fsdp", Kind::AllGather, rank, gathers, exact(elements, gathers));
            self.add("fsdp", Kind::ReduceScatter, rank, reductions, exact(trained, reductions));
        }
    }

    fn gathers(&self, unit: &str, reshard: Reshard, at: Coordinates) -> u64 {
        let uses = |stage: usize| {
            let Some(block) = unit.strip_prefix("model.layers.") else { return true };
            let block = block.split('.').next().and_then(|b| b.parse::<usize>().ok());
            block.is_none_or(|b| self.layers[stage].layers.contains(&b))
        };
        let kept = unit.is_empty() || reshard == Reshard::AfterBackward;
        let (mut count, mut held) = (0, 0);
        let mut hold = |begin: bool, end: bool, held: &mut u64| {
            count += u64::from(begin && *held == 0);
            *held = *held + u64::from(begin) - u64::from(end);
        };
        for action in &self.schedule.ranks[at.pp] {
            if action.forward().is_some_and(|p| uses(p.stage)) {
                hold(true, !kept, &mut held);
            }
            let split = matches!(action, Action::InputGrad(_));
            if action.input_grad().is_some_and(|p| uses(p.stage)) {
                hold(!kept, !split, &mut held);
            } else if action.weight_grad().is_some_and(|p| uses(p.stage)) {
                hold(false, true, &mut held);
            }
        }
        if reshard == Reshard::AfterStep { 1 } else { count }
    }

    /// Sums at the end of a window: gradients over replicas and between tied stages, loss, norm.
    fn sums(&mut self, rank: usize, at: Coordinates) {
        let (shards, replicas, pp, world) =
            (self.shards(), self.replicas(), self.case.mesh.pp as u64, self.world as u64);
        let all: u64 = self.units.iter().map(|u| self.unit_elements(u, at)[1]).sum();
        // Every rank of a group sends its share of 2 (P − 1) N; counted at its first rank.
        let share = |first: bool, p: u64, n: u64| if first { 2 * (p - 1) * n } else { 0 };
        if replicas > 1 {
            let group = if shards > 1 { "dp_replicate" } else { "loss" };
            // The replicas of all shards together hold what a stage has.
            let first = at.dp_replicate + at.dp_shard + at.cp + at.tp == 0;
            self.add(group, Kind::AllReduce, rank, 1, share(first, replicas, 4 * all));
        }
        let stages = self.layers.len();
        let (first, last) =
            (self.schedule.placement.rank_of_stage[0], self.schedule.placement.rank_of_stage[stages - 1]);
        if self.tied > 0 && first != last && (at.pp == first || at.pp == last) {
            let counted = at.pp == first && at.dp_shard + at.cp == 0;
            self.add("tied", Kind::AllReduce, rank, 1, share(counted, 2, 4 * self.tied));
        }
        let mut scalars = |name: &str, p: u64, values: u64, first: bool| {
            if p > 1 {
                self.add(name, Kind::AllReduce, rank, 1, share(first, p, 8 * values));
            }
        };
        // Loss, count, tokens; and the norm.
        scalars(AxisKind::Loss.name(), shards * replicas, 3, at.dp_replicate + at.dp_shard + at.cp == 0);
        scalars(AxisKind::Pp.name(), pp, 3, at.pp == 0);
        scalars(AxisKind::World.name(), world, 1, rank == 0);
    }

    /// Attention over the ranks of `cp`, in every layer for every micro-batch.
    fn attention_over_ranks(&mut self, rank: usize, at: Coordinates) {
        let (plan, cp) = (&self.case.plan, self.case.mesh.cp);
        if cp == 1 {
            return;
        }
        let layers: u64 = self.stages(at).iter().map(|&s| self.layers[s].layers.len() as u64).sum();
        for batch in self.batches[self.share(at)].clone() {
            for (group, kind, calls, bytes) in context::traffic(self.config, plan, batch.ids.len(), cp, at.cp) {
                self.add(group, kind, rank, layers * calls, layers * bytes);
            }
        }
    }

    /// Messages between stages: the rows of a micro-batch forward, their gradients back.
    fn messages(&mut self, rank: usize, at: Coordinates) {
        let (batches, rank_of) = (&self.batches[self.share(at)], self.schedule.placement.rank_of_stage.clone());
        // A rank without tokens takes part with one.
        let cp = self.case.mesh.cp;
        let here = |b: &TokenBatch| match cp {
            1 => b.ids.len().max(1) as u64,
            cp => context::held(&self.case.plan, b.ids.len(), cp)[at.cp].max(1) as u64,
        };
        let rows: u64 = batches.iter().map(here).sum();
        let micro = batches.len() as u64;
        for pair in rank_of.windows(2).filter(|pair| pair[0] != pair[1]) {
            if pair.contains(&at.pp) {
                self.add("pp", Kind::Send, rank, micro, rows * self.row);
                self.add("pp", Kind::Receive, rank, micro, 0);
            }
        }
    }
}
