//! The table of families.

use crate::config::Reader;
use crate::deepseek_v3::DeepseekV3ForCausalLm;
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

fn deepseek_v3(config: &ModelConfig) -> Box<dyn CausalLm> {
    Box::new(DeepseekV3ForCausalLm::new(config))
}

/// Every family, by name.
pub fn known_families() -> &'static [Family] {
    &[
        Family { model_type: "deepseek_v3", read: crate::deepseek_v3::config::read, build: deepseek_v3 },
        Family { model_type: "llama", read: crate::llama::config::read, build: llama },
        Family { model_type: "mistral", read: crate::mistral::config::read, build: llama },
        Family { model_type: "qwen2", read: crate::qwen2::config::read, build: llama },
        Family { model_type: "qwen3", read: crate::qwen3::config::read, build: llama },
        Family { model_type: "qwen3_moe", read: crate::qwen3_moe::config::read, build: llama },
    ]
}

/// The family of a `model_type`.
pub fn family(model_type: &str) -> Option<&'static Family> {
    known_families().iter().find(|f| f.model_type == model_type)
}
