//! Modules, parameters, the execution context and the layers that models are written with.
//!
//! # Why models stay plain
//! A model file reads like a textbook on one device: named modules, called one after another. What varies from run to run —
//! which parameters train, which blocks are recomputed, which low-rank adapters apply, where the keys of earlier tokens are — comes
//! through one argument, the [`Cx`]. Entering a named scope ([`Cx::call`]) is the one place where a resolved plan acts; the scope
//! path is the Hugging Face parameter prefix, so a pattern in a plan, a tensor in a file and a line in an error message are one name.
//!
//! Values are `[T, …]`: the T tokens of all sequences of a batch, one sequence after another, without padding ([`Batch`] says where
//! each begins). A batch of prompts, a pack of documents and one token a sequence in generation are the same thing to a layer.
//!
//! ```
//! use std::sync::Arc;
//! use phalanx_nn::{Batch, Cx, Env, Module, Parameter, layers::Linear};
//! use phalanx_tensor::{Category, Runtime};
//! let rt = Runtime::new(1);
//! let w = Parameter::new("fc.weight", &[2, 3]);
//! w.set(rt.from_f32(&[2, 3], &[1., 0., 0., 0., 1., 1.], Category::Weights)?)?;
//! let fc = Arc::new(Linear::new(w, None));
//! let env = Env::new(rt.clone(), Batch::causal(&[1]));
//! let x = rt.from_f32(&[1, 3], &[4., 5., 6.], Category::Activations)?;
//! let y = Cx::eval(&env).call("fc", &fc, x)?;
//! assert_eq!(y.f32()?, [4., 11.]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adapter;
mod batch;
mod context;
mod cx;
mod delayed;
mod error;
mod hooks;
pub mod init;
pub mod layers;
mod module;
mod parameter;
mod placement;
mod recompute;
mod routing;
mod settings;

pub use adapter::{AdapterSet, LowRank};
pub use batch::{Batch, KvCache};
pub use context::{ContextAttention, ContextParallel, ContextShare};
pub use cx::{Cx, Env};
pub use delayed::DelayedScales;
pub use error::{NnError, Result};
pub use hooks::ScopeHooks;
pub use module::{Describe, Module, Visitor, Walk, parameters, walk};
pub use parameter::Parameter;
pub use placement::{Placement, chunk};
pub use routing::{
    BalanceLayers, BalanceLoss, BalancePass, BalanceScope, BalanceWindow, ExpertCapacity, LayerLoad, RouterLog,
    RouterStep, Routing, update_bias,
};
pub use settings::{Arithmetic, ModuleSettings, Recipe, ResolvedPlan};
