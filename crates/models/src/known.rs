//! The table of families.

use crate::config::Reader;
use crate::llama::LlamaForCausalLm;
use crate::{CausalLm, ModelConfig, Result};

/// A family: its `model_type`, how its config is read and how its model is built.
pub struct Family {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    pub(crate) read: fn(&Reader<'_>) -> Result<ModelConfig>,
    pub(crate) build: fn(&ModelConfig) -> Box<dyn CausalLm>,
}

fn llama(config: &ModelConfig) -> Box<dyn CausalLm> {
    Box::new(LlamaForCausalLm::new(config))
}

/// Every family, by name.
pub fn known_families() -> &'static [Family] {
    &[
        Family { model_type: "llama", read: crate::llama::config::read, build: llama },
        Family { model_type: "mistral", read: crate::mistral::config::read, build: llama },
        Family { model_type: "qwen2", read: crate::qwen2::config::read, build: llama },
        Family { model_type: "qwen3", read: crate::qwen3::config::read, build: llama },
    ]
}

/// The family of a `model_type`.
pub fn family(model_type: &str) -> Option<&'static Family> {
    known_families().iter().find(|f| f.model_type == model_type)
}
