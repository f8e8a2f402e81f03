//! Everything that can be chosen about the data: one plain struct whose keys are LlamaFactory's where the meaning is the same.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{DataError, Result};
use crate::stream::StreamState;

/// What kind of training the data is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Pre-training: texts, every token counts.
    Pt,
    /// Supervised fine-tuning: conversations, the assistant's tokens count.
    #[default]
    Sft,
}

/// How several data sets become one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixStrategy {
    /// All of every data set, once an epoch.
    #[default]
    Concat,
    /// By `interleave_probs` until the first data set is used up.
    InterleaveUnder,
    /// By `interleave_probs` until every data set is used up; the smaller ones repeat.
    InterleaveOver,
}

/// What to do with the answers of earlier turns when the template renders them otherwise than at inference
/// (Qwen3 and others drop the thinking of past turns).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewrittenHistory {
    /// One example for each such answer, cut after it: every answer is trained exactly as it is generated.
    #[default]
    Split,
    /// Only the answers that stand unchanged in the whole conversation, the last one among them.
    LastTurn,
}

/// What one document of a plain `.txt` file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextUnit {
    /// The whole file.
    #[default]
    File,
    /// Text between blank lines.
    Paragraph,
    /// Each non-empty line (what LlamaFactory does).
    Line,
}

/// Which data, and how it becomes token ids.
///
/// Missing keys take the defaults named here; unknown keys are the business of whoever reads the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataOptions {
    /// `pt` or `sft`. Default `sft`.
    pub stage: Stage,
    /// Names from `dataset_info.json`, or paths of data files. No default: must name at least one.
    pub dataset: Vec<String>,
    /// Data sets to evaluate on, named in the same way. Default none.
    pub eval_dataset: Vec<String>,
    /// The folder that holds `dataset_info.json`; relative file names start here. Default `data`.
    pub dataset_dir: PathBuf,
    /// Chat template: none, `default` or `empty` means the model's own; else a built-in name
    /// ([`crate::template::builtin_names`]).
    pub template: Option<String>,
    /// System message for conversations that have none. Default none (a template may still add its own).
    pub default_system: Option<String>,
    /// Passed to templates that know it (Qwen3). Default: not passed.
    pub enable_thinking: Option<bool>,
    /// More variables for the template. Default none.
    pub template_kwargs: Map<String, Value>,
    /// The day (`YYYY-MM-DD`) that templates see when they ask for today. Default: today, UTC.
    pub template_date: Option<String>,
    /// Longest example in tokens; the rest is cut off and counted. Default 2048.
    pub cutoff_len: usize,
    /// Fill rows of `cutoff_len` tokens with several examples. Default false.
    pub packing: bool,
    /// Count the prompt's tokens in the loss too. Default false.
    pub train_on_prompt: bool,
    /// Train on the last answer of a conversation only. Default false.
    pub mask_history: bool,
    /// See [`RewrittenHistory`]. Default `split`.
    pub rewritten_history: RewrittenHistory,
    /// Take the `chosen` side of preference data as the answer. Default false: such data is refused.
    pub train_on_chosen: bool,
    /// What a document of a `.txt` file is. Default `file`.
    pub text_unit: TextUnit,
    /// Leave out records that cannot be understood instead of stopping at the first. Default false.
    pub skip_bad_samples: bool,
    /// How several data sets are mixed. Default `concat`.
    pub mix_strategy: MixStrategy,
    /// A weight for each data set, for the two interleaving strategies. Default: all equal.
    pub interleave_probs: Option<Vec<f64>>,
    /// At most so many records of each data set, the first ones. Default: all.
    pub max_samples: Option<usize>,
    /// Records held back for evaluation: a share below 1, or a number. Default 0.
    pub val_size: f64,
    /// Visit the rows in a new random order each epoch. Default true (`disable_shuffling: true` is its opposite).
    pub shuffle: bool,
    /// Seed of the order and of the validation split. Default 42.
    pub seed: u64,
    /// Where tokenised data is kept. Default none: in memory only.
    pub cache_dir: Option<PathBuf>,
    /// Tokenise again although a cache exists. Default false.
    pub overwrite_cache: bool,
    /// Threads that tokenise; 0 means all cores. Changes nothing in the result. Default 0.
    pub preprocessing_num_workers: usize,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self {
            stage: Stage::default(),
            dataset: Vec::new(),
            eval_dataset: Vec::new(),
            dataset_dir: PathBuf::from("data"),
            template: None,
            default_system: None,
            enable_thinking: None,
            template_kwargs: Map::new(),
            template_date: None,
            cutoff_len: 2048,
            packing: false,
            train_on_prompt: false,
            mask_history: false,
            rewritten_history: RewrittenHistory::default(),
            train_on_chosen: false,
            text_unit: TextUnit::default(),
            skip_bad_samples: false,
            mix_strategy: MixStrategy::default(),
            interleave_probs: None,
            max_samples: None,
            val_size: 0.0,
            shuffle: true,
            seed: 42,
            cache_dir: None,
            overwrite_cache: false,
            preprocessing_num_workers: 0,
        }
    }
}

impl DataOptions {
    /// The options with which a run goes on from a checkpoint: a template that prints the day prints the one of the
    /// run's beginning, unless `template_date` names another.
    #[must_use]
    pub fn of_run(mut self, state: &StreamState) -> Self {
        if self.template_date.is_none() {
            self.template_date.clone_from(&state.template_date);
        }
        self
    }

    /// Checks what can be checked without opening a file.
    ///
    /// # Errors
    /// [`DataError::Option`] naming the key.
    pub fn validate(&self) -> Result<()> {
        if self.dataset.is_empty() {
            return Err(DataError::option(
                "dataset",
                "names no data set; give a name from dataset_info.json or a file",
            ));
        }
        if self.cutoff_len < 2 {
            return Err(DataError::option(
                "cutoff_len",
                format!(
                    "is {}; a token is predicted from the one before it, so at least 2 are needed",
                    self.cutoff_len
                ),
            ));
        }
        if !self.val_size.is_finite() || self.val_size < 0.0 {
            return Err(DataError::option("val_size", "must be a share below 1 or a number of records"));
        }
        if self.val_size >= 1.0 && self.val_size.fract() != 0.0 {
            return Err(DataError::option(
                "val_size",
                format!("{} is neither a share nor a whole number", self.val_size),
            ));
        }
        if self.val_size > 0.0 && !self.eval_dataset.is_empty() {
            return Err(DataError::option("val_size", "cannot be combined with eval_dataset; remove one of the two"));
        }
        if self.train_on_prompt && self.mask_history {
            return Err(DataError::option("mask_history", "contradicts train_on_prompt; remove one of the two"));
        }
        if self.max_samples == Some(0) {
            return Err(DataError::option("max_samples", "is 0; remove it to use all samples"));
        }
        if let Some(probs) = &self.interleave_probs {
            if self.mix_strategy == MixStrategy::Concat {
                return Err(DataError::option(
                    "interleave_probs",
                    "has no meaning with mix_strategy: concat; use interleave_under or interleave_over",
                ));
            }
            if probs.len() != self.dataset.len() {
                return Err(DataError::option(
                    "interleave_probs",
                    format!("has {} values for {} data sets", probs.len(), self.dataset.len()),
                ));
            }
            if probs.iter().any(|p| !p.is_finite() || *p <= 0.0) {
                return Err(DataError::option("interleave_probs", "must all be above 0; leave out a data set instead"));
            }
        }
        if let Some(date) = &self.template_date
            && crate::template::parse_date(date).is_none()
        {
            return Err(DataError::option("template_date", format!("\"{date}\" is not a day; write YYYY-MM-DD")));
        }
        Ok(())
    }
}
