//! The table of families.

use crate::config::Reader;
use crate::{ModelConfig, Result};

/// A family: its `model_type` and how its config is read.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// `architectures[0]` that goes with it.
    pub architecture: &'static str,
    pub(crate) read: fn(&Reader<'_>) -> Result<ModelConfig>,
}

/// Every family, by name.
pub fn known_families() -> &'static [Family] {
    &[
        Family { model_type: "llama", architecture: "LlamaForCausalLM", read: crate::llama::config::read },
        Family { model_type: "mistral", architecture: "MistralForCausalLM", read: crate::mistral::config::read },
        Family { model_type: "qwen2", architecture: "Qwen2ForCausalLM", read: crate::qwen2::config::read },
        Family { model_type: "qwen3", architecture: "Qwen3ForCausalLM", read: crate::qwen3::config::read },
    ]
}

/// The family of a `model_type`.
pub fn family(model_type: &str) -> Option<&'static Family> {
    known_families().iter().find(|f| f.model_type == model_type)
}
