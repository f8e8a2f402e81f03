//! What tensor parallelism has to move.

use phalanx_comm::{Coordinates, Kind};
use phalanx_models::ModelConfig;
use phalanx_parallel::tensor::Style;

use super::formula::Formula;
use super::{Case, LOGITS_CHUNK_ROWS};

/// How the elements of a parameter lie over tensor-parallel ranks.
pub(super) enum Held {
    /// Each on one rank.
    Cut,
    /// All on every rank, which has a part of each gradient.
    Part,
    /// All on every rank, with the whole gradient.
    Whole,
    /// Each on some ranks, with parts of its gradient: key heads of which there are fewer than ranks.
    Shared,
}

pub(super) fn held(config: &ModelConfig, case: &Case, name: &str) -> Held {
    let part_of = |modules: &[&str]| modules.iter().any(|m| name.contains(m));
    let styled = |style| {
        ["self_attn", "mlp", "lm_head", "embed_tokens"].iter().any(|m| name.contains(m) && is_styled(case, m, style))
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

/// Ranks that hold each element of a parameter.
pub(super) fn copies(config: &ModelConfig, case: &Case, name: &str) -> u64 {
    match held(config, case, name) {
        _ if case.mesh.tp == 1 => 1,
        Held::Cut => 1,
        Held::Part | Held::Whole => case.mesh.tp as u64,
        Held::Shared => sharers(config, case.mesh.tp),
    }
}

/// Ranks that have one key head.
fn sharers(config: &ModelConfig, tp: usize) -> u64 {
    (tp / config.num_key_value_heads.min(tp)) as u64
}

/// Whether a line of the plan gives modules of this name this style.
fn is_styled(case: &Case, module: &str, style: Style) -> bool {
    case.plan.tensor.styles.iter().any(|(pattern, s)| *s == style && pattern.ends_with(module))
}

impl Formula<'_> {
    /// Rows that go between tensor-parallel ranks. In a block, attention and feed-forward each gather T rows and scatter T sums, and the other
    /// way round in backward, where what forward gathered is gathered once more unless it was kept; embedding and head have one of each; and
    /// the loss takes three numbers a token and rank.
    pub(super) fn rows_between_pieces(&mut self, rank: usize, at: Coordinates) {
        let (case, ranks, layers) = (self.case, self.case.mesh.tp as u64, self.config.num_hidden_layers as u64);
        if ranks == 1 {
            return;
        }
        let count = |style, modules: &[&str]| modules.iter().filter(|m| is_styled(case, m, style)).count() as u64;
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
        let head_whole = is_styled(case, "lm_head", Style::Replicate);
        let gathers = layers * gathers + 2;
        let scatters = layers * scatters + 2 - count(Style::Replicate, &["lm_head", "embed_tokens"]);
        let first = |bytes: u64| if at.tp == 0 { bytes } else { 0 };
        for batch in self.batches[self.share(at)].clone() {
            // A rank without tokens takes part with one.
            let tokens = batch.ids.len().max(1) as u64;
            let bytes = tokens * self.row * (ranks - 1);
            for (kind, calls) in [(Kind::AllGather, gathers), (Kind::ReduceScatter, scatters)] {
                self.add("tp", kind, rank, calls, first(calls * bytes));
            }
            // Chunks without a target say nothing.
            let chunks = batch.targets.chunks(LOGITS_CHUNK_ROWS).filter(|c| c.iter().any(|&t| t >= 0));
            for chunk in chunks.filter(|_| !head_whole) {
                let bytes = 3 * 8 * chunk.len() as u64 * ranks * (ranks - 1);
                self.add("tp", Kind::AllGather, rank, 1, first(bytes));
            }
        }
    }

    /// Gradients of which tensor-parallel ranks have parts: over all ranks, and over those that share a key head.
    pub(super) fn partial_gradients(&mut self, rank: usize, at: Coordinates) {
        let (ranks, sharers) = (self.case.mesh.tp as u64, sharers(self.config, self.case.mesh.tp));
        if ranks == 1 {
            return;
        }
        let (mut all, mut shared) = (0, 0);
        for p in self.units.iter().flat_map(|u| &u.parameters) {
            match held(self.config, self.case, p.name()) {
                Held::Cut | Held::Whole => {}
                Held::Part => all += p.len() as u64,
                Held::Shared => shared += p.len() as u64,
            }
        }
        // Every replica sums, and its shards sum together what they keep.
        let first = at.dp_shard + at.cp + at.tp == 0;
        for (elements, size) in [(all, ranks), (shared, sharers)] {
            if elements > 0 {
                let bytes = if first { 2 * 4 * elements * (size - 1) } else { 0 };
                self.add("tp", Kind::AllReduce, rank, 1, bytes);
            }
        }
    }
}
