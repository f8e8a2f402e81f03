//! `config.json` of qwen2.

use crate::config::Reader;
use crate::{ModelConfig, Result};

pub(crate) fn read(r: &Reader<'_>) -> Result<ModelConfig> {
    let c = r.decoder()?;
    Ok(ModelConfig { qkv_bias: true, windows: r.qwen_windows(c.num_hidden_layers)?, ..c })
}
