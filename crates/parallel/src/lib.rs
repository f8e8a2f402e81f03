//! The plan: what is done to a model without changing its code.
//!
//! # Why a plan
//! Recompute, freezing, adapters, precision — and, as they come, sharding and the other parallel forms — are settings of *named
//! modules*, not code in model files. A [`Plan`] names modules by pattern; [`resolve`] turns (model, plan) into settings for each
//! module or into a list of [`Conflict`]s, each naming both features and the mend. Resolving is pure: no memory, no weights. What
//! may go together stands in one table ([`compatibility`]), from which the documentation is made.
//!
//! The order in which transforms apply is fixed: freeze → adapters → precision → recompute. On a mesh ([`Distributed`]) a parameter is cut in a fixed
//! order too: [`tensor`] says which slice of it a rank works with, then [`fsdp`] which rows of that slice it keeps.
//!
//! ```
//! use phalanx_parallel::{Plan, Site, resolve};
//! let model = [
//!     Site::new("model.layers.0", "block", &[]),
//!     Site::new("model.layers.0.mlp", "mlp", &[]),
//!     Site::new("model.layers.0.mlp.up_proj", "linear", &["model.layers.0.mlp.up_proj.weight"]),
//! ];
//! let plan: Plan = serde_json::from_str(r#"{"recompute": "model.layers.{*}"}"#)?;
//! let resolved = resolve(&model, &plan).map_err(|c| c[0].to_string())?;
//! assert!(resolved.recompute("model.layers.0"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compatibility;
pub mod context;
mod distributed;
pub mod expert;
pub mod fsdp;
mod pattern;
pub mod pipeline;
mod plan;
mod resolve;
mod show;
mod stages;
pub mod tensor;

pub use compatibility::{Feature, Rule, Verdict, compatibility, compatibility_markdown};
pub use distributed::{Distributed, DistributedError, ParallelPlan};
pub use pattern::{Pattern, PatternError};
pub use plan::{Exactness, Plan, Precision};
pub use resolve::{Conflict, Site, resolve, sites};
pub use show::show;
pub use stages::{PipelinePlan, Stages};
