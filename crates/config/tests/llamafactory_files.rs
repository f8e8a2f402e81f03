//! Files written for LlamaFactory load unchanged, with the meaning they have there.

use phalanx_config::{
    Config, FinetuningType, LogTarget, LrSchedulerType, Purpose, ResumeFrom, Stage, Steps, Strategy, parse_overrides,
};

fn fixture(name: &str) -> Config {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    Config::load(path, &[]).unwrap_or_else(|e| panic!("{e}"))
}

fn noted(config: &Config) -> Vec<&str> {
    config.notes().iter().map(|n| n.key.as_str()).collect()
}

#[test]
fn lora_sft() {
    let c = fixture("lora_sft.yaml");
    assert_eq!(c.model.model_name_or_path.as_deref(), Some("Qwen/Qwen3-4B-Instruct-2507"));
    assert_eq!((c.method.stage, c.method.finetuning_type), (Stage::Sft, FinetuningType::Lora));
    assert_eq!((c.method.lora_rank, c.method.lora_alpha()), (8, 16.0));
    assert_eq!(c.method.lora_target, ["all"]);
    assert_eq!(c.data.dataset, ["identity", "alpaca_en_demo"]);
    assert_eq!(c.data.template.as_deref(), Some("qwen3_nothink"));
    assert_eq!((c.data.cutoff_len, c.data.max_samples), (2048, Some(1000)));
    assert!(!c.data.packing(c.method.stage));
    assert_eq!(c.train.learning_rate, 1e-4);
    assert_eq!((c.train.num_train_epochs, c.train.max_steps()), (3.0, None));
    assert_eq!(c.train.lr_scheduler_type, LrSchedulerType::Cosine);
    assert_eq!(c.train.warmup_steps(95), 10);
    assert_eq!((c.train.logging_steps, c.train.save_steps), (Steps::Count(10), Steps::Count(500)));
    assert_eq!(c.train.report_to, [LogTarget::None]);
    assert!(!c.train.tensorboard() && c.train.bf16 && c.train.plot_loss && c.train.overwrite_output_dir);
    assert_eq!(c.train.resume_from_checkpoint, ResumeFrom::Auto);
    assert_eq!(noted(&c), ["trust_remote_code", "dataloader_num_workers", "ddp_timeout"]);
}

#[test]
fn full_sft() {
    let c = fixture("full_sft.yaml");
    assert_eq!(c.method.finetuning_type, FinetuningType::Full);
    assert_eq!(c.train.eval_strategy, Strategy::Steps);
    assert_eq!(c.train.eval_every(), Steps::Count(500));
    assert_eq!(c.data.val_size, 0.1);
    assert!(noted(&c).contains(&"deepspeed"));
}

#[test]
fn pretraining_packs_by_default() {
    let c = fixture("lora_pretrain.yaml");
    assert_eq!(c.method.stage, Stage::Pt);
    assert!(c.data.packing(c.method.stage));
}

#[test]
fn freeze_and_export() {
    let c = fixture("freeze_sft.yaml");
    assert_eq!(c.method.freeze_trainable_layers, 8);
    let c = fixture("merge_lora.yaml");
    assert_eq!(c.export.export_size, 5);
    assert_eq!(c.model.adapter_name_or_path, [std::path::PathBuf::from("saves/qwen3-4b/lora/sft")]);
    assert_eq!(noted(&c), ["trust_remote_code", "export_device"]);
}

#[test]
fn a_hub_name_is_no_folder() {
    let error = fixture("lora_sft.yaml").check_for(Purpose::Train).unwrap_err().to_string();
    assert!(error.contains("lora_sft.yaml:2: `model_name_or_path`: there is no folder `Qwen/Qwen3-4B-Instruct-2507`"));
    assert!(error.contains("hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir"));
}

#[test]
fn what_is_written_back_loads_to_the_same() {
    for name in ["lora_sft.yaml", "full_sft.yaml", "lora_pretrain.yaml", "freeze_sft.yaml", "merge_lora.yaml"] {
        let c = fixture(name);
        let again = Config::parse(&c.to_yaml(), "again.yaml", &[]).unwrap();
        assert_eq!(again.to_json(), c.to_json(), "{name}");
        assert_eq!(again.to_yaml(), c.to_yaml(), "{name}");
        // The same file as JSON.
        let written: serde_json::Map<_, _> =
            c.describe().into_iter().filter(|d| c.is_set(d.key)).map(|d| (d.key.to_owned(), d.value)).collect();
        let json = serde_json::to_string_pretty(&written).unwrap();
        assert_eq!(Config::parse(&json, "again.json", &[]).unwrap().to_json(), c.to_json(), "{name}");
    }
}

#[test]
fn overrides_win_and_say_so() {
    let path = format!("{}/tests/fixtures/lora_sft.yaml", env!("CARGO_MANIFEST_DIR"));
    let args = [
        "learning_rate=3e-5",
        "--max-steps",
        "7",
        "--bf16=false",
        "--packing",
        "warmup_ratio=",
        "lr_scheduler_type=cosine_with_min_lr",
        "lr_scheduler_kwargs.min_lr=1e-6",
        "plan={recompute: ['model.layers.{*}']}",
        "dataset=[a, b]",
    ];
    let c = Config::load(path, &parse_overrides(&args).unwrap()).unwrap();
    assert_eq!(c.train.learning_rate, 3e-5);
    assert_eq!(c.train.max_steps(), Some(7));
    assert!(!c.train.bf16 && c.data.packing(Stage::Sft));
    assert_eq!((c.train.warmup_ratio, c.is_set("warmup_ratio")), (0.0, false));
    assert_eq!(c.train.lr_scheduler_kwargs.min_lr, Some(1e-6));
    assert_eq!(c.plan().unwrap().root.to_json(), serde_json::json!({"recompute": ["model.layers.{*}"]}));
    assert_eq!(c.origin("learning_rate").to_string(), "command line");
    assert!(c.origin("cutoff_len").to_string().ends_with("lora_sft.yaml:15"));
}
