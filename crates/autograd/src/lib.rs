//! Reverse-mode differentiation over a tape.
//!
//! # Why a tape that is a value
//! A [`Tape`] belongs to one micro-batch; several may be alive (pipelines), and a recompute region makes a small one of its own in
//! the backward pass. Nothing is global. An operation is a pair: the forward computes and says what it keeps, the
//! [`Function`] it leaves on the tape computes the gradients of its inputs later.
//!
//! * **What is kept is a policy.** A function keeps an input through [`Tape::save`]. A value whose producer left a *recipe* (a norm,
//!   a gated activation: one cheap pass over memory) is not kept at all but rebuilt, bit for bit, when backward asks for it; the
//!   consumers share one rebuilt copy.
//! * **Parameter gradients have their own place.** They do not travel the tape: a function adds them to the parameter's
//!   [`GradSlot`] in place and in f32, so that accumulation over micro-batches costs no extra memory.
//! * **Frozen parts cost nothing.** A call with no recorded input and no trainable parameter leaves nothing on the tape.
//!
//! ```
//! use phalanx_autograd::{Tape, functions};
//! use phalanx_tensor::{Category, Runtime};
//! let rt = Runtime::new(1);
//! let mut tape = Tape::new();
//! let x = tape.input(rt.from_f32(&[1, 2], &[3.0, 4.0], Category::Activations)?);
//! let y = functions::add(&rt, Some(&mut tape), &x, &x)?;
//! let ones = rt.from_f32(&[1, 2], &[1.0, 1.0], Category::Activations)?;
//! let grads = tape.backward(&rt, &y, ones)?;
//! assert_eq!(grads.of(&x).unwrap().f32()?, [2.0, 2.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
pub mod functions;
mod grad_slot;
mod layer_scales;
mod saved;
mod tape;

pub use error::{AutogradError, Result};
pub use grad_slot::GradSlot;
pub use layer_scales::LayerScales;
pub use saved::{Recipe, Saved};
pub use tape::{Deferred, Function, Gradients, Tape, WeightGradients};
