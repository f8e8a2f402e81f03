//! Which rank holds which stage.

use serde::{Deserialize, Serialize};

/// The rank of each stage.
///
/// ```
/// use phalanx_parallel::pipeline::Placement;
/// assert_eq!(Placement::looped(3, 2).rank_of_stage, [0, 1, 2, 0, 1, 2]);
/// let v = Placement::v_shaped(3);
/// assert_eq!(v.rank_of_stage, [0, 1, 2, 2, 1, 0]);
/// assert_eq!(v.stages_of(0), [0, 5]); // embedding and loss together
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Number of pipeline ranks.
    pub num_ranks: usize,
    /// The rank of stage 0, of stage 1, …
    pub rank_of_stage: Vec<usize>,
}

impl Placement {
    /// One stage a rank, in order.
    pub fn linear(num_ranks: usize) -> Placement {
        Placement::looped(num_ranks, 1)
    }

    /// Stage `s` on rank `s mod num_ranks`: each rank holds `num_chunks` stages, a whole round apart.
    pub fn looped(num_ranks: usize, num_chunks: usize) -> Placement {
        let rank_of_stage = (0..num_chunks).flat_map(|_| 0..num_ranks).collect();
        Placement { num_ranks, rank_of_stage }
    }

    /// Two stages a rank: rank `r` holds stage `r` and stage `2 num_ranks − 1 − r`.
    pub fn v_shaped(num_ranks: usize) -> Placement {
        Placement { num_ranks, rank_of_stage: (0..num_ranks).chain((0..num_ranks).rev()).collect() }
    }

    /// Number of stages of the whole model.
    pub fn num_stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// The stages of a rank, first to last.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.num_stages()).filter(|&s| self.rank_of_stage[s] == rank).collect()
    }

    /// Which of its rank's stages a stage is: 0 for the first. 0 for a stage that does not exist.
    pub fn chunk_of(&self, stage: usize) -> usize {
        self.rank_of_stage
            .get(stage)
            .map_or(0, |rank| self.rank_of_stage[..stage].iter().filter(|r| *r == rank).count())
    }
}
