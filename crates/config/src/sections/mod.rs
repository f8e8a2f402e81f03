//! The keys, one file a section. A default is the one of LlamaFactory (or of transformers, which LlamaFactory takes it
//! from) wherever the key is theirs, so that a file means the same here and there.

mod data;
mod experts;
mod export;
mod generation;
mod method;
mod model;
mod run;
mod train;

pub use data::{DataConfig, MixStrategy, RewrittenHistory, TextUnit};
pub use experts::{ExpertsConfig, MoeDrop, MoeLayers, MoeScope};
pub use export::{ExportConfig, ExportDtype};
pub use generation::GenerationConfig;
pub use method::{FinetuningType, MethodConfig, Stage};
pub use model::{InferDtype, ModelConfig};
pub use run::{MAX_THREADS, RunConfig};
pub use train::{
    DecayType, LogTarget, LrSchedulerKwargs, LrSchedulerType, Optim, ResumeFrom, Strategy, TrainConfig, WarmupType,
};
