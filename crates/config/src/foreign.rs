//! Keys of LlamaFactory and transformers that are not keys here.
//!
//! A file written for LlamaFactory either runs with the same meaning or is told which key stands in the way. So keys
//! that change the result are refused unless they hold their neutral value ([`UNSUPPORTED`], [`FAMILIES`]); keys that
//! only say *how* another program gets to the same result are accepted, each with a note ([`HARMLESS`]).

/// A key that is refused unless it holds one of `neutral` (null is always neutral).
#[derive(Debug, Clone, Copy)]
pub struct Unsupported {
    /// The key.
    pub key: &'static str,
    /// Values under which it asks for nothing.
    pub neutral: &'static [&'static str],
    /// What to do instead.
    pub instead: &'static str,
}

/// A key that is accepted and not used.
#[derive(Debug, Clone, Copy)]
pub struct Harmless {
    /// The key.
    pub key: &'static str,
    /// Why nothing is lost.
    pub why: &'static str,
}

/// A spelling that is accepted for a key of ours.
pub const ALIASES: &[(&str, &str)] = &[
    ("evaluation_strategy", "eval_strategy"),
    ("from_scratch", "train_from_scratch"),
    ("activation_checkpointing", "gradient_checkpointing"),
];

const OFF: &[&str] = &["false", "False", "no", "0"];
const OFF_OR_EMPTY: &[&str] = &["", "false", "False", "[]"];

const fn off(key: &'static str, instead: &'static str) -> Unsupported {
    Unsupported { key, neutral: OFF, instead }
}
const fn unset(key: &'static str, instead: &'static str) -> Unsupported {
    Unsupported { key, neutral: OFF_OR_EMPTY, instead }
}
const fn only(key: &'static str, neutral: &'static [&'static str], instead: &'static str) -> Unsupported {
    Unsupported { key, neutral, instead }
}
const fn fine(key: &'static str, why: &'static str) -> Harmless {
    Harmless { key, why }
}

/// Refused unless neutral.
pub const UNSUPPORTED: &[Unsupported] = &[
    // Model.
    unset("adapter_folder", "give the full path in `adapter_name_or_path`"),
    off("resize_vocab", "add the rows to the model's files first"),
    unset("add_tokens", "add the tokens to tokenizer.json and the embedding first"),
    unset("add_special_tokens", "add the tokens to tokenizer.json and the embedding first"),
    unset("new_special_tokens_config", "add the tokens to tokenizer.json and the embedding first"),
    off("split_special_tokens", "special tokens always stay whole"),
    only("model_revision", &["main"], "fetch the revision with `hf download --revision` and give its folder"),
    unset("rope_scaling", "write `rope_scaling` (or `rope_parameters`) into the model's config.json"),
    off("shift_attn", "use `sliding_window` in config.json"),
    unset("mixture_of_depths", "remove it"),
    only("use_kv_cache", &["true", "True"], "generation always keeps a key-value cache"),
    only("infer_backend", &["huggingface", "hf"], "generation runs in this program; write `huggingface` or remove it"),
    unset("quantization_bit", "train in f32 or with `bf16: true`; quantised base weights are not there yet"),
    unset("quantization_device_map", "remove it"),
    // Method.
    off("pure_bf16", "use `bf16: true`: weights are bf16 while computing, the optimizer keeps f32 masters"),
    off("use_llama_pro", "use `finetuning_type: freeze`"),
    off("use_dora", "use plain LoRA (remove it)"),
    off("pissa_init", "use plain LoRA (remove it)"),
    off("pissa_convert", "use plain LoRA (remove it)"),
    unset("loraplus_lr_ratio", "use one learning rate (remove it)"),
    off("use_adam_mini", "use `optim: adamw_torch`"),
    off("use_muon", "use `optim: adamw_torch`"),
    off("use_galore", "use `finetuning_type: lora`, or `full` with AdamW"),
    off("use_apollo", "use `finetuning_type: lora`, or `full` with AdamW"),
    off("use_badam", "use `finetuning_type: freeze`, or `full` with AdamW"),
    off("use_dft_loss", "the loss is cross-entropy (remove it)"),
    off("use_asft_loss", "the loss is cross-entropy (remove it)"),
    off("use_eaft_loss", "the loss is cross-entropy (remove it)"),
    off("use_mca", "use `plan:` and `mesh:`"),
    off("use_megatron_bridge", "use `plan:` and `mesh:`"),
    off("use_hyper_parallel", "use `plan:` and `mesh:`"),
    off("freeze_language_model", "use `finetuning_type: freeze`"),
    unset("early_stopping_steps", "use `load_best_model_at_end: true` with `eval_steps` and `save_steps`"),
    off("compute_accuracy", "evaluation gives loss and perplexity (remove it)"),
    // Data.
    off("streaming", "remove it: data is tokenised once into a memory-mapped cache, of any size"),
    unset("media_dir", "images, video and audio are not there yet"),
    only("ignore_pad_token_for_loss", &["true", "True"], "padding never counts in the loss"),
    off("eval_on_each_dataset", "evaluate one data set a run, with `eval_dataset`"),
    unset("tool_format", "tool calls are written as the model's own chat template does"),
    off("preserve_thinking", "the chat template decides; edit the template"),
    unset("eval_num_beams", "answers are sampled or greedy"),
    // Training.
    off("fp16", "use `bf16: true` (same memory, no loss scaling) or f32"),
    off("fp16_full_eval", "remove it: evaluation uses the type of training"),
    off("fp8", "use `bf16: true` or f32"),
    off("bf16_full_eval", "remove it: evaluation uses the type of training"),
    off("auto_find_batch_size", "set `per_device_train_batch_size`; the memory is predicted before the run"),
    only("label_smoothing_factor", &["0", "0.0"], "remove it"),
    unset("neftune_noise_alpha", "remove it"),
    off("group_by_length", "use `packing: true`, which wastes no tokens"),
    only(
        "train_sampling_strategy",
        &["random"],
        "use `packing: true`, or `disable_shuffling: true` for the file's order",
    ),
    off("dataloader_drop_last", "the last short batch is always trained on, with its true weight"),
    unset("optim_args", "use `adam_beta1`, `adam_beta2`, `adam_epsilon`"),
    unset("optim_target_modules", "use `finetuning_type: freeze` or `lora`"),
    only("logging_strategy", &["steps"], "use `logging_steps`"),
    only("eval_delay", &["0"], "choose `eval_steps`"),
    off("ignore_data_skip", "resuming always goes on at the exact sample, at no cost"),
    off("push_to_hub", "copy the output folder with `hf upload`"),
    unset("hub_model_id", "copy the output folder with `hf upload`"),
    unset("export_hub_model_id", "copy the exported folder with `hf upload`"),
    only("average_tokens_across_devices", &["true", "True"], "the loss is always averaged over all tokens"),
    unset("generation_config", "use the keys of the section `generation`"),
    // Evaluation and generation.
    off("do_predict", "use `phalanx generate`"),
    off("predict_with_generate", "use `phalanx generate`"),
    unset("generation_max_length", "use `max_new_tokens`"),
    unset("generation_num_beams", "answers are sampled or greedy"),
    only("num_beams", &["1"], "answers are sampled or greedy"),
    only("length_penalty", &["1", "1.0"], "it only acts on beams; remove it"),
    only("max_length", &["1024"], "use `max_new_tokens`"),
    unset("export_quantization_bit", "export `bfloat16` and quantise with another program"),
    off("export_legacy_format", "weights are written as safetensors"),
];

/// Every key with this beginning belongs to something that is not here.
pub const FAMILIES: &[(&str, &str)] = &[
    ("pref_", "it belongs to preference training, which is not there yet"),
    ("dpo_", "it belongs to preference training, which is not there yet"),
    ("kto_", "it belongs to preference training, which is not there yet"),
    ("simpo_", "it belongs to preference training, which is not there yet"),
    ("ppo_", "it belongs to reinforcement learning, which is not there yet"),
    ("ref_model", "it belongs to preference training, which is not there yet"),
    ("reward_model", "it belongs to reinforcement learning, which is not there yet"),
    ("oft_", "it belongs to orthogonal fine-tuning; use `finetuning_type: lora`"),
    ("galore_", "it belongs to GaLore; use `finetuning_type: lora`, or `full` with AdamW"),
    ("apollo_", "it belongs to APOLLO; use `finetuning_type: lora`, or `full` with AdamW"),
    ("badam_", "it belongs to BAdam; use `finetuning_type: freeze`"),
    ("swanlab_", "it belongs to SwanLab; use `report_to: tensorboard`, or read metrics.jsonl"),
    ("vllm_", "it belongs to vLLM; generation runs in this program"),
    ("sglang_", "it belongs to SGLang; generation runs in this program"),
    ("kt_", "it belongs to KTransformers; use `plan:`"),
    ("image_", "images are not there yet"),
    ("video_", "video is not there yet"),
    ("audio_", "audio is not there yet"),
    ("profiler_", "it belongs to the torch profiler"),
    ("hyper_parallel_", "use `plan:` and `mesh:`"),
];

/// Accepted, with a note.
pub const HARMLESS: &[Harmless] = &[
    fine("trust_remote_code", "no code of a model is ever run; the architectures are built in"),
    fine("cache_dir", "nothing is downloaded"),
    fine("hf_hub_token", "nothing is downloaded"),
    fine("ms_hub_token", "nothing is downloaded"),
    fine("om_hub_token", "nothing is downloaded"),
    fine("hub_token", "nothing is uploaded"),
    fine("use_fast_tokenizer", "tokenizer.json is read by the `tokenizers` crate, as by the fast tokenizers"),
    fine("low_cpu_mem_usage", "weights are memory-mapped"),
    fine("flash_attn", "attention never builds the S×S matrix, whatever its name"),
    fine("use_unsloth", "another program's speed-up of the same result"),
    fine("use_unsloth_gc", "another program's speed-up of the same result"),
    fine("enable_liger_kernel", "the kernels here are fused"),
    fine("use_liger_kernel", "the kernels here are fused"),
    fine("liger_kernel_config", "the kernels here are fused"),
    fine("use_v1_kernels", "the kernels here are fused"),
    fine("use_reentrant_gc", "recompute has one form here"),
    fine("gradient_checkpointing_kwargs", "recompute has one form here"),
    fine("activation_checkpointing_kwargs", "recompute has one form here"),
    fine("upcast_layernorm", "norms are computed in f32"),
    fine("upcast_lmhead_output", "logits are f32"),
    fine("print_param_status", "`phalanx plan show CONFIG` prints every parameter"),
    fine("offload_folder", "weights are memory-mapped"),
    fine("init_special_tokens", "no tokens are added"),
    fine("quantization_method", "only acts with `quantization_bit`"),
    fine("quantization_type", "only acts with `quantization_bit`"),
    fine("double_quantization", "only acts with `quantization_bit`"),
    fine("pissa_iter", "only acts with `pissa_init`"),
    fine("loraplus_lr_embedding", "only acts with `loraplus_lr_ratio`"),
    fine("asft_alpha", "only acts with `use_asft_loss`"),
    fine("eaft_alpha", "only acts with `use_eaft_loss`"),
    fine("ld_alpha", "only acts in preference training"),
    fine("freeze_vision_tower", "the models here have none"),
    fine("freeze_multi_modal_projector", "the models here have none"),
    fine("buffer_size", "the whole data set is shuffled"),
    fine("preprocessing_batch_size", "tokenising is spread over threads by itself"),
    fine("data_shared_file_system", "one machine"),
    fine("dataloader_num_workers", "batches are read from a memory-mapped cache"),
    fine("dataloader_pin_memory", "batches are read from a memory-mapped cache"),
    fine("dataloader_persistent_workers", "batches are read from a memory-mapped cache"),
    fine("dataloader_prefetch_factor", "batches are read from a memory-mapped cache"),
    fine("dataloader_multiprocessing_context", "batches are read from a memory-mapped cache"),
    fine("dataloader_in_order", "batches always come in order"),
    fine("remove_unused_columns", "only what the template needs is read"),
    fine("label_names", "labels come from the template"),
    fine("length_column_name", "lengths come from the cache"),
    fine("deepspeed", "the file is not read: one process holds the whole state, with the same result; see `plan:`"),
    fine("fsdp", "one process holds the whole state, with the same result; see `plan:`"),
    fine("fsdp_config", "one process holds the whole state, with the same result; see `plan:`"),
    fine("accelerator_config", "one process"),
    fine("parallelism_config", "one process; see `plan:`"),
    fine("local_rank", "one process"),
    fine("ddp_timeout", "one process"),
    fine("ddp_backend", "one process"),
    fine("ddp_find_unused_parameters", "one process"),
    fine("ddp_bucket_cap_mb", "one process"),
    fine("ddp_broadcast_buffers", "one process"),
    fine("ddp_static_graph", "one process"),
    fine("ray_num_workers", "one process"),
    fine("ray_run_name", "one process"),
    fine("ray_storage_path", "one process"),
    fine("ray_init_kwargs", "one process"),
    fine("resources_per_worker", "one process"),
    fine("placement_strategy", "one process"),
    fine("master_addr", "one process"),
    fine("master_port", "one process"),
    fine("use_cpu", "it runs on the CPU"),
    fine("no_cuda", "it runs on the CPU"),
    fine("tf32", "f32 is f32"),
    fine("torch_compile", "the kernels are compiled already"),
    fine("torch_compile_backend", "the kernels are compiled already"),
    fine("torch_compile_mode", "the kernels are compiled already"),
    fine("torch_empty_cache_steps", "memory comes from a pool"),
    fine("full_determinism", "the same inputs always give the same bits"),
    fine("logging_nan_inf_filter", "losses are logged as they are; see `nan_guard`"),
    fine("log_level", "progress and results are always printed"),
    fine("log_level_replica", "one process"),
    fine("log_on_each_node", "one machine"),
    fine("save_on_each_node", "one machine"),
    fine("save_safetensors", "weights are always safetensors"),
    fine("run_name", "`output_dir` names the run"),
    fine("project", "`output_dir` names the run"),
    fine("include_num_input_tokens_seen", "tokens are always counted"),
    fine("include_tokens_per_second", "tokens per second are always shown"),
    fine("include_effective_tokens_per_second", "tokens per second are always shown"),
    fine("include_for_metrics", "evaluation gives loss and perplexity"),
    fine("batch_eval_metrics", "evaluation adds up batch by batch"),
    fine("prediction_loss_only", "evaluation gives loss and perplexity"),
    fine("eval_accumulation_steps", "evaluation adds up batch by batch"),
    fine("eval_do_concat_batches", "evaluation adds up batch by batch"),
    fine("eval_use_gather_object", "one process"),
    fine("use_cache", "training keeps no key-value cache"),
    fine("debug", "made for other hardware"),
    fine("skip_memory_metrics", "memory is always accounted for"),
    fine("enable_jit_checkpoint", "Ctrl-C and SIGTERM always save"),
    fine("restore_callback_states_from_checkpoint", "resuming restores everything"),
    fine("sortish_sampler", "the order is a permutation of all samples"),
    fine("hub_private_repo", "nothing is uploaded"),
    fine("hub_strategy", "nothing is uploaded"),
    fine("hub_always_push", "nothing is uploaded"),
    fine("hub_revision", "nothing is uploaded"),
    fine("trackio_space_id", "nothing is uploaded"),
    fine("export_device", "merging runs on the CPU"),
    fine("export_quantization_dataset", "only acts with `export_quantization_bit`"),
    fine("export_quantization_nsamples", "only acts with `export_quantization_bit`"),
    fine("export_quantization_maxlen", "only acts with `export_quantization_bit`"),
];

/// What LlamaFactory's key `key` is here.
pub(crate) enum Foreign {
    /// Refused unless neutral.
    Unsupported {
        /// Values under which it asks for nothing.
        neutral: &'static [&'static str],
        /// What to do instead.
        instead: &'static str,
    },
    /// Accepted with a note.
    Harmless(&'static str),
}

/// Looks a key up in the three tables.
pub(crate) fn look_up(key: &str) -> Option<Foreign> {
    if let Some(h) = HARMLESS.iter().find(|h| h.key == key) {
        return Some(Foreign::Harmless(h.why));
    }
    if let Some(u) = UNSUPPORTED.iter().find(|u| u.key == key) {
        return Some(Foreign::Unsupported { neutral: u.neutral, instead: u.instead });
    }
    let (_, instead) = FAMILIES.iter().find(|(prefix, _)| key.starts_with(prefix))?;
    Some(Foreign::Unsupported { neutral: &[], instead })
}
