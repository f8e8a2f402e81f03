//! The training loop: batch, optimizer, schedule, saving, evaluation, logging.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::error::Result;
use crate::node::Node;
use crate::schema::{Section, choice, section};
use crate::value::{FromNode, Steps, ValueError};

choice! {
    /// The learning rate over time, after warm-up.
    pub enum LrSchedulerType {
        /// A straight line down to 0.
        Linear = "linear",
        /// Half a cosine down to 0.
        Cosine = "cosine",
        /// Half a cosine down to `min_lr` (or `min_lr_rate` times the learning rate).
        CosineWithMinLr = "cosine_with_min_lr",
        /// The same all the time; no warm-up.
        Constant = "constant",
        /// The same all the time after warm-up.
        ConstantWithWarmup = "constant_with_warmup",
        /// Warm-up, a long constant stretch, and a decay at the end (WSD, arXiv:2404.06395).
        WarmupStableDecay = "warmup_stable_decay" | "wsd",
    }
    refused {
        "cosine_with_restarts" | "polynomial" | "inverse_sqrt" | "reduce_lr_on_plateau" | "greedy"
        | "cosine_warmup_with_min_lr" =>
            "use `cosine`, `cosine_with_min_lr`, `linear`, `constant`, `constant_with_warmup` or `wsd`",
    }
}

choice! {
    /// The optimizer.
    pub enum Optim {
        /// AdamW (arXiv:1711.05101) on f32 master weights, one fused kernel.
        AdamW = "adamw_torch" | "adamw_torch_fused" | "adamw_hf" | "adamw" | "adamw_torch_xla" | "adamw_torch_npu_fused"
            | "adamw_apex_fused",
    }
    refused {
        "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw" | "paged_adamw_8bit" | "paged_adamw_32bit"
        | "adamw_torch_4bit" | "adamw_torch_8bit" => "use `adamw_torch`: 8-bit and paged optimizer states are not there yet",
        "adafactor" | "sgd" | "adagrad" | "rmsprop" | "lion_32bit" | "lion_8bit" | "lomo" | "adalomo" | "muon"
        | "galore_adamw" | "schedule_free_adamw" | "apollo_adamw" | "stable_adamw" => "use `adamw_torch`",
    }
}

choice! {
    /// When something happens (saving, evaluation).
    pub enum Strategy {
        /// Never.
        No = "no" | "false" | "False",
        /// Every so many steps.
        Steps = "steps",
        /// After every epoch.
        Epoch = "epoch",
    }
    refused {
        "best" => "use `steps` or `epoch` with `load_best_model_at_end: true`, which keeps the best",
    }
}

choice! {
    /// How the learning rate falls or rises in `warmup_stable_decay`.
    pub enum DecayType {
        /// A straight line.
        Linear = "linear",
        /// Half a cosine.
        Cosine = "cosine",
        /// `1 - sqrt(x)`.
        OneMinusSqrt = "1-sqrt",
    }
}

choice! {
    /// How the learning rate rises.
    pub enum WarmupType {
        /// A straight line.
        Linear = "linear",
        /// Half a cosine.
        Cosine = "cosine",
        /// `1 - sqrt(1 - x)`.
        OneMinusSqrt = "1-sqrt",
    }
}

choice! {
    /// Where metrics go, beside `metrics.jsonl` and `trainer_state.json`, which are always written.
    pub enum LogTarget {
        /// Nowhere else.
        None = "none",
        /// TensorBoard event files.
        TensorBoard = "tensorboard" | "all",
    }
    refused {
        "wandb" | "swanlab" | "mlflow" | "trackio" | "comet_ml" | "clearml" | "neptune" | "dvclive" | "codecarbon"
        | "azure_ml" | "flyte" | "dagshub" =>
            "use `tensorboard` or `none`; metrics.jsonl holds the same numbers for any other tool",
    }
}

section! {
    /// Arguments of a schedule, the value of `lr_scheduler_kwargs`; names are those of transformers.
    pub struct LrSchedulerKwargs, "lr_scheduler_kwargs" {
        /// `cosine_with_min_lr`: the lowest learning rate.
        pub min_lr: Option<f64> = None,
        /// `cosine_with_min_lr`: the lowest learning rate as a share of `learning_rate`.
        pub min_lr_rate: Option<f64> = None,
        /// `cosine`, `cosine_with_min_lr`, `wsd`: waves of the cosine; 0.5 falls once from top to bottom.
        pub num_cycles: f64 = 0.5,
        /// `wsd`: steps of decay at the end. Left out: a tenth of the run.
        pub num_decay_steps: Option<Steps> = None,
        /// `wsd`: steps at the full learning rate. Left out: all that warm-up and decay leave.
        pub num_stable_steps: Option<Steps> = None,
        /// `wsd`: the form of the decay.
        pub decay_type: DecayType = DecayType::Cosine,
        /// `wsd`: the form of the warm-up.
        pub warmup_type: WarmupType = WarmupType::Linear,
        /// `wsd`: the lowest learning rate as a share of `learning_rate`.
        pub min_lr_ratio: f64 = 0.0,
    }
}

impl FromNode for LrSchedulerKwargs {
    fn expects() -> String {
        "a map such as {min_lr_rate: 0.1}".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        if node.is_null() { Ok(Self::default()) } else { Self::from_map(node) }
    }
    fn to_json(&self) -> Json {
        let defaults = Self::default().values();
        let changed = self.values().into_iter().zip(defaults).filter(|(now, default)| now != default);
        Json::Object(changed.map(|((key, value), _)| (key.to_owned(), value)).collect())
    }
}

/// Where a run begins (`resume_from_checkpoint`).
#[derive(Debug, Clone, PartialEq)]
pub enum ResumeFrom {
    /// `null`: from the last checkpoint in `output_dir` if it holds one and `overwrite_output_dir` is false; else anew.
    Auto,
    /// `false`: anew.
    No,
    /// `true`: from the last checkpoint in `output_dir`, which must exist.
    Latest,
    /// From this checkpoint folder.
    Path(PathBuf),
}

impl FromNode for ResumeFrom {
    fn expects() -> String {
        "a checkpoint folder, true (the last one), false or null".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match (node.is_null(), bool::from_node(node)) {
            (true, _) => Ok(ResumeFrom::Auto),
            (_, Ok(true)) => Ok(ResumeFrom::Latest),
            (_, Ok(false)) => Ok(ResumeFrom::No),
            _ => PathBuf::from_node(node).map(ResumeFrom::Path).map_err(|_| ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        match self {
            ResumeFrom::Auto => Json::Null,
            ResumeFrom::No => json!(false),
            ResumeFrom::Latest => json!(true),
            ResumeFrom::Path(path) => path.to_json(),
        }
    }
}

section! {
    /// The training loop.
    pub struct TrainConfig, "train" {
        /// Folder for checkpoints, metrics, curves and the trained model. `phalanx train` needs it.
        pub output_dir: Option<PathBuf> = None,
        /// Start anew in a folder that holds another run, replacing it.
        pub overwrite_output_dir: bool = false,
        /// Sequences of one micro-batch.
        pub per_device_train_batch_size: usize = 8,
        /// Micro-batches of one optimizer step.
        pub gradient_accumulation_steps: usize = 1,
        /// Peak learning rate.
        pub learning_rate: f64 = 5e-5,
        /// Passes over the data; may be a fraction. `max_steps` wins over it.
        pub num_train_epochs: f64 = 3.0,
        /// Optimizer steps; -1 leaves it to `num_train_epochs`.
        pub max_steps: i64 = -1,
        /// `linear`, `cosine`, `cosine_with_min_lr`, `constant`, `constant_with_warmup` or `wsd`.
        pub lr_scheduler_type: LrSchedulerType = LrSchedulerType::Linear,
        /// Arguments of the schedule: `min_lr`, `min_lr_rate`, `num_cycles`, `num_decay_steps`, `num_stable_steps`,
        /// `decay_type`, `warmup_type`, `min_lr_ratio`.
        pub lr_scheduler_kwargs: LrSchedulerKwargs = LrSchedulerKwargs::default(),
        /// Share of the steps over which the learning rate rises from 0. Excludes `warmup_steps`.
        pub warmup_ratio: f64 = 0.0,
        /// Steps over which the learning rate rises from 0 (or a share below 1).
        pub warmup_steps: Steps = Steps::Count(0),
        /// Decoupled weight decay, not on norms and biases unless `decay_norms_and_biases`.
        pub weight_decay: f64 = 0.0,
        /// Decay of AdamW's first moment.
        pub adam_beta1: f64 = 0.9,
        /// Decay of AdamW's second moment.
        pub adam_beta2: f64 = 0.999,
        /// AdamW's term against division by 0.
        pub adam_epsilon: f64 = 1e-8,
        /// `adamw_torch` (or another spelling of AdamW).
        pub optim: Optim = Optim::AdamW,
        /// Gradients with a greater global norm are scaled down to it; 0 turns clipping off.
        pub max_grad_norm: f64 = 1.0,
        /// Keep weights as bf16 while computing; masters, gradients and sums stay f32.
        pub bf16: bool = false,
        /// Seed of everything random: order, dropout, initial weights.
        pub seed: u64 = 42,
        /// Seed of the order of the samples, where it is not `seed`.
        pub data_seed: Option<u64> = None,
        /// Log every so many steps (or share of all steps).
        pub logging_steps: Steps = Steps::Count(500),
        /// Log the first step too.
        pub logging_first_step: bool = false,
        /// Folder of the TensorBoard events. Left out: `runs` in `output_dir`.
        pub logging_dir: Option<PathBuf> = None,
        /// `none` or `tensorboard`.
        pub report_to: Vec<LogTarget> = vec![LogTarget::TensorBoard],
        /// Draw the loss curve as `training_loss.svg` and `.png`.
        pub plot_loss: bool = false,
        /// Plain lines instead of a progress bar, on a terminal too.
        pub disable_tqdm: Option<bool> = None,
        /// `no`, `steps` or `epoch`.
        pub save_strategy: Strategy = Strategy::Steps,
        /// Save every so many steps (or share of all steps).
        pub save_steps: Steps = Steps::Count(500),
        /// Keep that many checkpoints: the last ones, and the best.
        pub save_total_limit: Option<u64> = None,
        /// Save the model without what going on needs (optimizer, random state, position in the data).
        pub save_only_model: bool = false,
        /// `no`, `steps` or `epoch`.
        pub eval_strategy: Strategy = Strategy::No,
        /// Evaluate every so many steps (or share of all steps). Left out: as `logging_steps`.
        pub eval_steps: Option<Steps> = None,
        /// Evaluate before the first step too.
        pub eval_on_start: bool = false,
        /// Sequences of one evaluation batch.
        pub per_device_eval_batch_size: usize = 8,
        /// Leave the best checkpoint, not the last, in `output_dir`.
        pub load_best_model_at_end: bool = false,
        /// What "best" means: `loss` or `perplexity`, with or without `eval_` before it. Left out: `loss`.
        pub metric_for_best_model: Option<String> = None,
        /// Whether greater is better. Left out: no, as for every metric here.
        pub greater_is_better: Option<bool> = None,
        /// A checkpoint folder; `true`: the last one in `output_dir`; `false`: start anew; null: go on if there is
        /// something to go on with.
        pub resume_from_checkpoint: ResumeFrom = ResumeFrom::Auto,
        /// Recompute each block's activations in backward instead of keeping them. Left out: as the plan says.
        pub gradient_checkpointing: Option<bool> = None,
    }
}

impl TrainConfig {
    /// `max_steps` as an option: `None` where the epochs decide.
    pub fn max_steps(&self) -> Option<u64> {
        u64::try_from(self.max_steps).ok()
    }

    /// Steps of warm-up in a run of `total` steps; a share is rounded up, as transformers does.
    pub fn warmup_steps(&self, total: u64) -> u64 {
        match self.warmup_steps {
            Steps::Count(0) => (self.warmup_ratio * total as f64).ceil() as u64,
            steps => steps.of(total),
        }
    }

    /// How often to evaluate when `eval_strategy` is `steps`.
    pub fn eval_every(&self) -> Steps {
        self.eval_steps.unwrap_or(self.logging_steps)
    }

    /// Seed of the order of the samples.
    pub fn data_seed(&self) -> u64 {
        self.data_seed.unwrap_or(self.seed)
    }

    /// Whether TensorBoard events are written.
    pub fn tensorboard(&self) -> bool {
        self.report_to.contains(&LogTarget::TensorBoard)
    }
}
