//! Which data, and how it becomes token sequences.

use std::path::PathBuf;

use crate::schema::{choice, section};
use crate::sections::Stage;

choice! {
    /// How several data sets become one stream.
    pub enum MixStrategy {
        /// One after the other (before shuffling).
        Concat = "concat",
        /// Drawn by weight until the first is used up.
        InterleaveUnder = "interleave_under",
        /// Drawn by weight until the last is used up; the others repeat.
        InterleaveOver = "interleave_over",
        /// Drawn by weight without repeating any sample until all are used up.
        InterleaveOnce = "interleave_once",
    }
}

section! {
    /// Which data.
    pub struct DataConfig, "data" {
        /// Names from `dataset_info.json`, or paths of data files, between commas.
        pub dataset: Vec<String> = vec![],
        /// Folder with `dataset_info.json` and the files it names.
        pub dataset_dir: PathBuf = "data".into(),
        /// Like `dataset`, for evaluation. Excludes `val_size`.
        pub eval_dataset: Vec<String> = vec![],
        /// Name of a chat template. Left out: the model's own (`chat_template.jinja` or `tokenizer_config.json`).
        pub template: Option<String> = None,
        /// Longest sequence, in tokens; what is longer is cut, and the cuts are counted.
        pub cutoff_len: usize = 2048,
        /// Put several samples in one sequence of `cutoff_len` tokens; they never see each other. Left out: only for
        /// stage `pt`.
        pub packing: Option<bool> = None,
        /// LlamaFactory's name for packing in which samples do not see each other. Packing here always is; `true`
        /// turns `packing` on.
        pub neat_packing: bool = false,
        /// Let the prompt's tokens count in the loss as well.
        pub train_on_prompt: bool = false,
        /// Let only the last answer of a conversation count in the loss.
        pub mask_history: bool = false,
        /// At most this many samples of each data set.
        pub max_samples: Option<u64> = None,
        /// Samples held back for evaluation: a share (below 1) or a number.
        pub val_size: f64 = 0.0,
        /// How several data sets are mixed: `concat`, `interleave_under`, `interleave_over`, `interleave_once`.
        pub mix_strategy: MixStrategy = MixStrategy::Concat,
        /// Weights of the data sets, for the `interleave_*` strategies.
        pub interleave_probs: Vec<f64> = vec![],
        /// Tokenise again even where a cache for the same data, tokenizer, template and options exists.
        pub overwrite_cache: bool = false,
        /// Folder of the token cache. Left out: beside the output.
        pub tokenized_path: Option<PathBuf> = None,
        /// Threads that tokenise. Left out: all. The result does not depend on it.
        pub preprocessing_num_workers: Option<usize> = None,
        /// Take the samples in the order of the files.
        pub disable_shuffling: bool = false,
        /// System message for conversations that have none.
        pub default_system: Option<String> = None,
        /// Value of `enable_thinking` that the chat template sees (models with a thinking mode).
        pub enable_thinking: Option<bool> = Some(true),
    }
}

impl DataConfig {
    /// Whether samples share sequences: `packing` or `neat_packing`, and by default for stage `pt` only.
    pub fn packing(&self, stage: Stage) -> bool {
        self.neat_packing || self.packing.unwrap_or(stage == Stage::Pt)
    }

    /// How many of `total` samples are held back for evaluation.
    pub fn validation_samples(&self, total: u64) -> u64 {
        if self.val_size >= 1.0 {
            (self.val_size as u64).min(total)
        } else {
            (self.val_size * total as f64).ceil() as u64
        }
    }
}
