//! `config.json` of llama.

use crate::config::Reader;
use crate::{ModelConfig, Result};

pub(crate) fn read(r: &Reader<'_>) -> Result<ModelConfig> {
    let c = r.decoder()?;
    let bias = r.bool("attention_bias", false)?;
    Ok(ModelConfig { qkv_bias: bias, o_bias: bias, mlp_bias: r.bool("mlp_bias", false)?, ..c })
}
