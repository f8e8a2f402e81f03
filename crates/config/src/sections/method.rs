//! What is trained, and how much of it.

use crate::schema::{choice, section};

choice! {
    /// The kind of training data and loss.
    pub enum Stage {
        /// Pre-training: every token of plain text counts.
        Pt = "pt",
        /// Supervised fine-tuning: the answers count.
        Sft = "sft",
    }
    refused {
        "rm" | "ppo" | "dpo" | "kto" => "use `pt` or `sft`: preference and reward training are not there yet",
    }
}

choice! {
    /// Which weights are trained.
    pub enum FinetuningType {
        /// Low-rank adapters beside frozen weights.
        Lora = "lora",
        /// Some layers, the rest frozen.
        Freeze = "freeze",
        /// All weights.
        Full = "full",
    }
    refused {
        "oft" => "use `lora`: orthogonal fine-tuning is not supported",
    }
}

section! {
    /// What is trained.
    pub struct MethodConfig, "method" {
        /// `pt` (plain text) or `sft` (prompts and answers).
        pub stage: Stage = Stage::Sft,
        /// LlamaFactory's switch between training and evaluation. Here the verb says it (`phalanx train`,
        /// `phalanx eval`); a file with `do_train: false` is refused by `train`.
        pub do_train: bool = true,
        /// Evaluate once more when training is over.
        pub do_eval: bool = false,
        /// `lora`, `freeze` or `full`.
        pub finetuning_type: FinetuningType = FinetuningType::Lora,
        /// For `freeze`: train the last n layers (n > 0) or the first -n (n < 0).
        pub freeze_trainable_layers: i64 = 2,
        /// For `freeze`: the modules of those layers that are trained, by name (`mlp`, `self_attn`), or `all`.
        pub freeze_trainable_modules: Vec<String> = vec!["all".into()],
        /// For `freeze`: modules outside the layers that are trained as well (`embed_tokens`, `norm`, `lm_head`).
        pub freeze_extra_modules: Vec<String> = vec![],
        /// Rank of the adapters.
        pub lora_rank: usize = 8,
        /// Scale of the adapters: their output is multiplied by `lora_alpha / lora_rank`. Twice the rank if left out.
        pub lora_alpha: Option<f64> = None,
        /// Share of the adapters' inputs that is dropped while training.
        pub lora_dropout: f64 = 0.0,
        /// Modules that get an adapter: `all` (every linear layer but the output projection), names between commas
        /// (`q_proj,v_proj`), or patterns (`model.layers.{0-3}.mlp.*`).
        pub lora_target: Vec<String> = vec!["all".into()],
        /// Scale by `lora_alpha / sqrt(lora_rank)` instead (rank-stabilised LoRA, arXiv:2312.03732).
        pub use_rslora: bool = false,
        /// Modules trained in full beside the adapters and saved with them (`embed_tokens,lm_head`).
        pub additional_target: Vec<String> = vec![],
        /// With `adapter_name_or_path`: merge what is there and train a new adapter, instead of going on with the last.
        pub create_new_adapter: bool = false,
    }
}

impl MethodConfig {
    /// `lora_alpha`, or twice the rank.
    pub fn lora_alpha(&self) -> f64 {
        self.lora_alpha.unwrap_or(2.0 * self.lora_rank as f64)
    }
}
