//! What is refused, where the message points, and what it says to do.

use phalanx_config::{Config, Purpose, parse_overrides};

/// The message about `text`, a file named `run.yaml`.
fn refusal(text: &str) -> String {
    match Config::parse(text, "run.yaml", &[]) {
        Ok(_) => panic!("accepted:\n{text}"),
        Err(e) => e.to_string(),
    }
}

/// Asserts that each text is refused with all of the parts in the message.
fn refused(cases: &[(&str, &[&str])]) {
    for (text, parts) in cases {
        let message = refusal(text);
        for part in *parts {
            assert!(message.contains(part), "{text:?} gave:\n{message}\nwithout: {part}");
        }
    }
}

#[test]
fn unknown_keys_name_the_nearest() {
    refused(&[
        (
            "a: 1\nlearning_rat: 1e-4\n",
            &["2 problems", "run.yaml:2: `learning_rat`: unknown key", "did you mean `learning_rate`"],
        ),
        ("lora-rank: 8\n", &["run.yaml:1", "did you mean `lora_rank`"]),
        ("cut_off_len: 8\n", &["did you mean `cutoff_len`"]),
        ("gradient_acumulation_steps: 8\n", &["did you mean `gradient_accumulation_steps`"]),
        ("ddp_timeut: 8\n", &["did you mean `ddp_timeout`"]),
        ("zzzzzz: 8\n", &["unknown key", "docs/config.md lists all keys"]),
    ]);
}

#[test]
fn wrong_types_say_what_was_found_and_expected() {
    refused(&[
        ("\nlearning_rate: fast\n", &["run.yaml:2: `learning_rate`: expected a number (such as 1.0e-4), found `fast`"]),
        ("bf16: maybe\n", &["expected true or false, found `maybe`"]),
        ("cutoff_len: 12.5\n", &["expected a whole number, 0 or more, found `12.5`"]),
        ("cutoff_len: -1\n", &["expected a whole number, 0 or more, found `-1`"]),
        ("cutoff_len: null\n", &["found nothing (null)"]),
        ("output_dir: [a, b]\n", &["expected a path, found a list of 2"]),
        ("lr_scheduler_type: cosin\n", &["one of: linear, cosine,", "did you mean `cosine`"]),
        ("save_steps: 1.5\n", &["a share of all steps between 0 and 1, found `1.5`"]),
        (
            "lr_scheduler_kwargs:\n  min_lrr: 1e-5\n",
            &["run.yaml:2: `lr_scheduler_kwargs.min_lrr`: unknown key", "did you mean `min_lr`"],
        ),
        ("lr_scheduler_kwargs:\n  min_lr: low\n", &["run.yaml:2: `lr_scheduler_kwargs.min_lr`: expected a number"]),
        ("mesh: 4\n", &["expected a map"]),
        ("- a\n- b\n", &["run.yaml:1: not valid YAML: a configuration is a map"]),
        ("seed: 1\nseed: 2\n", &["run.yaml:2", "stands twice"]),
        ("eval_strategy: 'no'\nevaluation_strategy: 'no'\n", &["another spelling of `eval_strategy`"]),
    ]);
}

#[test]
fn foreign_keys_are_refused_unless_neutral() {
    refused(&[
        (
            "use_dora: true\n",
            &["run.yaml:1: `use_dora`: LlamaFactory knows it; it is not supported here (found `true`)"],
        ),
        ("fp16: true\n", &["use `bf16: true`"]),
        ("quantization_bit: 4\n", &["quantised base weights are not there yet"]),
        ("stage: dpo\n", &["`dpo` is not supported", "use `pt` or `sft`"]),
        ("finetuning_type: oft\n", &["use `lora`"]),
        ("optim: adafactor\n", &["`adafactor` is not supported", "use `adamw_torch`"]),
        ("mix_strategy: interleave_once\n", &["`interleave_once` is not supported", "use `concat`"]),
        ("report_to: wandb\n", &["metrics.jsonl"]),
        ("pref_beta: 0.1\n", &["preference training"]),
        ("galore_rank: 16\n", &["GaLore"]),
        ("num_beams: 4\n", &["sampled or greedy"]),
        ("streaming: true\n", &["memory-mapped cache"]),
        ("label_smoothing_factor: 0.1\n", &["not supported"]),
        ("infer_dtype: float16\n", &["write `bfloat16`"]),
        ("lr_scheduler_type: polynomial\n", &["`polynomial` is not supported"]),
        ("save_strategy: best\n", &["load_best_model_at_end"]),
    ]);
    let neutral = "use_dora: false\nfp16: false\nquantization_bit: null\nnum_beams: 1\nstreaming: no\npref_beta: ~\n\
                   label_smoothing_factor: 0.0\ninfer_backend: huggingface\nneftune_noise_alpha:\nmodel_revision: main\n";
    let config = Config::parse(neutral, "run.yaml", &[]).unwrap();
    assert!(config.notes().is_empty());
}

#[test]
fn keys_that_contradict_each_other() {
    refused(&[
        ("finetuning_type: full\nadapter_name_or_path: x\n", &["adapters go with `finetuning_type: lora`"]),
        (
            "warmup_ratio: 0.1\nwarmup_steps: 10\n",
            &["run.yaml:1: `warmup_ratio`: `warmup_steps` gives the warm-up already"],
        ),
        ("val_size: 0.1\neval_dataset: x\n", &["`val_size`: `eval_dataset` gives the evaluation data already"]),
        ("dataset: a\neval_strategy: steps\n", &["nothing to evaluate on", "set `val_size`"]),
        ("dataset: a\nload_best_model_at_end: true\n", &["without evaluation there is no best model"]),
        (
            "val_size: 0.1\neval_strategy: epoch\nload_best_model_at_end: true\n",
            &["`save_strategy` is `steps` and `eval_strategy` is `epoch`"],
        ),
        (
            "val_size: 0.1\neval_strategy: steps\neval_steps: 30\nsave_steps: 100\nload_best_model_at_end: true\n",
            &["not a multiple of `eval_steps`"],
        ),
        ("metric_for_best_model: rouge\n", &["`loss` or `perplexity`"]),
        ("greater_is_better: true\n", &["better when smaller"]),
        ("train_on_prompt: true\nmask_history: true\n", &["says the opposite"]),
        ("packing: false\nneat_packing: true\n", &["says the opposite"]),
        ("dataset: a,b,c\nmix_strategy: interleave_over\ninterleave_probs: 0.5,0.5\n", &["2 weights for 3 data sets"]),
        ("gradient_checkpointing: true\ndisable_gradient_checkpointing: true\n", &["says the opposite"]),
        (
            "lr_scheduler_kwargs: {decay_type: linear}\n",
            &["`decay_type` has no effect with `lr_scheduler_type: linear`"],
        ),
        ("lr_scheduler_kwargs: {warmup_type: cosine}\n", &["`warmup_type` has no effect"]),
        (
            "lr_scheduler_type: wsd\nlr_scheduler_kwargs: {decay_type: 1-sqrt, num_cycles: 1.5}\n",
            &["`num_cycles` has no effect with `decay_type: 1-sqrt`", "decay_type: cosine"],
        ),
        (
            "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_decay_steps: 5}\n",
            &["`num_decay_steps` has no effect"],
        ),
        ("lr_scheduler_type: cosine_with_min_lr\n", &["needs one of `min_lr` and `min_lr_rate`"]),
        ("train_from_scratch: true\nshape: x\n", &["random weights are trained in full", "finetuning_type: full"]),
        ("shape: tiny-15m\n", &["trained weights bring their own architecture", "train_from_scratch: true"]),
        (
            "train_from_scratch: true\nfinetuning_type: full\nshape: x\nmodel: {hidden_size: 8}\n",
            &["gives the architecture already"],
        ),
    ]);
}

/// Adapters that the plan asks for have a rank, whatever the finetuning type; their layers stand in the plan.
#[test]
fn settings_of_adapters_count_where_the_plan_has_some() {
    let notes = |text: &str| -> Vec<String> {
        let config = Config::parse(text, "run.yaml", &[]).unwrap_or_else(|e| panic!("{text}: {e}"));
        config.notes().iter().map(ToString::to_string).collect()
    };
    let keys = "finetuning_type: full\nlora_rank: 4\nlora_alpha: 8\nuse_rslora: true\nlora_dropout: 0.1\n";
    assert_eq!(notes(&format!("{keys}plan: {{adapters: q_proj}}\n")), [""; 0]);
    assert_eq!(notes(&format!("{keys}plan: {{adapters: []}}\n")).len(), 4);
    assert_eq!(notes(&format!("{keys}plan: {{freeze: lm_head}}\n")).len(), 4);
    let target = notes("finetuning_type: full\nlora_target: q_proj\nplan: {adapters: q_proj}\n");
    assert!(target.len() == 1 && target[0].contains("`lora_target`: it has no effect"), "{target:?}");

    let path = std::env::temp_dir().join(format!("phalanx-config-plan-{}.yaml", std::process::id()));
    std::fs::write(&path, "adapters: [q_proj]\n").unwrap();
    let found = notes(&format!("{keys}plan: {}\n", path.display()));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(found, [""; 0]);
}

/// A file that somebody reuses for another run is not refused for what the other run leaves idle, and the person hears
/// of every such key.
#[test]
fn keys_without_effect_are_noted() {
    let cases: [(&str, &[&str]); 14] = [
        (
            "finetuning_type: full\nlora_rank: 8\nlora_target: all\n",
            &["run.yaml:2: `lora_rank`: it has no effect with `finetuning_type: full`", "run.yaml:3: `lora_target`"],
        ),
        ("finetuning_type: freeze\nlora_target: all\n", &["`lora_target`: it has no effect", "finetuning_type: lora"]),
        ("freeze_trainable_layers: 2\n", &["with `finetuning_type: lora`", "write `finetuning_type: freeze`"]),
        ("create_new_adapter: true\n", &["without `adapter_name_or_path`"]),
        ("lr_scheduler_type: constant\nwarmup_steps: 10\n", &["constant_with_warmup"]),
        (
            "save_strategy: no\nsave_steps: 10\n",
            &["run.yaml:2: `save_steps`: it has no effect with `save_strategy: no`"],
        ),
        ("save_strategy: no\nsave_total_limit: 2\n", &["`save_total_limit`: it has no effect"]),
        ("eval_steps: 10\n", &["`eval_steps`: it has no effect with `eval_strategy: no`"]),
        ("stage: pt\nmask_history: true\n", &["plain text has no prompt"]),
        ("interleave_probs: 0.5,0.5\n", &["with `mix_strategy: concat`"]),
        ("nan_guard: false\nmax_skipped_steps: 3\n", &["with `nan_guard: false`"]),
        ("profile_steps: 5\n", &["`profile_steps`: it has no effect with `profile: false`"]),
        ("text_unit: line\n", &["`text_unit`: it has no effect with `stage: sft`"]),
        ("stage: pt\ntrain_on_chosen: true\n", &["`train_on_chosen`: it has no effect with `stage: pt`"]),
    ];
    for (text, expected) in cases {
        let config = Config::parse(text, "run.yaml", &[]).unwrap_or_else(|e| panic!("{text}: {e}"));
        let notes: Vec<String> = config.notes().iter().map(ToString::to_string).collect();
        for part in expected {
            assert!(notes.iter().any(|n| n.contains(part)), "{text}: {notes:?}");
        }
    }
}

#[test]
fn values_out_of_range() {
    refused(&[
        (
            "per_device_train_batch_size: 0\n",
            &["run.yaml:1: `per_device_train_batch_size`: expected 1 to 16777216, found 0"],
        ),
        ("per_device_eval_batch_size: 0\n", &["1 to 16777216"]),
        ("gradient_accumulation_steps: 9223372036854775807\n", &["1 to 16777216"]),
        ("learning_rate: 0\n", &["a number above 0"]),
        ("learning_rate: -1e-4\n", &["a number above 0"]),
        ("cutoff_len: 0\n", &["2 or more tokens"]),
        ("max_steps: 0\n", &["1 or more, or -1"]),
        ("num_train_epochs: 0\n", &["a number above 0"]),
        ("warmup_ratio: 1.5\n", &["a share from 0 to 1"]),
        ("adam_beta2: 1.0\n", &["0 to below 1"]),
        ("adam_epsilon: 0\n", &["above 0"]),
        ("weight_decay: -0.1\n", &["0 or more"]),
        ("max_grad_norm: -1\n", &["0 (no clipping) or more"]),
        ("logging_steps: 0\n", &["1 or more"]),
        ("save_steps: 0\n", &["1 or more"]),
        ("save_total_limit: 0\n", &["1 or more"]),
        ("val_size: 1.5\n", &["a share below 1, or a whole number"]),
        ("max_samples: 0\n", &["1 or more"]),
        ("lora_rank: 0\n", &["1 or more"]),
        ("lora_alpha: 0\n", &["above 0"]),
        ("lora_dropout: 1.0\n", &["0 to below 1"]),
        ("lora_target: ''\n", &["at least one module"]),
        ("finetuning_type: freeze\nfreeze_trainable_layers: 0\n", &["other than 0"]),
        ("temperature: 0\n", &["`do_sample: false`"]),
        ("top_p: 0\n", &["above 0, at most 1"]),
        ("min_p: 1.5\n", &["from 0 to 1"]),
        ("repetition_penalty: 0\n", &["above 0"]),
        ("threads: 0\n", &["run.yaml:1: `threads`: expected 1 to 1024", "found 0"]),
        ("threads: 1000000\n", &["expected 1 to 1024", "found 1000000"]),
        ("preprocessing_num_workers: 99999\n", &["`preprocessing_num_workers`: expected 1 to 1024"]),
        ("export_size: 0\n", &["1 or more"]),
        (
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0}\n",
            &["between 0 and `learning_rate`"],
        ),
    ]);
}

#[test]
fn all_problems_come_at_once() {
    let message = refusal("learning_rate: fast\nlora_rnk: 8\nfp16: true\n");
    assert!(message.starts_with("the configuration has 3 problems:"), "{message}");
    for line in ["run.yaml:1", "run.yaml:2", "run.yaml:3"] {
        assert!(message.contains(line), "{message}");
    }
}

#[test]
fn the_command_line_is_checked_alike() {
    let refusal =
        |args: &[&str]| match parse_overrides(args).and_then(|o| Config::parse("lora_rank: 4\n", "run.yaml", &o)) {
            Ok(_) => panic!("accepted: {args:?}"),
            Err(e) => e.to_string(),
        };
    let message = refusal(&["--learning-rat", "1e-4"]);
    assert!(
        message.contains("command line: `learning_rat`: unknown key\n    did you mean `learning_rate`"),
        "{message}"
    );
    assert!(refusal(&["learning_rate=fast"]).contains("command line: `learning_rate`: expected a number"));
    assert!(refusal(&["stray"]).contains("write key=value or --key value"));
    assert!(refusal(&["lorarank="]).contains("unknown key"));
    assert!(refusal(&["lora_rank.x=1"]).contains("it is not a map"));
    assert!(refusal(&["plan={a: [}"]).contains("not valid YAML"));
    // A file reused with another method runs, with a note; taking the key out of the file silences that.
    for (args, notes) in [(&["finetuning_type=full"][..], 1), (&["finetuning_type=full", "lora_rank="], 0)] {
        let config = Config::parse("lora_rank: 4\n", "run.yaml", &parse_overrides(args).unwrap()).unwrap();
        assert_eq!(config.notes().len(), notes, "{:?}", config.notes());
    }
}

#[test]
fn each_purpose_asks_for_its_keys() {
    let message = |purpose| Config::parse("", "run.yaml", &[]).unwrap().check_for(purpose).unwrap_err().to_string();
    for key in ["model_name_or_path", "dataset", "output_dir"] {
        assert!(message(Purpose::Train).contains(&format!("`{key}`: it is missing")), "{key}");
    }
    assert!(message(Purpose::Export).contains("`export_dir`"));
    assert!(message(Purpose::Generate).contains("`model_name_or_path`"));
    assert!(message(Purpose::Data).contains("`dataset`"));

    let scratch =
        "train_from_scratch: true\nfinetuning_type: full\nmodel: {model_type: llama}\ndataset: a\noutput_dir: o\n";
    let config = Config::parse(scratch, "run.yaml", &[]).unwrap();
    assert!(config.check_for(Purpose::Train).is_ok());
    assert!(config.check_for(Purpose::Generate).is_err());
    let config =
        Config::parse(&format!("{scratch}plan: no/such/plan.yaml\ndo_train: false\n"), "run.yaml", &[]).unwrap();
    let message = config.check_for(Purpose::Train).unwrap_err().to_string();
    assert!(message.contains("run.yaml:6: `plan`: there is nothing at `no/such/plan.yaml`"), "{message}");
    assert!(message.contains("run.yaml:7: `do_train`"), "{message}");
}

#[test]
fn a_file_that_cannot_be_read() {
    let error = Config::load("no/such/run.yaml", &[]).unwrap_err().to_string();
    assert!(error.contains("cannot read the configuration no/such/run.yaml"), "{error}");
}
