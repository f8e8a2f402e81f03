//! Context parallelism: the rows of each micro-batch are dealt to the ranks of a group, and attention sees all of them.
//!
//! # How it works
//! Everything but attention works row by row, so a rank does it for its own rows alone. A [`Partition`] says which those are: a table, by which ids,
//! targets and positions are taken *once*, when the micro-batch is dealt ([`Context`] is a [`phalanx_nn::ContextParallel`]). Attention asks for its
//! [`phalanx_nn::ContextAttention`], and gets one of these:
//!
//! | [`ContextForm`] | what moves, a layer, forward | exact | limit |
//! |---|---|---|---|
//! | `all_gather` | K and V of all rows to each rank, in one call | to the bit | memory for K and V of all rows |
//! | `ring` | K and V round the ranks, while they compute | to rounding | none |
//! | `ulysses` | Q, K, V of each rank's rows for its heads of all rows; the output back | to the bit | ranks divide the query heads |
//! | `hybrid` | `ulysses` among `u` neighbours, K and V of their heads round the P / u groups | to rounding | u divides heads and ranks |
//!
//! Backward moves the gradients the other way: summed and scattered for `all_gather`; for `ring` once more round with K and V beside them.
//! All forms hold for documents of any lengths packed end to end, sliding windows, grouped heads, and ranks that have no row. Bytes for T rows, P
//! ranks, widths h of Q and h_kv of K and V together, over all ranks: all_gather and a ring (P − 1)·T·h_kv forward; as much (all_gather), or
//! (2·P − 1)·T·h_kv (ring), backward; ulysses (2·h + h_kv)·T·(P − 1)/P each way. In a hybrid K and V of a group are h_kv / u wide.
//!
//! Sources: Ring Attention (Liu et al., arXiv 2310.01889), DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509), their product (USP, Fang and Zhao, arXiv
//! 2405.07719).

mod all_gather;
mod attention;
mod heads;
mod local;
mod order;
mod partition;
mod ring;
mod runs;
mod ulysses;

use std::sync::Arc;

use phalanx_comm::{Communicator, Traffic};
use phalanx_nn::{Batch, ContextParallel, ContextShare, NnError};
use serde::{Deserialize, Serialize};

use crate::DistributedError;
use attention::{MicroBatch, Outer};
use order::Order;
pub use partition::{Partition, causal_work, imbalance};

/// How attention reaches the keys of other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextForm {
    /// K and V are gathered. The default: to the bit, for any heads, and where ranks share memory the fastest of those.
    #[default]
    AllGather,
    /// K and V go round: for sequences so long that K and V of all rows are too much for a rank.
    Ring,
    /// Rows are exchanged for heads.
    Ulysses,
    /// Rows for heads among neighbours, a ring over their groups.
    Hybrid {
        /// Ranks that exchange rows for heads; divides the ranks and the query heads.
        ulysses: usize,
    },
}

impl ContextForm {
    /// Ranks that exchange rows for heads, of `ranks`.
    pub fn ulysses(self, ranks: usize) -> usize {
        match self {
            ContextForm::AllGather | ContextForm::Ring => 1,
            ContextForm::Ulysses => ranks,
            ContextForm::Hybrid { ulysses } => ulysses,
        }
    }

    /// The partition that suits it: where every rank sees all rows in the end there is nothing to balance, and whole pieces stay in order.
    pub fn partition(self) -> Partition {
        if self == ContextForm::Ulysses { Partition::Contiguous } else { Partition::ZigZag }
    }
}

/// Context parallelism over the ranks of a group, as one of them sees it.
#[derive(Clone, Debug)]
pub struct Context {
    group: Communicator,
    partition: Partition,
    form: ContextForm,
    /// The ranks that this one exchanges rows for heads with, if it does.
    inner: Option<Communicator>,
    /// The ranks that keys go to and come from, if they do.
    outer: Option<Communicator>,
}

impl Context {
    /// For the ranks of `group`; without a partition that of the form. Every rank makes the same call.
    ///
    /// # Errors
    /// If the ranks cannot be grouped as the form wants it.
    pub fn new(
        group: &Communicator,
        form: ContextForm,
        partition: Option<Partition>,
    ) -> Result<Arc<Context>, DistributedError> {
        let (ranks, rank) = (group.size(), group.rank());
        let u = form.ulysses(ranks);
        if u == 0 || !ranks.is_multiple_of(u) {
            let fits: Vec<String> = (1..=ranks).filter(|d| ranks.is_multiple_of(*d)).map(|d| d.to_string()).collect();
            return Err(DistributedError::Plan {
                what: format!("context: hybrid: ulysses = {u} does not divide the {ranks} ranks of cp"),
                mend: format!("choose ulysses among {}", fits.join(", ")),
            });
        }
        // Neighbours exchange heads: that moves most, and neighbours are nearest.
        let subgroup = |name: &str, members: Vec<usize>| match members.len() {
            1 => Ok(None),
            n if n == ranks => Ok(Some(group.clone())),
            _ => group.subgroup(name, &members).map(Some),
        };
        let inner = subgroup("cp_ulysses", (rank / u * u..rank / u * u + u).collect())?;
        let outer = subgroup("cp_ring", (rank % u..ranks).step_by(u).collect())?;
        let partition = partition.unwrap_or(form.partition());
        Ok(Arc::new(Context { group: group.clone(), partition, form, inner, outer }))
    }

    /// Rows of a micro-batch of `rows` rows that this rank holds.
    pub fn held(&self, rows: usize) -> usize {
        self.partition.deal(rows, self.group.size())[self.group.rank()].iter().map(std::ops::Range::len).sum()
    }

    /// What was sent in groups of this form's own, by name.
    pub fn traffic(&self) -> Vec<(String, Traffic)> {
        let own = [&self.inner, &self.outer].into_iter().flatten().filter(|g| g.size() < self.group.size());
        own.map(|g| (g.name().to_owned(), g.traffic())).collect()
    }
}

impl ContextParallel for Context {
    fn share(&self, documents: &[usize]) -> ContextShare {
        let (ranks, rank) = (self.group.size(), self.group.rank());
        let dealt = self.partition.deal(documents.iter().sum(), ranks);
        let u = self.form.ulysses(ranks);
        let groups: Vec<Order> = dealt.chunks(u).map(Order::new).collect();
        let together: Vec<_> = groups.iter().map(|g| g.together.clone()).collect();
        let outer = self.outer.as_ref().map(|group| {
            let group = group.clone();
            match self.form {
                ContextForm::AllGather => Outer::AllGather { group, order: Order::new(&together) },
                _ => Outer::Ring { group, runs: together.iter().map(|rows| runs::runs(documents, rows)).collect() },
            }
        });
        let micro = MicroBatch {
            inner: self.inner.clone().map(|group| (group, groups[rank / u].clone())),
            outer,
            queries: runs::runs(documents, &together[rank / u]),
            documents: runs::whole(documents),
        };
        let mut positions: Vec<u32> = vec![];
        for run in runs::runs(documents, &dealt[rank]) {
            positions.extend((run.position..run.position + run.len).map(|p| p as u32));
        }
        let mut rows: Vec<u32> = dealt[rank].iter().flat_map(|r| r.start as u32..r.end as u32).collect();
        if rows.is_empty() {
            rows.push(0);
            positions.push(0);
        }
        ContextShare { rows: dealt[rank].clone(), batch: Batch::dealt(positions, rows, Arc::new(micro.shared())) }
    }
}

fn failed(e: phalanx_comm::CommError) -> NnError {
    NnError::Parallel(e.to_string())
}
