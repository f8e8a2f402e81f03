//! Layers, one file each.

mod attention;
mod embedding;
mod head;
mod linear;
mod mlp;
mod norm;
mod rope;

pub use attention::{Attention, AttentionConfig};
pub use embedding::Embedding;
pub use head::cross_entropy;
pub use linear::Linear;
pub use mlp::{GatedMlp, MlpConfig};
pub use norm::{LayerNorm, RmsNorm};
pub use rope::{RopeConfig, RopeError, RopeScaling, RopeTables};
