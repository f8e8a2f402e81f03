//! How answers are sampled (`phalanx generate`, `phalanx chat`).
//!
//! A key that is left out is `None`, not a number of ours: the model's own recommendation comes first.

use crate::schema::section;
use crate::value::Texts;

section! {
    /// How answers are sampled.
    pub struct GenerationConfig, "generation" {
        /// `true`: draw tokens at random; `false`: always take the most probable one (greedy). Left out: `true` where
        /// one of the next four keys is set, else as the model's `generation_config.json` says, else greedy.
        pub do_sample: Option<bool> = None,
        /// Logits are divided by it: below 1 the probable tokens win more often, above 1 answers vary more. Left out: as
        /// `generation_config.json` says, else 1.
        pub temperature: Option<f64> = None,
        /// Keep the smallest set of tokens whose probabilities add up to it; 1 keeps all. Left out: as
        /// `generation_config.json` says, else 1.
        pub top_p: Option<f64> = None,
        /// Keep the k most probable tokens; 0 keeps all. Left out: as `generation_config.json` says, else 50.
        pub top_k: Option<usize> = None,
        /// Keep tokens at least this probable, relative to the most probable one; 0 keeps all (arXiv:2407.01082). Left
        /// out: as `generation_config.json` says, else 0.
        pub min_p: Option<f64> = None,
        /// Logits of tokens that occurred are divided by it (multiplied where negative); 1 changes nothing. Left out: as
        /// `generation_config.json` says, else 1.
        pub repetition_penalty: Option<f64> = None,
        /// Longest answer, in tokens. Left out: as `generation_config.json` says, else 256 for `phalanx generate` and
        /// 1024 for `phalanx chat`.
        pub max_new_tokens: Option<usize> = None,
        /// Leave special tokens out of the text.
        pub skip_special_tokens: bool = true,
        /// Texts that end an answer: one, or a list.
        pub stop: Texts = Texts(vec![]),
        /// Token ids that end an answer, beside those of `generation_config.json`.
        pub stop_token_ids: Vec<u64> = vec![],
    }
}
