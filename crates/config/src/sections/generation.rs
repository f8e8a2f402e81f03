//! How answers are sampled (`phalanx generate`, `phalanx chat`, and the samples of a training run).

use crate::schema::section;
use crate::value::Texts;

section! {
    /// How answers are sampled.
    pub struct GenerationConfig, "generation" {
        /// `false`: always take the most probable token (greedy).
        pub do_sample: bool = true,
        /// Logits are divided by it; below 1 is bolder, above 1 more varied.
        pub temperature: f64 = 0.95,
        /// Keep the smallest set of tokens whose probabilities add up to it; 1 keeps all.
        pub top_p: f64 = 0.7,
        /// Keep the k most probable tokens; 0 keeps all.
        pub top_k: usize = 50,
        /// Keep tokens at least this probable, relative to the most probable one; 0 keeps all (arXiv:2407.01082).
        pub min_p: f64 = 0.0,
        /// Logits of tokens that occurred are divided by it (multiplied where negative); 1 changes nothing.
        pub repetition_penalty: f64 = 1.0,
        /// Longest answer, in tokens.
        pub max_new_tokens: usize = 1024,
        /// Leave special tokens out of the text.
        pub skip_special_tokens: bool = true,
        /// Texts that end an answer: one, or a list.
        pub stop: Texts = Texts(vec![]),
        /// Token ids that end an answer, beside those of `generation_config.json`.
        pub stop_token_ids: Vec<u64> = vec![],
    }
}
