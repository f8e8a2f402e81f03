//! `config.json` of mistral.

use crate::config::Reader;
use crate::{ModelConfig, Result};

pub(crate) fn read(r: &Reader<'_>) -> Result<ModelConfig> {
    let c = r.decoder()?;
    let window = r.window()?;
    Ok(ModelConfig { windows: vec![window; c.num_hidden_layers], ..c })
}
