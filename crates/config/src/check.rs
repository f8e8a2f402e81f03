//! What no single key can know: ranges, and keys that contradict each other or have no effect together.
//!
//! Keys that say opposite things are refused. A key that only has no effect beside the others (`lora_rank` in a file
//! that somebody reuses with `finetuning_type=full`) is a note: a file that runs elsewhere runs here, and the person
//! still hears of it.

use std::path::Path;

use crate::config::{Config, Note};
use crate::error::{ConfigError, Problem, Problems, Result};
use crate::node::Node;
use crate::sections::{
    DecayType, FinetuningType, LrSchedulerType, MAX_THREADS, ResumeFrom, Stage, Strategy, TextUnit, WarmupType,
};
use crate::value::{MapOrPath, Steps};

/// What a configuration is about to be used for: which keys it must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// `phalanx train`: model, data, output folder.
    Train,
    /// `phalanx eval`: model, evaluation data.
    Eval,
    /// `phalanx export`: model, `export_dir`.
    Export,
    /// `phalanx generate`, `chat`: a trained model.
    Generate,
    /// `phalanx data check`: data and a tokenizer.
    Data,
    /// `phalanx plan show`: a model or an architecture.
    Plan,
}

/// Checks that do not depend on the purpose; run by every load. What must be mended, and what is only said.
pub(crate) fn check(config: &Config) -> (Vec<Problem>, Vec<Note>) {
    let mut c = Checker { config, problems: vec![], notes: vec![] };
    c.model();
    c.method();
    c.data();
    c.batch_and_optimizer();
    c.schedule();
    c.saving_and_evaluation();
    c.generation();
    (c.problems, c.notes)
}

impl Config {
    /// Checks what `purpose` needs: that its keys are there, and that the folders they name exist. Reads directories,
    /// nothing else.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all that is missing.
    pub fn check_for(&self, purpose: Purpose) -> Result<()> {
        let mut c = Checker { config: self, problems: vec![], notes: vec![] };
        c.sources(purpose);
        match purpose {
            Purpose::Train => {
                c.need(
                    !self.data.dataset.is_empty(),
                    "dataset",
                    "name a data set of dataset_info.json, or a data file",
                );
                c.need(self.train.output_dir.is_some(), "output_dir", "name a folder for checkpoints and metrics");
                if !self.method.do_train {
                    c.fail("do_train", "it is false, and this is `train`", "remove it, or use `phalanx eval`");
                }
                if let ResumeFrom::Path(path) = &self.train.resume_from_checkpoint {
                    c.exists("resume_from_checkpoint", path, "give a checkpoint folder, or `true` for the last one");
                }
            }
            Purpose::Eval => {
                let any = !self.data.eval_dataset.is_empty() || !self.data.dataset.is_empty();
                c.need(any, "eval_dataset", "name a data set of dataset_info.json, or a data file");
            }
            Purpose::Export => c.need(self.export.export_dir.is_some(), "export_dir", "name the folder to write"),
            Purpose::Data => {
                let any = !self.data.eval_dataset.is_empty() || !self.data.dataset.is_empty();
                c.need(any, "dataset", "name a data set of dataset_info.json, or a data file");
            }
            Purpose::Generate | Purpose::Plan => {}
        }
        if let Some(MapOrPath::Path(path)) = &self.run.plan {
            c.exists("plan", path, "give the path of a YAML file, or write the plan in place");
        }
        if c.problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(Problems(c.problems))) }
    }
}

/// Most rows of a micro-batch, and most micro-batches of a step.
const MAX_ROWS: usize = 1 << 24;

struct Checker<'a> {
    config: &'a Config,
    problems: Vec<Problem>,
    notes: Vec<Note>,
}

impl Checker<'_> {
    fn fail(&mut self, key: &str, what: impl Into<String>, mend: impl Into<String>) {
        let origin = self.config.origin(key);
        self.problems.push(Problem { origin, key: key.into(), what: what.into(), mend: mend.into() });
    }

    fn is_set(&self, key: &str) -> bool {
        self.config.is_set(key)
    }

    /// Refuses the value of `key` unless it is `ok`.
    fn range(&mut self, ok: bool, key: &str, expected: &str) {
        if !ok {
            let found = self.config.value(key).map(|v| v.to_string()).unwrap_or_default();
            self.fail(key, format!("expected {expected}, found {found}"), "");
        }
    }

    /// Says of `key`, where somebody wrote it, that `why` makes it useless, and what would give it a use.
    fn idle(&mut self, key: &str, why: &str, mend: &str) {
        if self.is_set(key) {
            let text = format!("it has no effect {why}; {mend}");
            self.notes.push(Note { origin: self.config.origin(key), key: key.into(), text, only: None });
        }
    }

    fn need(&mut self, there: bool, key: &str, mend: &str) {
        if !there {
            self.fail(key, "it is missing", mend);
        }
    }

    fn exists(&mut self, key: &str, path: &Path, mend: &str) {
        if !path.exists() {
            self.fail(key, format!("there is nothing at `{}`", path.display()), mend);
        }
    }

    /// Where weights, architecture and tokenizer come from.
    fn sources(&mut self, purpose: Purpose) {
        let model = &self.config.model;
        let architectures = [model.model.is_some(), model.shape.is_some(), model.config_name_or_path.is_some()];
        let has_architecture = architectures.contains(&true);
        match &model.model_name_or_path {
            Some(name) if !Path::new(name).exists() => {
                let mut mend = "give a local folder; nothing is downloaded here".to_owned();
                // `organisation/model` is how a hub names it; anything else is a path.
                let hub = |part: &str| !part.is_empty() && !part.starts_with(['.', '~']) && part != "models";
                if let Some((owner, model)) = name.split_once('/')
                    && hub(owner)
                    && hub(model)
                    && !model.contains('/')
                {
                    mend += &format!(". To fetch it first: hf download {name} --local-dir DIR");
                }
                self.fail("model_name_or_path", format!("there is no folder `{name}`"), mend);
            }
            Some(_) => {}
            None if purpose == Purpose::Data && model.tokenizer_name_or_path.is_some() => {}
            None if model.train_from_scratch && has_architecture && purpose != Purpose::Generate => {}
            None => self.fail(
                "model_name_or_path",
                "it is missing",
                "give the folder of a model (or `train_from_scratch: true` with `shape:` or `model:`)",
            ),
        }
        for path in &model.adapter_name_or_path {
            self.exists("adapter_name_or_path", path, "give the folder of a PEFT adapter");
        }
        for (key, path) in [
            ("config_name_or_path", &model.config_name_or_path),
            ("tokenizer_name_or_path", &model.tokenizer_name_or_path),
        ] {
            if let Some(path) = path {
                self.exists(key, path, "give an existing file or folder");
            }
        }
    }

    fn model(&mut self) {
        let model = &self.config.model;
        let architectures = [
            ("model", model.model.is_some()),
            ("shape", model.shape.is_some()),
            ("config_name_or_path", model.config_name_or_path.is_some()),
        ];
        let written: Vec<_> = architectures.into_iter().filter(|(_, some)| *some).map(|(key, _)| key).collect();
        if model.train_from_scratch {
            if let [first, second, ..] = written[..] {
                self.fail(second, format!("`{first}` gives the architecture already"), "keep one of the two");
            }
            if self.config.method.finetuning_type != FinetuningType::Full {
                let what =
                    format!("it is `{}`, and random weights are trained in full", self.config.method.finetuning_type);
                self.fail("finetuning_type", what, "write `finetuning_type: full`, or remove `train_from_scratch`");
            }
            if !model.adapter_name_or_path.is_empty() {
                self.fail(
                    "adapter_name_or_path",
                    "adapters do not fit random weights",
                    "remove it or `train_from_scratch`",
                );
            }
        } else {
            for key in written {
                // Not a leftover: the person wants another model than the one that would be trained.
                let what = "trained weights bring their own architecture";
                self.fail(key, what, "add `train_from_scratch: true`, or remove the key");
            }
        }
        let threads = |n: Option<usize>| n.is_none_or(|n| (1..=MAX_THREADS).contains(&n));
        let expected = format!("1 to {MAX_THREADS}, or nothing for one a core");
        self.range(threads(self.config.run.threads), "threads", &expected);
        let workers = self.config.data.preprocessing_num_workers;
        self.range(threads(workers), "preprocessing_num_workers", &expected);
    }

    /// A plan that cannot be read has none; who uses it says what is wrong with it.
    fn plan_has_adapters(&self) -> bool {
        let adapters = self.config.plan().ok().and_then(|plan| plan.root.get("adapters").map(Node::to_json));
        adapters.is_some_and(|a| !a.is_null() && a.as_array().is_none_or(|list| !list.is_empty()))
    }

    fn method(&mut self) {
        let method = &self.config.method;
        let kind = method.finetuning_type;
        // Adapters of the plan have these settings too, whatever the finetuning type.
        let adapter_keys = ["lora_rank", "lora_alpha", "lora_dropout", "use_rslora"];
        let lora_keys = ["lora_target", "additional_target", "create_new_adapter"];
        let freeze_keys = ["freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"];
        if kind != FinetuningType::Lora {
            let settings = if self.plan_has_adapters() { &[][..] } else { &adapter_keys };
            for key in settings.iter().chain(&lora_keys) {
                self.idle(key, &format!("with `finetuning_type: {kind}`"), "write `finetuning_type: lora` to use it");
            }
            if !self.config.model.adapter_name_or_path.is_empty() && !self.config.model.train_from_scratch {
                let what = format!("adapters go with `finetuning_type: lora`, and it is `{kind}`");
                self.fail(
                    "adapter_name_or_path",
                    what,
                    "write `finetuning_type: lora`, or `phalanx export` the adapter first",
                );
            }
        }
        if kind != FinetuningType::Freeze {
            for key in freeze_keys {
                self.idle(key, &format!("with `finetuning_type: {kind}`"), "write `finetuning_type: freeze` to use it");
            }
        }
        if method.create_new_adapter && self.config.model.adapter_name_or_path.is_empty() {
            self.idle("create_new_adapter", "without `adapter_name_or_path`", "a new adapter is made anyway");
        }
        self.range(method.lora_rank >= 1, "lora_rank", "1 or more");
        self.range(method.lora_alpha.is_none_or(|a| a > 0.0), "lora_alpha", "a number above 0");
        self.range((0.0..1.0).contains(&method.lora_dropout), "lora_dropout", "a number from 0 to below 1");
        self.range(!method.lora_target.is_empty(), "lora_target", "`all`, or at least one module");
        self.range(method.freeze_trainable_layers != 0, "freeze_trainable_layers", "a number of layers other than 0");
        if self.config.train.gradient_checkpointing == Some(true) && self.config.model.disable_gradient_checkpointing {
            let what = "`disable_gradient_checkpointing: true` says the opposite";
            self.fail("gradient_checkpointing", what, "keep one of the two");
        }
    }

    fn data(&mut self) {
        let data = &self.config.data;
        self.range(data.cutoff_len >= 2, "cutoff_len", "2 or more tokens (one is read, one is predicted)");
        self.range(data.max_samples != Some(0), "max_samples", "1 or more");
        self.range(
            data.val_size >= 0.0 && (data.val_size < 1.0 || data.val_size.fract() == 0.0),
            "val_size",
            "a share below 1, or a whole number of samples",
        );
        if data.val_size > 0.0 && !data.eval_dataset.is_empty() {
            self.fail("val_size", "`eval_dataset` gives the evaluation data already", "keep one of the two");
        }
        if data.train_on_prompt && data.mask_history {
            self.fail("mask_history", "`train_on_prompt: true` says the opposite", "keep one of the two");
        }
        if data.neat_packing && data.packing == Some(false) {
            self.fail("neat_packing", "`packing: false` says the opposite", "keep one of the two");
        }
        if self.config.method.stage == Stage::Pt {
            for (key, on) in [
                ("train_on_prompt", data.train_on_prompt),
                ("mask_history", data.mask_history),
                ("train_on_chosen", data.train_on_chosen),
            ] {
                if on {
                    self.idle(key, "with `stage: pt`: plain text has no prompt", "write `stage: sft` to use it");
                }
            }
        } else if data.text_unit != TextUnit::File {
            self.idle("text_unit", "with `stage: sft`: conversations are no texts", "write `stage: pt` to use it");
        }
        let probs = &data.interleave_probs;
        if !probs.is_empty() {
            if data.mix_strategy == crate::sections::MixStrategy::Concat {
                self.idle(
                    "interleave_probs",
                    "with `mix_strategy: concat`",
                    "write `mix_strategy: interleave_under` to use it",
                );
            } else if probs.len() != data.dataset.len() {
                let what = format!("{} weights for {} data sets", probs.len(), data.dataset.len());
                self.fail("interleave_probs", what, "give one weight a data set");
            }
            self.range(probs.iter().all(|p| *p > 0.0), "interleave_probs", "weights above 0");
        }
    }

    fn batch_and_optimizer(&mut self) {
        let train = &self.config.train;
        // Above this a step has more rows than any data set; products of the two stay far from overflow.
        let rows = |n: usize| (1..=MAX_ROWS).contains(&n);
        let expected = format!("1 to {MAX_ROWS}");
        self.range(rows(train.per_device_train_batch_size), "per_device_train_batch_size", &expected);
        self.range(rows(train.per_device_eval_batch_size), "per_device_eval_batch_size", &expected);
        self.range(rows(train.gradient_accumulation_steps), "gradient_accumulation_steps", &expected);
        self.range(train.learning_rate > 0.0, "learning_rate", "a number above 0");
        self.range(train.max_steps >= -1 && train.max_steps != 0, "max_steps", "1 or more, or -1");
        self.range(train.max_steps > 0 || train.num_train_epochs > 0.0, "num_train_epochs", "a number above 0");
        self.range(train.weight_decay >= 0.0, "weight_decay", "0 or more");
        self.range((0.0..1.0).contains(&train.adam_beta1), "adam_beta1", "a number from 0 to below 1");
        self.range((0.0..1.0).contains(&train.adam_beta2), "adam_beta2", "a number from 0 to below 1");
        self.range(train.adam_epsilon > 0.0, "adam_epsilon", "a number above 0");
        self.range(train.max_grad_norm >= 0.0, "max_grad_norm", "0 (no clipping) or more");
        self.range(!train.logging_steps.is_zero(), "logging_steps", "1 or more");
        self.range(train.save_total_limit != Some(0), "save_total_limit", "1 or more");
        self.range(self.config.run.max_skipped_steps >= 1, "max_skipped_steps", "1 or more");
        self.range(self.config.run.profile_steps >= 1, "profile_steps", "1 or more");
        self.experts();
        if !self.config.run.profile {
            self.idle("profile_steps", "with `profile: false`", "set `profile: true` to use it");
        }
        if !self.config.run.nan_guard {
            self.idle("max_skipped_steps", "with `nan_guard: false`", "remove that to use it");
        }
        if train.weight_decay == 0.0 && self.config.run.decay_norms_and_biases {
            self.idle("decay_norms_and_biases", "with `weight_decay: 0`", "set `weight_decay` to use it");
        }
    }

    fn experts(&mut self) {
        let e = &self.config.experts;
        let lora = self.config.method.finetuning_type == FinetuningType::Lora;
        let finite = |x: f64| x >= 0.0 && x.is_finite();
        self.range(e.moe_aux_loss_coef.is_none_or(finite), "moe_aux_loss_coef", "0 (none) or more");
        self.range(finite(e.moe_bias_update_speed), "moe_bias_update_speed", "0 (the biases stay) or more");
        let capacity = e.moe_capacity_factor.is_none_or(|c| c > 0.0 && c.is_finite());
        self.range(capacity, "moe_capacity_factor", "a number above 0");
        if e.moe_bias_update_speed > 0.0 && lora {
            let what = "an adapter does not hold the biases that would move".to_owned();
            self.fail("moe_bias_update_speed", what, "leave it out with `finetuning_type: lora`");
        }
        if e.moe_aux_loss_coef == Some(0.0) {
            for key in ["moe_aux_loss_scope", "moe_aux_loss_layers"] {
                self.idle(key, "with `moe_aux_loss_coef: 0`", "set `moe_aux_loss_coef` to use it");
            }
        }
        if e.moe_capacity_factor.is_none() {
            self.idle("moe_drop_policy", "without `moe_capacity_factor`", "set that to use it");
        }
    }

    fn schedule(&mut self) {
        use LrSchedulerType as Type;
        let train = &self.config.train;
        let (kind, kwargs) = (train.lr_scheduler_type, &train.lr_scheduler_kwargs);
        self.range((0.0..=1.0).contains(&train.warmup_ratio), "warmup_ratio", "a share from 0 to 1");
        if train.warmup_ratio > 0.0 && !train.warmup_steps.is_zero() {
            self.fail("warmup_ratio", "`warmup_steps` gives the warm-up already", "keep one of the two");
        }
        if kind == Type::Constant {
            for (key, on) in
                [("warmup_ratio", train.warmup_ratio > 0.0), ("warmup_steps", !train.warmup_steps.is_zero())]
            {
                if on {
                    self.idle(key, "with `lr_scheduler_type: constant`", "write `constant_with_warmup` to use it");
                }
            }
        }
        // Which arguments a schedule has.
        let mut bad = |name: &str, on: bool, fits: bool| {
            if on && !fits {
                let what = format!("`{name}` has no effect with `lr_scheduler_type: {kind}`");
                self.fail("lr_scheduler_kwargs", what, format!("remove `{name}`, or change `lr_scheduler_type`"));
            }
        };
        let wsd = kind == Type::WarmupStableDecay;
        let min_lr = kind == Type::CosineWithMinLr;
        bad("min_lr", kwargs.min_lr.is_some(), min_lr);
        bad("min_lr_rate", kwargs.min_lr_rate.is_some(), min_lr);
        bad("num_cycles", kwargs.num_cycles != 0.5, min_lr || wsd || kind == Type::Cosine);
        bad("num_decay_steps", kwargs.num_decay_steps.is_some(), wsd);
        bad("num_stable_steps", kwargs.num_stable_steps.is_some(), wsd);
        bad("min_lr_ratio", kwargs.min_lr_ratio != 0.0, wsd);
        bad("decay_type", kwargs.decay_type != DecayType::Cosine, wsd);
        bad("warmup_type", kwargs.warmup_type != WarmupType::Linear, wsd);
        if wsd && kwargs.decay_type != DecayType::Cosine && kwargs.num_cycles != 0.5 {
            let what = format!("`num_cycles` has no effect with `decay_type: {}`", kwargs.decay_type);
            self.fail("lr_scheduler_kwargs", what, "remove `num_cycles`, or write `decay_type: cosine`");
        }
        if min_lr && kwargs.min_lr.is_some() == kwargs.min_lr_rate.is_some() {
            let what = "`cosine_with_min_lr` needs one of `min_lr` and `min_lr_rate`";
            self.fail("lr_scheduler_kwargs", what, "for example: lr_scheduler_kwargs: {min_lr_rate: 0.1}");
        }
        let floor =
            kwargs.min_lr.map(|lr| lr / train.learning_rate).or(kwargs.min_lr_rate).unwrap_or(kwargs.min_lr_ratio);
        if !(0.0..=1.0).contains(&floor) {
            let what = "the lowest learning rate must lie between 0 and `learning_rate`";
            self.fail("lr_scheduler_kwargs", what, "lower `min_lr`, `min_lr_rate` or `min_lr_ratio`");
        }
        if kwargs.num_cycles <= 0.0 {
            self.fail("lr_scheduler_kwargs", "`num_cycles` must be above 0", "0.5 falls once from top to bottom");
        }
    }

    fn saving_and_evaluation(&mut self) {
        let (train, data) = (&self.config.train, &self.config.data);
        match train.save_strategy {
            Strategy::Steps => self.range(!train.save_steps.is_zero(), "save_steps", "1 or more"),
            other => self.idle(
                "save_steps",
                &format!("with `save_strategy: {other}`"),
                "write `save_strategy: steps` to use it",
            ),
        }
        if train.save_strategy == Strategy::No {
            self.idle("save_total_limit", "with `save_strategy: no`", "write `save_strategy: steps` to use it");
        }
        match train.eval_strategy {
            Strategy::Steps => self.range(!train.eval_every().is_zero(), "eval_steps", "1 or more"),
            other => self.idle(
                "eval_steps",
                &format!("with `eval_strategy: {other}`"),
                "write `eval_strategy: steps` to use it",
            ),
        }
        let evaluates = train.eval_strategy != Strategy::No;
        let has_data = data.val_size > 0.0 || !data.eval_dataset.is_empty();
        // A file without `dataset` is not about training; its evaluation data is asked for by `check_for`.
        if !has_data && !data.dataset.is_empty() {
            for (key, on) in [
                ("eval_strategy", evaluates),
                ("do_eval", self.config.method.do_eval),
                ("eval_on_start", train.eval_on_start),
            ] {
                if on {
                    self.fail(
                        key,
                        "there is nothing to evaluate on",
                        "set `val_size` (such as 0.05) or `eval_dataset`",
                    );
                }
            }
        }
        let metric = train.metric_for_best_model.as_deref().map(|m| m.strip_prefix("eval_").unwrap_or(m));
        if let Some(metric) = metric {
            self.range(matches!(metric, "loss" | "perplexity"), "metric_for_best_model", "`loss` or `perplexity`");
        }
        if train.greater_is_better == Some(true) {
            self.fail("greater_is_better", "loss and perplexity are better when smaller", "remove it");
        }
        if !train.load_best_model_at_end {
            return;
        }
        let key = "load_best_model_at_end";
        if !evaluates {
            self.fail(key, "without evaluation there is no best model", "set `eval_strategy: steps` and `val_size`");
        } else if train.save_strategy != train.eval_strategy {
            let what = format!(
                "the best model must have been saved, but `save_strategy` is `{}` and `eval_strategy` is `{}`",
                train.save_strategy, train.eval_strategy
            );
            self.fail(key, what, "set both to the same");
        } else if train.eval_strategy == Strategy::Steps {
            let fits = match (train.save_steps, train.eval_every()) {
                (Steps::Count(save), Steps::Count(eval)) => eval == 0 || save % eval == 0,
                (save, eval) => save == eval,
            };
            if !fits {
                let what = "each save must fall on an evaluation: `save_steps` is not a multiple of `eval_steps`";
                self.fail(key, what, "set `save_steps` to a multiple of `eval_steps`");
            }
        }
    }

    fn generation(&mut self) {
        let g = &self.config.generation;
        if g.do_sample != Some(false) && g.temperature.is_some_and(|t| t <= 0.0) {
            self.fail("temperature", "it must be above 0", "for the most probable token, write `do_sample: false`");
        }
        self.range(g.top_p.is_none_or(|p| p > 0.0 && p <= 1.0), "top_p", "a share above 0, at most 1");
        self.range(g.min_p.is_none_or(|p| (0.0..=1.0).contains(&p)), "min_p", "a share from 0 to 1");
        self.range(g.repetition_penalty.is_none_or(|p| p > 0.0), "repetition_penalty", "a number above 0");
        self.range(g.max_new_tokens != Some(0), "max_new_tokens", "1 or more");
        self.range(self.config.export.export_size >= 1, "export_size", "1 or more (GB)");
    }
}
