//! Which model: files to start from, or an architecture to start without.

use std::path::PathBuf;

use crate::schema::{choice, section};
use crate::value::RawMap;

choice! {
    /// The storage type of the weights while generating.
    pub enum InferDtype {
        /// As `config.json` says.
        Auto = "auto",
        /// 32 bits.
        Float32 = "float32" | "fp32" | "f32",
        /// 16 bits, the exponent of f32.
        Bfloat16 = "bfloat16" | "bf16",
    }
    refused {
        "float16" | "fp16" | "f16" => "write `bfloat16` (same memory, wider range) or `float32`",
    }
}

section! {
    /// Which model.
    pub struct ModelConfig, "model" {
        /// Folder with `config.json`, `*.safetensors` and `tokenizer.json`. Nothing is ever downloaded: fetch a model
        /// first, for example with `hf download Qwen/Qwen3-0.6B --local-dir qwen3-0.6b`.
        pub model_name_or_path: Option<String> = None,
        /// Folder (or folders, between commas) of PEFT adapters to put on the model, in that order.
        pub adapter_name_or_path: Vec<PathBuf> = vec![],
        /// Start from random weights instead of trained ones. The architecture comes from `model:`, `shape`,
        /// `config_name_or_path` or, as in LlamaFactory, the `config.json` of `model_name_or_path`.
        pub train_from_scratch: bool = false,
        /// The architecture in place: a map with the keys of a Hugging Face `config.json`. Needs
        /// `train_from_scratch: true`.
        pub model: Option<RawMap> = None,
        /// The architecture by name: one of the built-in shapes. Needs `train_from_scratch: true`.
        pub shape: Option<String> = None,
        /// A `config.json`, or a folder that holds one: the architecture without its weights. Needs
        /// `train_from_scratch: true`.
        pub config_name_or_path: Option<PathBuf> = None,
        /// A `tokenizer.json`, or a folder that holds one, where it is not the one of `model_name_or_path`.
        pub tokenizer_name_or_path: Option<PathBuf> = None,
        /// Storage type of the weights while generating: `auto`, `float32` or `bfloat16`.
        pub infer_dtype: InferDtype = InferDtype::Auto,
        /// `true` turns recompute off, whatever the plan says.
        pub disable_gradient_checkpointing: bool = false,
    }
}
