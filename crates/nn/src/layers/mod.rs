//! Layers, one file each.

mod attention;
mod embedding;
mod experts;
mod head;
mod latent_attention;
mod linear;
mod mlp;
mod moe;
mod norm;
mod rope;
mod router;

pub use attention::{Attention, AttentionConfig};
pub use embedding::Embedding;
pub use experts::Experts;
pub use head::cross_entropy;
pub use latent_attention::{LatentAttention, LatentAttentionConfig};
pub use linear::Linear;
pub use mlp::{GatedMlp, MlpConfig};
pub use moe::{FeedForward, MoeConfig, MoeMlp};
pub use norm::{LayerNorm, RmsNorm};
pub use rope::{RopeConfig, RopeError, RopeScaling, RopeTables};
pub use router::{Choice, Router};
