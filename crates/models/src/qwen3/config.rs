//! `config.json` of qwen3.

use crate::config::Reader;
use crate::{ModelConfig, Result};

pub(crate) fn read(r: &Reader<'_>) -> Result<ModelConfig> {
    let c = r.decoder()?;
    let bias = r.bool("attention_bias", false)?;
    let windows = r.qwen_windows(c.num_hidden_layers)?;
    Ok(ModelConfig { qkv_bias: bias, o_bias: bias, qk_norm: true, windows, ..c })
}
