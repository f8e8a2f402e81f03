//! DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts beside a shared one, chosen by sigmoids with a bias among the best groups.
//!
//! Not built: the blocks for predicting further tokens (`num_nextn_predict_layers`). A file may hold them; they are passed over, as
//! `transformers` does, and are not written again.

pub(crate) mod config;
mod model;

pub use config::LatentConfig;
pub use model::DeepseekV3ForCausalLm;
