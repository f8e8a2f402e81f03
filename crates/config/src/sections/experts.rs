//! Mixtures of experts: keeping their loads even.

use crate::schema::{choice, section};

choice! {
    /// The tokens that the balancing loss forms its shares over.
    pub enum MoeScope {
        /// Those of a micro-batch.
        MicroBatch = "micro_batch",
        /// Those of each sequence.
        Sequence = "sequence",
        /// Those of an optimizer step.
        Global = "global",
    }
}

choice! {
    /// The layers that the balancing loss forms its shares over.
    pub enum MoeLayers {
        /// All as one.
        Together = "together",
        /// Each by itself.
        Each = "each",
    }
}

choice! {
    /// Which tokens lose an expert that is asked for more than it takes.
    pub enum MoeDrop {
        /// The last ones.
        Position = "position",
        /// Those of the smallest weight.
        Probability = "probability" | "probs",
    }
}

section! {
    /// Mixtures of experts.
    pub struct ExpertsConfig, "experts" {
        /// Coefficient α of the balancing loss α·E·Σ f·P of routers, added to the mean loss of a token. Left out: the model's
        /// `router_aux_loss_coef` where its `output_router_logits` is true, else none; 0: none.
        pub moe_aux_loss_coef: Option<f64> = None,
        /// Over which tokens f and P are formed: `micro_batch` (as transformers does; of several, each counts as much as it has targets), `sequence`
        /// (each by itself: independent of how batches are cut), or `global` (all of an optimizer step: with accumulation, one more forward pass a
        /// micro-batch counts first).
        pub moe_aux_loss_scope: MoeScope = MoeScope::MicroBatch,
        /// Over which layers: `together` (as transformers does) or `each` by itself, added up (as the Switch paper and Megatron do).
        pub moe_aux_loss_layers: MoeLayers = MoeLayers::Together,
        /// Step u of the balancing without a loss: after each optimizer step every router's `e_score_correction_bias` moves by u toward even loads
        /// (arXiv:2408.15664). 0: the biases stay; DeepSeek-V3 was trained with 0.001.
        pub moe_bias_update_speed: f64 = 0.0,
        /// Most rows of an expert in a micro-batch, as a multiple of an even share; what is beyond is dropped and passes through the residual only.
        /// Left out: nothing is dropped. Evaluation never drops.
        pub moe_capacity_factor: Option<f64> = None,
        /// What is dropped then: the last tokens (`position`) or those of the smallest weight (`probability`).
        pub moe_drop_policy: MoeDrop = MoeDrop::Position,
    }
}
