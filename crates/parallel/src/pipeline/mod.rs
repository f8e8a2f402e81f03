//! Pipeline schedules as data: who computes what, in which order.
//!
//! # Why data
//! A pipeline cuts a model into *stages* and a step into *micro-batches*. Which stage a rank works on next is the whole art: it decides how
//! long ranks wait (the *bubble*), how many activations they hold, and how much they talk. Written as a training loop with conditions on the
//! rank, each such order is a program of its own, hard to check and harder to draw. Here an order is a value: a [`Schedule`] is, for each
//! rank, a list of [`Action`]s. Pure functions make it ([`build()`]), check it ([`validate`]), put the messages in ([`with_communication`]),
//! time it ([`simulate`]) and draw it ([`draw`]); an executor only walks down its rank's list. A new schedule is a new builder, and nothing
//! else changes.
//!
//! # The words
//! * A **stage** is a run of neighbouring layers, numbered from the embedding to the loss. A rank may hold several: its *chunks*. Which rank
//!   holds which stage is a [`Placement`]: in a *loop* (stage `s` on rank `s mod p`) or in a *V* (down and up again, so that the first and the
//!   last stage share a rank).
//! * **F** is forward, **B** backward. B is two halves: **I**, the gradient of the stage's input, which the stage before waits for, and **W**,
//!   the gradient of its weights, which nobody waits for. Zero-bubble schedules run W where they would otherwise wait
//!   (Qi et al. 2023, <https://arxiv.org/abs/2401.10241>). **F⊕B** is a forward and a backward of two micro-batches cut into pieces and
//!   interleaved, so that the messages of one hide behind the products of the other (DeepSeek-V3, <https://arxiv.org/abs/2412.19437>).
//! * `F0.3` is F of stage 0 on micro-batch 3.
//!
//! # What holds for every schedule made here
//! * Each stage sees each micro-batch in exactly one F, one I and one W (or B for both), none before what it needs.
//! * W runs in the order in which I left it (a first-in-first-out queue a rank), and the queue is empty at the end.
//! * In each stage gradients of weights are added up in the order of micro-batches. So all schedules give *the same bits*, and a run may
//!   change its schedule between steps.
//!
//! # Units
//! [`Durations`] are of one *stage*, in any unit of time. Activations are counted in stages held for a micro-batch
//! ([`RankTimeline::peak_stages`]) and in *rank shares* ([`Timeline::peak_activations`]): all layers of a rank for one micro-batch.
//! A stage's activation lives from the start of its F to the end of its W.
//!
//! # Example
//! ```
//! use phalanx_parallel::pipeline::{Durations, ScheduleKind, build, simulate, validate};
//! let ideal = Durations::new(1.0, 1.0, 1.0);
//! let schedule = build(ScheduleKind::OneForwardOneBackward, 4, 8, None)?;
//! assert_eq!(schedule.ranks[3][1].to_string(), "B3.0");
//! validate(&schedule)?;
//! let time = simulate(&schedule, &ideal)?;
//! assert_eq!(time.total, 33.0); // 8 (F+B) and a bubble of 3 (F+B)
//! assert_eq!(time.peak_activations(), [4.0, 3.0, 2.0, 1.0]);
//!
//! // Deferred weight gradients fill two thirds of the bubble.
//! let time = simulate(&build(ScheduleKind::ZeroBubbleH1, 4, 8, None)?, &ideal)?;
//! assert_eq!(time.total, 27.0);
//! # Ok::<(), phalanx_parallel::pipeline::ScheduleError>(())
//! ```

mod action;
mod build;
mod communication;
pub mod draw;
mod error;
mod execution;
mod formulas;
mod layers;
mod placement;
mod schedule;
mod timing;
mod validate;

pub use action::{Action, ActionError, Part};
pub use build::{
    ScheduleKind, build, dual_pipe_v, gpipe, interleaved, one_forward_one_backward, zero_bubble_h1, zero_bubble_v,
};
pub use communication::{Channels, Sends, check_communication, with_communication};
pub use error::ScheduleError;
pub use formulas::{Predicted, predicted};
pub use layers::{LayerSplit, LayoutError, StageLayers, split_layers};
pub use placement::Placement;
pub use schedule::Schedule;
pub use timing::{Durations, RankTimeline, Span, Timeline, ideal_efficiency, simulate};
pub use validate::{Validated, validate};
