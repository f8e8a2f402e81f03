//! The configuration of a run: one flat YAML file, checked before anything is allocated.
//!
//! # Why it is the way it is
//!
//! **The keys are LlamaFactory's.** Many people have such files and know the names. A key here means what it means
//! there and has the default it has there, so a file runs unchanged, or the first thing it prints says which line
//! stands in the way and what to write instead. So there are three classes of key:
//!
//! * *supported*: declared in [`sections`], one file a section, each with type, default and explanation in one place;
//! * *known, not supported* ([`foreign::UNSUPPORTED`], [`foreign::FAMILIES`]): they would change the result, so they
//!   are refused unless their value asks for nothing (`use_dora: false`);
//! * *known, without effect here* ([`foreign::HARMLESS`]): they say how another program gets to the same result
//!   (`ddp_timeout`, `flash_attn`); accepted, each with a [`Note`].
//!
//! Every other key is refused with the nearest known one.
//!
//! **Scalars stay text until a declared type reads them** ([`node`]). YAML 1.1 reads `1e-4` as a string and `no` as a
//! boolean; here `learning_rate: 1e-4` is a number and `eval_strategy: no` a word, because their keys say so.
//!
//! **Every value has an origin** ([`Origin`]): default, file and line, or command line. Messages and
//! [`Config::describe`] show it, so nobody has to guess why a value is what it is.
//!
//! **All problems at once.** Loading collects what is wrong with every key, then what is wrong between keys
//! ([`check`]): a file is mended once. What only matters for one verb is asked by [`Config::check_for`].
//!
//! # Example
//!
//! ```
//! use phalanx_config::{Config, FinetuningType, Origin, parse_overrides};
//!
//! let text = "model_name_or_path: models/smollm2\ndataset: gsm8k\nlearning_rate: 1e-4\nbf16: true\n";
//! let overrides = parse_overrides(&["finetuning_type=full", "--max_steps", "20"])?;
//! let config = Config::parse(text, "run.yaml", &overrides)?;
//!
//! assert_eq!(config.train.learning_rate, 1e-4);
//! assert_eq!(config.train.max_steps(), Some(20));
//! assert_eq!(config.method.finetuning_type, FinetuningType::Full);
//! assert_eq!(config.origin("max_steps"), Origin::Override);
//! assert_eq!(config.origin("learning_rate").to_string(), "run.yaml:3");
//!
//! let error = Config::parse("learning_rat: 1e-4\n", "run.yaml", &[]).unwrap_err().to_string();
//! assert!(error.contains("run.yaml:1: `learning_rat`: unknown key"));
//! assert!(error.contains("did you mean `learning_rate`?"));
//! # Ok::<(), phalanx_config::ConfigError>(())
//! ```

pub mod check;
mod config;
mod error;
pub mod foreign;
mod nearest;
pub mod node;
mod overrides;
mod page;
pub mod schema;
pub mod sections;
pub mod value;
pub mod yaml;

pub use check::Purpose;
pub use config::{Config, Described, Note};
pub use error::{ConfigError, Origin, Problem, Problems, Result};
pub use nearest::nearest;
pub use node::{Entry, Node, Value};
pub use overrides::{Override, parse_overrides};
pub use page::reference_page;
pub use schema::KeyInfo;
pub use sections::{
    DataConfig, DecayType, ExpertsConfig, ExportConfig, ExportDtype, FinetuningType, GenerationConfig, InferDtype,
    LogTarget, LrSchedulerKwargs, LrSchedulerType, MAX_THREADS, MethodConfig, MixStrategy, ModelConfig, MoeDrop,
    MoeLayers, MoeScope, Optim, ResumeFrom, RewrittenHistory, RunConfig, Stage, Strategy, TextUnit, TrainConfig,
    WarmupType,
};
pub use value::{MapOrPath, RawMap, Steps, Texts};
pub use yaml::Document;
