//! Experts in a config: what families with a mixture of them share.

use std::sync::Arc;

use phalanx_kernels::moe::Route;
use phalanx_nn::BalanceLoss;
use phalanx_nn::layers::{FeedForward, GatedMlp, MoeConfig, MoeMlp};

use crate::config::Reader;
use crate::{ModelConfig, Result};

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How they are chosen, and how many there are.
    pub route: Route,
    /// Feed-forward size of one.
    pub intermediate_size: usize,
    /// Feed-forward size of the shared expert, if there is one.
    pub shared_intermediate_size: Option<usize>,
    /// Whether choices are corrected by a bias that no gradient trains.
    pub corrected: bool,
    /// Which blocks have experts; the others have the dense feed-forward.
    pub blocks: Vec<bool>,
    /// The balancing loss that the config asks for.
    pub balance: Option<BalanceLoss>,
}

impl ExpertsConfig {
    pub(crate) fn check(&self, r: &Reader<'_>, hidden: usize) -> Result<()> {
        if let Err(e) = self.route.check() {
            return r
                .refuse("num_experts_per_tok", &format!("{e}; see n_group and topk_group too, where there are any"));
        }
        let shared = self.shared_intermediate_size.unwrap_or(1);
        for (key, n) in [("moe_intermediate_size", self.intermediate_size), ("n_shared_experts", shared)] {
            if n == 0 {
                return r.refuse(key, "must be at least 1");
            }
            // All experts of a block, as one number that no sum overflows.
            let all = n.checked_mul(hidden).and_then(|n| n.checked_mul(self.route.experts));
            if all.is_none_or(|n| n > 1 << 40) {
                let of = self.route.experts;
                return r.refuse(
                    key,
                    &format!("makes {of} weights of {n} × {hidden} numbers, beyond any machine; is a size mistyped?"),
                );
            }
        }
        Ok(())
    }

    /// Parameters that a token does not meet.
    pub(crate) fn idle_params(&self, hidden: usize) -> usize {
        let blocks = self.blocks.iter().filter(|b| **b).count();
        blocks * (self.route.experts - self.route.top_k) * 3 * hidden * self.intermediate_size
    }
}

impl ModelConfig {
    /// The feed-forward of a block, with experts or without.
    pub(crate) fn feed_forward(&self, prefix: &str, block: usize) -> FeedForward {
        match &self.experts {
            Some(e) if e.blocks[block] => {
                let moe = MoeConfig {
                    hidden: self.hidden_size,
                    intermediate: e.intermediate_size,
                    shared: e.shared_intermediate_size,
                    act: self.act,
                    route: e.route,
                    corrected: e.corrected,
                };
                FeedForward::Experts(Arc::new(MoeMlp::named(prefix, moe)))
            }
            _ => FeedForward::Dense(Arc::new(GatedMlp::named(prefix, self.mlp()))),
        }
    }
}
