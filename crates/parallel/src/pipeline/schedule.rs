//! A schedule: a list of actions for each rank.

use serde::{Deserialize, Serialize};

use super::{Action, Placement, ScheduleError};

/// The most parts (stages × micro-batches) that a schedule may have: beyond, lists would fill the memory.
pub(super) const MOST_PARTS: usize = 1 << 22;

/// What each rank does in one step, in order.
///
/// Plain data: build one by hand or read it from JSON, then let [`validate`](super::validate) say whether it is sound.
///
/// ```
/// use phalanx_parallel::pipeline::{Schedule, validate};
/// let text = r#"{"name": "by hand", "num_micro_batches": 1,
///     "placement": {"num_ranks": 2, "rank_of_stage": [0, 1]},
///     "ranks": [["F0.0", "B0.0"], ["F1.0", "I1.0"]]}"#;
/// let schedule: Schedule = serde_json::from_str(text)?;
/// assert!(validate(&schedule).unwrap_err().to_string().contains("stage 1 has no W of micro-batch 0"));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// What it is called, for people.
    pub name: String,
    /// Micro-batches in a step.
    pub num_micro_batches: usize,
    /// Which rank holds which stage.
    pub placement: Placement,
    /// The actions of rank 0, of rank 1, …
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.placement.num_ranks
    }

    /// Number of stages of the whole model.
    pub fn num_stages(&self) -> usize {
        self.placement.num_stages()
    }

    /// Stages a rank, on average: what turns a count of stages into rank shares.
    pub fn chunks_per_rank(&self) -> f64 {
        self.num_stages() as f64 / self.num_ranks().max(1) as f64
    }

    /// Whether it holds messages, that is, has gone through [`with_communication`](super::with_communication).
    pub fn has_communication(&self) -> bool {
        self.ranks.iter().flatten().any(|a| !a.is_compute())
    }

    /// The same without messages.
    pub fn without_communication(&self) -> Schedule {
        let compute = |actions: &Vec<Action>| actions.iter().copied().filter(Action::is_compute).collect();
        Schedule { ranks: self.ranks.iter().map(compute).collect(), ..self.clone() }
    }

    /// Whether sizes fit each other, so that the rest may index without fear.
    pub(super) fn check_shape(&self) -> Result<(), ScheduleError> {
        let (p, stages, m) = (self.num_ranks(), self.num_stages(), self.num_micro_batches);
        let bad = |what: String, mend: &str| Err(ScheduleError::Malformed { what, mend: mend.into() });
        if p == 0 || stages == 0 || m == 0 {
            return bad(
                format!("{p} ranks, {stages} stages and {m} micro-batches"),
                "there must be at least one of each",
            );
        }
        if self.ranks.len() != p {
            return bad(format!("{} lists of actions for {p} ranks", self.ranks.len()), "give each rank its list");
        }
        if let Some((stage, rank)) = self.placement.rank_of_stage.iter().enumerate().find(|(_, r)| **r >= p) {
            return bad(format!("stage {stage} is placed on rank {rank} of {p}"), "ranks count from 0");
        }
        check_size(stages, m)?;
        for (rank, actions) in self.ranks.iter().enumerate() {
            for action in actions {
                for part in action.parts() {
                    if part.stage >= stages || part.micro_batch >= m {
                        return bad(
                            format!("{action} on rank {rank}, of {stages} stages and {m} micro-batches"),
                            "stages and micro-batches count from 0",
                        );
                    }
                    let home = self.placement.rank_of_stage[part.stage];
                    if home != rank {
                        return bad(
                            format!("{action} stands on rank {rank}, stage {} is placed on rank {home}", part.stage),
                            "put it into that rank's list, or place the stage elsewhere",
                        );
                    }
                }
            }
        }
        Ok(())
    }
}

/// Refuses what would not fit into memory.
pub(super) fn check_size(stages: usize, micro_batches: usize) -> Result<(), ScheduleError> {
    match stages.checked_mul(micro_batches) {
        Some(n) if n <= MOST_PARTS => Ok(()),
        _ => Err(ScheduleError::TooLarge { stages, micro_batches, most: MOST_PARTS }),
    }
}
