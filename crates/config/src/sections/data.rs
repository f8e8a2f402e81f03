//! Which data, and how it becomes token sequences.

use std::path::PathBuf;

use crate::schema::{choice, section};
use crate::sections::Stage;
use crate::value::RawMap;

choice! {
    /// How several data sets become one stream.
    pub enum MixStrategy {
        /// One after the other (before shuffling).
        Concat = "concat",
        /// Drawn by weight until the first is used up.
        InterleaveUnder = "interleave_under",
        /// Drawn by weight until the last is used up; the others repeat.
        InterleaveOver = "interleave_over",
    }
    refused {
        "interleave_once" => "use `concat`: it visits every sample once an epoch, all data sets shuffled together",
    }
}

choice! {
    /// What one document of a plain `.txt` file is.
    pub enum TextUnit {
        /// The whole file.
        File = "file",
        /// Text between blank lines.
        Paragraph = "paragraph",
        /// Each line that is not empty.
        Line = "line",
    }
}

choice! {
    /// What becomes of past answers that the template prints otherwise than they were generated.
    pub enum RewrittenHistory {
        /// One example for each such answer, cut after it.
        Split = "split",
        /// Only the answers that stand unchanged in the whole conversation, the last one among them.
        LastTurn = "last_turn",
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
        /// How several data sets are mixed: `concat`, `interleave_under`, `interleave_over`.
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
        /// More variables that the chat template sees, for instance `{date_string: "26 Jul 2024"}`; they win over
        /// `enable_thinking`.
        pub template_kwargs: Option<RawMap> = None,
        /// The day (`YYYY-MM-DD`) that templates print which ask for today. Left out: today (UTC); a run that goes on
        /// keeps the day it began with.
        pub template_date: Option<String> = None,
        /// What to do with past answers that the template prints otherwise than they were generated (Qwen3 drops their
        /// thinking): `split` (an example for each) or `last_turn` (train only those that stand unchanged).
        pub rewritten_history: RewrittenHistory = RewrittenHistory::Split,
        /// Take the chosen side of preference data (`ranking: true`) as the answer; otherwise such data is refused.
        pub train_on_chosen: bool = false,
        /// What a document of a `.txt` file is: `file`, `paragraph` or `line`. For stage `pt`.
        pub text_unit: TextUnit = TextUnit::File,
        /// Leave out and count records that cannot be understood, instead of stopping at the first.
        pub skip_bad_samples: bool = false,
    }
}

impl DataConfig {
    /// Whether samples share sequences: `packing` or `neat_packing`, and by default for stage `pt` only.
    pub fn packing(&self, stage: Stage) -> bool {
        self.neat_packing || self.packing.unwrap_or(stage == Stage::Pt)
    }
}
