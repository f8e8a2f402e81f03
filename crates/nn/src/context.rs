//! Context parallelism as attention sees it: rows of a micro-batch lie on several ranks, and keys are to be had from all of them.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use phalanx_autograd::Tape;
use phalanx_tensor::{Runtime, Tensor};

use crate::{Batch, Result};

/// The attention of one micro-batch whose rows are dealt to several ranks.
pub trait ContextAttention: Debug + Send + Sync {
    /// What [`phalanx_autograd::functions::attention`] gives for the rows of this rank, as if those of all ranks were here.
    ///
    /// q [T,N,D], k and v [T,K,D] → [T,N,D], T rows of this rank, rotated by their positions. `scale` of the scores; `window` in positions.
    /// All ranks of the group make the call together, and their backward passes too.
    ///
    /// # Errors
    /// If the heads do not go with the ranks, a peer fails, or memory runs out.
    fn attention(
        &self,
        rt: &Runtime,
        tape: Option<&mut Tape>,
        qkv: [&Tensor; 3],
        scale: f32,
        window: Option<usize>,
    ) -> Result<Tensor>;
}

/// How micro-batches are dealt to the ranks of a group.
pub trait ContextParallel: Send + Sync {
    /// This rank's share of a micro-batch of documents with these lengths, one after another.
    fn share(&self, documents: &[usize]) -> ContextShare;
}

/// The rows of a micro-batch that one rank works on.
#[derive(Clone, Debug)]
pub struct ContextShare {
    /// Which they are, ascending, counted over the whole micro-batch. Everything that belongs to a token (id, target) is taken by this table.
    pub rows: Vec<Range<usize>>,
    /// Their positions, and the form of attention. A rank without rows has one row that attends to nothing, so that it takes part.
    pub batch: Batch,
}

impl ContextShare {
    /// Number of rows that count: 0 on a rank that only takes part.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(Range::len).sum()
    }

    /// The values of this rank's rows from those `of` the whole micro-batch; `nothing` for a row that only takes part.
    pub fn take<T: Copy>(&self, of: &[T], nothing: T) -> Arc<[T]> {
        match self.tokens() {
            0 => vec![nothing; self.batch.tokens()].into(),
            _ => self.rows.iter().flat_map(|r| of[r.clone()].iter().copied()).collect(),
        }
    }
}
