//! Where the sequences of a batch lie, and the seam to the cache of generation.

use std::sync::Arc;

use phalanx_kernels::attention::Seq;
use phalanx_tensor::Tensor;

use crate::{ContextAttention, Result};

/// The rows of a forward pass: which belong to which sequence, and their positions.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Position of each row inside its sequence [T]; what rotary embeddings turn by.
    pub positions: Arc<[u32]>,
    /// The sequences, in row order; none where `context` knows them.
    pub seqs: Arc<[Seq]>,
    /// Which rows of a micro-batch they are, where it is dealt to several ranks; randomness goes by that.
    pub rows: Option<Arc<[u32]>>,
    /// Where the rows are some of a micro-batch that is dealt to several ranks: its attention.
    pub context: Option<Arc<dyn ContextAttention>>,
}

impl Batch {
    /// Whole sequences of the given lengths, one after another, positions from 0.
    pub fn causal(lens: &[usize]) -> Batch {
        Batch::continued(lens.iter().map(|&n| (n, 0)))
    }

    /// Sequences of `n` new rows after `past` rows that lie in a cache: (n, past) each. Key rows are as in training (one sequence
    /// after another); a cache replaces the sequences by its own.
    pub fn continued(lens: impl IntoIterator<Item = (usize, usize)>) -> Batch {
        let (mut positions, mut seqs, mut q, mut kv) = (vec![], vec![], 0, 0);
        for (n, past) in lens {
            positions.extend((past..past + n).map(|p| p as u32));
            seqs.push(Seq { q_start: q, q_len: n, kv_start: kv, kv_len: past + n, ahead: 0 });
            q += n;
            kv += past + n;
        }
        Batch { positions: positions.into(), seqs: seqs.into(), rows: None, context: None }
    }

    /// Some rows of a micro-batch, with their positions; the keys that they see lie on several ranks.
    pub fn dealt(positions: Vec<u32>, rows: Vec<u32>, context: Arc<dyn ContextAttention>) -> Batch {
        let (seqs, rows) = (Arc::from([]), Some(rows.into()));
        Batch { positions: positions.into(), seqs, rows, context: Some(context) }
    }

    /// Number of rows T.
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }
}

/// Keys and values of earlier tokens, kept by generation.
pub trait KvCache: Send {
    /// Stores the new rows `k` [T, K, D], `v` [T, K, Dv] of the attention at `scope` and returns all keys and values with where each
    /// sequence's lie in them.
    ///
    /// # Errors
    /// If there is no room.
    fn append(&mut self, scope: &str, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor, Arc<[Seq]>)>;
}
