//! Where time goes: every kernel notes what it did, and how long it took, with the [`Profiler`] of its device.
//!
//! A profiler is a value of the [`Device`](crate::Device), as threads and buffers are, so each rank has its own and nothing is global. It
//! is off until somebody starts it; a kernel then costs one relaxed load of an atomic more, and its costs are not even counted up.
//!
//! Four kinds of span make up a recording, each nested in others of the same thread:
//!
//! | kind | made by | what it is for |
//! |---|---|---|
//! | region | [`Profiler::region`] | what is measured: a training step. Only what happens inside goes into the totals |
//! | phase | [`Profiler::phase`] | a part of a region, as forward, backward, optimizer, data |
//! | scope | [`Profiler::scope`] | a module or an operation, for the trace alone |
//! | kernel | [`Profiler::kernel`] | a kernel with what it costs |
//!
//! Workers of the thread team record nothing: the calling thread waits for them, so its span is the kernel's time. A kernel inside a
//! kernel is seen in the trace and counted once, as the outer one.
//!
//! Memory is bounded: the trace keeps the first [`MOST_EVENTS`] spans, and says how many came after. The totals go on.
//!
//! ```
//! use phalanx_kernels::{Device, elementwise};
//! let dev = Device::new(1);
//! let (a, mut out) = ([1f32; 100], [0f32; 100]);
//! dev.profiler().start(0);
//! {
//!     let _step = dev.profiler().region("step");
//!     elementwise::add(&dev, &a, &a, &mut out)?;
//! }
//! let recording = dev.profiler().stop().unwrap();
//! assert_eq!((recording.kernels[0].name, recording.kernels[0].flops), ("add", 100.0));
//! # Ok::<(), phalanx_kernels::KernelError>(())
//! ```

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::Instant;

use crate::Mat;
use crate::gemm::Arithmetic;
use crate::gemm::prepared::Form;

#[cfg(test)]
mod tests;

/// Spans that a trace keeps at most: about 30 MB.
pub const MOST_EVENTS: usize = 200_000;

/// Different shapes that the totals tell apart at most; from then on products that differ only in their tokens count as one.
const MOST_SHAPES: usize = 2_000;

/// What a kernel has to do, whatever way it does it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Arithmetic: a multiply-add counts as two, an exponential or a root as one. Attention counts the keys that each query sees.
    pub flops: f64,
    /// Bytes that must be moved if nothing is cached: each operand read once, each result written once (a sum that goes on: both).
    pub bytes: f64,
    /// The form of the call.
    pub shape: Shape,
}

/// The form of a call, as far as a table tells calls apart by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Not told apart.
    #[default]
    Any,
    /// A product M × N over K.
    Product {
        /// Rows; `None` where products that differ in it are taken together.
        m: Option<usize>,
        /// Columns.
        n: usize,
        /// Length of the sums; `None` as for `m`.
        k: Option<usize>,
        /// Whether A is bf16 and whether B is; f32 otherwise.
        bf16: (bool, bool),
        /// How exact it must be.
        arithmetic: Arithmetic,
    },
    /// A product with weights that are laid out for generation.
    Prepared {
        /// Rows; `None` where products that differ in it are taken together.
        m: Option<usize>,
        /// Columns, of all weights that share the rows.
        n: usize,
        /// Length of the sums.
        k: usize,
        /// How the weights are stored.
        form: Form,
    },
    /// Attention of so many query heads, key/value heads, and values a head.
    Heads(usize, usize, usize),
}

impl Shape {
    /// Without the number of tokens, which differs from batch to batch: rows of a product, or for the gradient of a weight (`tn`) the
    /// length of its sums.
    #[must_use]
    pub fn of_any_tokens(self, kernel: &str) -> Shape {
        match self {
            Shape::Product { m, n, bf16, arithmetic, .. } if kernel == WGRAD => {
                Shape::Product { m, n, k: None, bf16, arithmetic }
            }
            Shape::Product { n, k, bf16, arithmetic, .. } => Shape::Product { m: None, n, k, bf16, arithmetic },
            Shape::Prepared { n, k, form, .. } => Shape::Prepared { m: None, n, k, form },
            other => other,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |x: Option<usize>| x.map_or("*".to_owned(), |x| x.to_string());
        let text = match *self {
            Shape::Any => String::new(),
            Shape::Prepared { m, n, k, form } => format!("{}x{n}x{k} {form}, laid out", size(m)),
            Shape::Heads(heads, kv_heads, dim) => format!("{heads}/{kv_heads} heads of {dim}"),
            Shape::Product { m, n, k, bf16: (a, b), arithmetic } => {
                let types = match (a, b) {
                    (false, false) => "f32",
                    (true, true) => "bf16",
                    (false, true) => "f32·bf16",
                    (true, false) => "bf16·f32",
                };
                let exactness = if arithmetic == Arithmetic::F32 { String::new() } else { format!(" as {arithmetic}") };
                format!("{}x{n}x{} {types}{exactness}", size(m), size(k))
            }
        };
        f.pad(&text)
    }
}

/// Name of a product x·Wᵀ: a linear layer forward.
pub const FORWARD: &str = "gemm forward";
/// Name of a product dy·W: the gradient of a linear layer's input.
pub const DGRAD: &str = "gemm dgrad";
/// Name of a product dyᵀ·x: the gradient of a linear layer's weight.
pub const WGRAD: &str = "gemm wgrad";

/// What kind a span is; see the [module](self).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// What is measured.
    Region,
    /// A part of a region.
    Phase,
    /// A module or an operation.
    Scope,
    /// A kernel.
    Kernel(Cost),
}

/// A span of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Its kind.
    pub kind: Kind,
    /// Number of the thread, in the order in which they appeared.
    pub thread: usize,
    /// Nanoseconds from the start of the recording.
    pub start: u64,
    /// Nanoseconds it took.
    pub took: u64,
}

/// All calls of one kernel with one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTotal {
    /// The kernel.
    pub name: &'static str,
    /// The shape of its calls.
    pub shape: Shape,
    /// Number of calls.
    pub calls: u64,
    /// Nanoseconds of all calls.
    pub took: u64,
    /// Arithmetic of all calls.
    pub flops: f64,
    /// Bytes of all calls.
    pub bytes: f64,
}

/// All spans of a region or of a phase inside regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanTotal {
    /// Its name.
    pub name: Cow<'static, str>,
    /// How many there were.
    pub calls: u64,
    /// Nanoseconds in all.
    pub took: u64,
}

/// What was recorded between start and stop.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// The rank.
    pub rank: usize,
    /// Spans in the order in which they began; those of a thread are properly nested.
    pub events: Vec<Event>,
    /// Spans that [`MOST_EVENTS`] left no room for.
    pub cut: u64,
    /// Kernels inside regions, in the order in which they appeared.
    pub kernels: Vec<KernelTotal>,
    /// Regions.
    pub regions: Vec<SpanTotal>,
    /// Phases inside regions; a phase inside a phase is not counted.
    pub phases: Vec<SpanTotal>,
}

/// Records what the kernels of a device do, while it is on. Clones are the same profiler.
#[derive(Clone, Default)]
pub struct Profiler(Arc<Inner>);

#[derive(Default)]
struct Inner {
    on: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When the recording began; `None` when there is none.
    began: Option<Instant>,
    /// Tells spans apart, also those of an earlier recording.
    next: u64,
    open: Vec<Open>,
    threads: Vec<ThreadId>,
    recording: Recording,
}

/// A span that has begun.
struct Open {
    id: u64,
    thread: usize,
    name: Cow<'static, str>,
    kind: Kind,
    /// Its place in the trace, if there was room.
    event: Option<usize>,
    start: u64,
    /// Whether its time goes into the totals.
    counts: bool,
}

impl Profiler {
    /// Begins a recording, which throws away one that is under way.
    pub fn start(&self, rank: usize) {
        let mut state = self.state();
        let next = state.next;
        *state = State {
            began: Some(Instant::now()),
            next,
            recording: Recording { rank, ..Recording::default() },
            ..State::default()
        };
        self.0.on.store(true, Ordering::Relaxed);
    }

    /// Ends the recording and gives it; `None` if there was none. Spans still open end here.
    pub fn stop(&self) -> Option<Recording> {
        self.0.on.store(false, Ordering::Relaxed);
        let mut state = self.state();
        let now = state.now()?;
        while let Some(id) = state.open.last().map(|o| o.id) {
            state.close(id, now);
        }
        state.began = None;
        Some(std::mem::take(&mut state.recording))
    }

    /// Records no more; [`Profiler::stop`] still gives what there is.
    pub fn pause(&self) {
        self.0.on.store(false, Ordering::Relaxed);
    }

    /// Whether it records.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.0.on.load(Ordering::Relaxed)
    }

    /// Something that is measured, such as a training step, until the span is dropped.
    #[inline]
    pub fn region(&self, name: &'static str) -> Span {
        if self.is_on() { self.open(name.into(), Kind::Region) } else { Span(None) }
    }

    /// A part of a region.
    #[inline]
    pub fn phase(&self, name: &'static str) -> Span {
        if self.is_on() { self.open(name.into(), Kind::Phase) } else { Span(None) }
    }

    /// A module or an operation; its name is made only if it is recorded.
    #[inline]
    pub fn scope(&self, name: impl FnOnce() -> String) -> Span {
        if self.is_on() { self.open(name().into(), Kind::Scope) } else { Span(None) }
    }

    /// A kernel; its cost is counted up only if it is recorded.
    #[inline]
    pub fn kernel(&self, name: &'static str, cost: impl FnOnce() -> Cost) -> Span {
        if self.is_on() { self.open(name.into(), Kind::Kernel(cost())) } else { Span(None) }
    }

    #[cold]
    fn open(&self, name: Cow<'static, str>, kind: Kind) -> Span {
        let id = self.state().open(name, kind);
        Span(id.map(|id| (self.clone(), id)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl State {
    /// Nanoseconds since the recording began.
    fn now(&self) -> Option<u64> {
        self.began.map(|began| began.elapsed().as_nanos() as u64)
    }

    fn open(&mut self, name: Cow<'static, str>, kind: Kind) -> Option<u64> {
        self.began?;
        let me = std::thread::current().id();
        let thread = self.threads.iter().position(|t| *t == me).unwrap_or_else(|| {
            self.threads.push(me);
            self.threads.len() - 1
        });
        let around = || self.open.iter().filter(|o| o.thread == thread);
        let in_region = around().any(|o| o.kind == Kind::Region);
        let counts = match kind {
            Kind::Region => !in_region,
            Kind::Phase => in_region && !around().any(|o| o.kind == Kind::Phase),
            Kind::Scope => false,
            Kind::Kernel(_) => in_region && !around().any(|o| matches!(o.kind, Kind::Kernel(_))),
        };
        let event = (self.recording.events.len() < MOST_EVENTS).then_some(self.recording.events.len());
        self.next += 1;
        // Last, so that the time of all this is not the span's.
        let start = self.now()?;
        match event {
            Some(_) => self.recording.events.push(Event { name: name.clone(), kind, thread, start, took: 0 }),
            None => self.recording.cut += 1,
        }
        self.open.push(Open { id: self.next, thread, name, kind, event, start, counts });
        Some(self.next)
    }

    /// Ends a span; one that is not open any more belongs to an earlier recording.
    fn close(&mut self, id: u64, now: u64) {
        let Some(at) = self.open.iter().rposition(|o| o.id == id) else { return };
        let o = self.open.remove(at);
        let took = now.saturating_sub(o.start);
        if let Some(event) = o.event {
            self.recording.events[event].took = took;
        }
        if !o.counts {
            return;
        }
        match o.kind {
            Kind::Scope => {}
            Kind::Region => add(&mut self.recording.regions, o.name, took),
            Kind::Phase => add(&mut self.recording.phases, o.name, took),
            // A kernel's name is always borrowed.
            Kind::Kernel(cost) => {
                if let Cow::Borrowed(name) = o.name {
                    self.recording.add(name, cost, took);
                }
            }
        }
    }
}

fn add(totals: &mut Vec<SpanTotal>, name: Cow<'static, str>, took: u64) {
    match totals.iter_mut().find(|t| t.name == name) {
        Some(t) => (t.calls, t.took) = (t.calls + 1, t.took + took),
        None => totals.push(SpanTotal { name, calls: 1, took }),
    }
}

impl Recording {
    fn add(&mut self, name: &'static str, cost: Cost, took: u64) {
        let shape = if self.kernels.len() < MOST_SHAPES { cost.shape } else { cost.shape.of_any_tokens(name) };
        let known = self.kernels.iter().position(|k| k.shape == shape && k.name == name);
        let at = known.unwrap_or_else(|| {
            self.kernels.push(KernelTotal { name, shape, calls: 0, took: 0, flops: 0.0, bytes: 0.0 });
            self.kernels.len() - 1
        });
        let k = &mut self.kernels[at];
        k.calls += 1;
        k.took += took;
        k.flops += cost.flops;
        k.bytes += cost.bytes;
    }
}

/// A span under way: it ends when this is dropped.
#[must_use = "the span ends when this is dropped"]
pub struct Span(Option<(Profiler, u64)>);

impl Span {
    /// Whether it is recorded.
    pub fn is_recorded(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if let Some((profiler, id)) = self.0.take() {
            let mut state = profiler.state();
            if let Some(now) = state.now() {
                state.close(id, now);
            }
        }
    }
}

/// The cost of a kernel that handles `elements` values, with `flops` operations and `bytes` for each.
pub(crate) fn per_element(elements: usize, flops: usize, bytes: usize) -> Cost {
    Cost { flops: elements as f64 * flops as f64, bytes: elements as f64 * bytes as f64, shape: Shape::Any }
}

/// Bytes of an operand.
pub(crate) fn bytes_of(x: &Mat<'_>) -> f64 {
    x.len() as f64 * if matches!(x, Mat::F32(_)) { 4.0 } else { 2.0 }
}
