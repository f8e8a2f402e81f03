//! Whether a configuration still describes the run that wrote a checkpoint.
//!
//! Every key of the configuration stands in exactly one class (a test sees to it): what decides which tensors there are can never
//! change, what decides the numbers can only change when somebody asks for it by name, the rest may change freely.

use phalanx_config::Config;
use serde_json::{Map, Value};

use crate::Result;

/// What a change of a key means for a run that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The checkpoint does not fit any more, or would silently win over the key.
    Structure,
    /// The numbers would not be those of a run that was never stopped.
    Numbers,
    /// Nothing that is computed depends on it, or the run's length does on purpose.
    Free,
}

const STRUCTURE: &[&str] = &[
    "model",
    "shape",
    "config_name_or_path",
    "adapter_name_or_path",
    "finetuning_type",
    "freeze_trainable_layers",
    "freeze_trainable_modules",
    "freeze_extra_modules",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target",
    "use_rslora",
    "additional_target",
    "create_new_adapter",
    "seed",
    "data_seed",
    "disable_shuffling",
    "plan.freeze",
    "plan.train",
    "plan.adapters",
];

/// For the test alone: a key that is in no list counts as one of these.
#[cfg(test)]
const NUMBERS: &[&str] = &[
    "model_name_or_path",
    "stage",
    "dataset",
    "template",
    "cutoff_len",
    "packing",
    "neat_packing",
    "train_on_prompt",
    "mask_history",
    "max_samples",
    "val_size",
    "mix_strategy",
    "interleave_probs",
    "default_system",
    "enable_thinking",
    "template_kwargs",
    "template_date",
    "rewritten_history",
    "train_on_chosen",
    "text_unit",
    "skip_bad_samples",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "max_grad_norm",
    "bf16",
    "nan_guard",
    "decay_norms_and_biases",
    "moe_aux_loss_coef",
    "moe_aux_loss_scope",
    "moe_aux_loss_layers",
    "moe_bias_update_speed",
    "moe_capacity_factor",
    "moe_drop_policy",
    "plan.precision",
    "plan.arithmetic",
];

const FREE: &[&str] = &[
    "train_from_scratch",
    // Data and tokenizer are compared by what they hold, when the stream goes on.
    "tokenizer_name_or_path",
    "dataset_dir",
    "eval_dataset",
    "tokenized_path",
    "overwrite_cache",
    "preprocessing_num_workers",
    "infer_dtype",
    "disable_gradient_checkpointing",
    "gradient_checkpointing",
    "plan.recompute",
    "plan.parallel",
    "do_train",
    "do_eval",
    "output_dir",
    "overwrite_output_dir",
    "num_train_epochs",
    "max_steps",
    "logging_steps",
    "logging_first_step",
    "logging_dir",
    "report_to",
    "plot_loss",
    "disable_tqdm",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "save_only_model",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "per_device_eval_batch_size",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "resume_from_checkpoint",
    "mesh",
    "threads",
    "max_skipped_steps",
    "profile",
    "profile_steps",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "export_dir",
    "export_size",
    "export_dtype",
];

/// The class of a key (a key of the plan as `plan.recompute`). A key nobody thought of is taken to change the numbers.
pub fn class(key: &str) -> Class {
    if STRUCTURE.contains(&key) {
        Class::Structure
    } else if FREE.contains(&key) {
        Class::Free
    } else {
        Class::Numbers
    }
}

/// A key that is not what it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// What it means.
    pub class: Class,
    /// In the checkpoint.
    pub then: Value,
    /// In the present configuration.
    pub now: Value,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} was {} and is now {}", self.key, self.then, self.now)
    }
}

/// A configuration as checkpoints keep it: key by key, and the plan by its contents, wherever it was written.
///
/// # Errors
/// If the plan's file cannot be read.
pub fn recorded(config: &Config) -> Result<Map<String, Value>> {
    let mut all = config.to_json().as_object().cloned().unwrap_or_default();
    all.remove("plan");
    let document = config.plan()?;
    for key in ["recompute", "freeze", "train", "adapters", "precision", "arithmetic", "parallel"] {
        let value = document.root.get(key).map_or(Value::Null, |node| node.to_json());
        all.insert(format!("plan.{key}"), value);
    }
    Ok(all)
}

/// What has changed between a checkpoint's configuration and the present one. Keys that the checkpoint does not know (it is of an
/// older version) are not compared.
///
/// On another mesh a step is the same if it has as many micro-batches over all ranks.
pub fn changes(then: &Map<String, Value>, now: &Map<String, Value>) -> Vec<Change> {
    let as_many = micro_batches_a_step(then) == micro_batches_a_step(now);
    let changed = now.iter().filter_map(|(key, now)| {
        let then = then.get(key).filter(|then| *then != now)?;
        if key == "gradient_accumulation_steps" && as_many {
            return None;
        }
        Some(Change { key: key.clone(), class: class(key), then: then.clone(), now: now.clone() })
    });
    changed.collect()
}

fn micro_batches_a_step(config: &Map<String, Value>) -> Option<u64> {
    let ranks = |axis: &str| config.get("mesh").and_then(|m| m.get(axis)?.as_u64()).unwrap_or(1);
    Some(config.get("gradient_accumulation_steps")?.as_u64()? * ranks("dp_shard") * ranks("dp_replicate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_stands_in_one_class() {
        let mut keys: Vec<String> =
            Config::keys().iter().filter(|k| k.key != "plan").map(|k| k.key.to_owned()).collect();
        keys.extend(recorded(&Config::default()).unwrap().keys().filter(|k| k.starts_with("plan.")).cloned());
        for key in &keys {
            let n = [STRUCTURE, NUMBERS, FREE].iter().filter(|list| list.contains(&key.as_str())).count();
            assert_eq!(n, 1, "`{key}` must stand in one of STRUCTURE, NUMBERS and FREE of {}", file!());
        }
        let listed = [STRUCTURE, NUMBERS, FREE].concat();
        for key in listed {
            assert!(keys.iter().any(|k| k == key), "`{key}` is no key any more");
        }
    }

    #[test]
    fn a_plan_is_compared_by_its_contents() {
        let read = |text: &str| recorded(&Config::parse(text, "run.yaml", &[]).unwrap()).unwrap();
        let a = read("plan: {freeze: model.layers.0, recompute: 'model.layers.{*}'}\n");
        let b = read("plan:\n  freeze: model.layers.1\nlearning_rate: 1e-3\n");
        let found = changes(&a, &b);
        let classes: Vec<_> = found.iter().map(|c| (c.key.as_str(), c.class)).collect();
        assert!(classes.contains(&("plan.freeze", Class::Structure)), "{classes:?}");
        assert!(classes.contains(&("plan.recompute", Class::Free)), "{classes:?}");
        assert!(classes.contains(&("learning_rate", Class::Numbers)), "{classes:?}");
        assert_eq!(classes.len(), 3);
        assert!(changes(&a, &a).is_empty());
    }
}
