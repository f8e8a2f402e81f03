//! Gathering and reducing, unit by unit.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use phalanx_comm::{Communicator, GatherTensors, Pending, ReduceOp, ScatterTensors};
use phalanx_kernels::elementwise;
use phalanx_nn::{Cx, NnError, Parameter, Result, chunk};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::{Reshard, Unit};

/// A unit at work.
struct Live {
    unit: Unit,
    /// Passes that need its parameters now.
    holds: usize,
    /// Gathers on their way.
    arriving: Option<Pending<Vec<GatherTensors>>>,
}

struct State {
    units: Vec<Live>,
    /// Sums on their way to the kept gradients: parameters, and their shards.
    reducing: Option<Reducing>,
}

/// Parameters, and the sums of their gradients on the way.
type Reducing = (Vec<Parameter>, Pending<Vec<ScatterTensors>>);

/// The parameters of a model over the ranks of a group.
pub struct Fsdp {
    group: Communicator,
    reshard: Reshard,
    prefetch: usize,
    by_path: HashMap<String, usize>,
    state: Mutex<State>,
    /// Whether backward reduces gradients.
    sync: AtomicBool,
    /// Nanoseconds in which computing stood still for communication.
    blocked: AtomicU64,
}

fn failed(e: impl std::fmt::Display) -> NnError {
    NnError::Parallel(e.to_string())
}

impl Fsdp {
    /// Takes charge of units whose parameters have been placed ([`chunk`] of their rows on each rank of `group`). `prefetch`: how many units ahead are
    /// gathered.
    pub fn new(group: Communicator, units: Vec<Unit>, reshard: Reshard, prefetch: usize) -> Fsdp {
        let by_path = units.iter().enumerate().map(|(i, u)| (u.path.clone(), i)).collect();
        let units = units.into_iter().map(|unit| Live { unit, holds: 0, arriving: None }).collect();
        let state = Mutex::new(State { units, reducing: None });
        Fsdp { group, reshard, prefetch, by_path, state, sync: AtomicBool::new(true), blocked: AtomicU64::new(0) }
    }

    /// Whether gradients are reduced in the backward passes from now on, or only accumulate. ([`Reshard::AfterStep`] reduces once a step in
    /// any case if the caller turns this on for the last micro-batch only.)
    pub fn reduce_gradients(&self, yes: bool) {
        self.sync.store(yes, Ordering::Relaxed);
    }

    /// When parameters are given back.
    pub fn reshard(&self) -> Reshard {
        self.reshard
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The unit of the module in scope.
    fn unit(&self, path: &str) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// Before a module: its parameters come.
    pub(crate) fn enter(self: &Arc<Self>, cx: &mut Cx) -> Result<()> {
        let Some(i) = self.unit(cx.path()) else { return Ok(()) };
        self.hold(cx.rt(), i, 1)?;
        // On the way back this is where the unit is done with.
        let fsdp = Arc::clone(self);
        if let Some(tape) = cx.tape() {
            tape.mark_after_weights(move |rt| fsdp.backward_done(rt, i).map_err(other));
        }
        Ok(())
    }

    /// After a module: its parameters go, if they are not kept for backward.
    pub(crate) fn leave(self: &Arc<Self>, cx: &mut Cx) -> Result<()> {
        let Some(i) = self.unit(cx.path()) else { return Ok(()) };
        let whole = cx.path().is_empty();
        let Some(tape) = cx.tape() else {
            self.let_go(i);
            return Ok(());
        };
        if !whole && self.reshard == Reshard::AfterForward {
            self.let_go(i);
            let fsdp = Arc::clone(self);
            tape.mark(move |rt| fsdp.hold(rt, i, -1).map_err(other));
        }
        Ok(())
    }

    /// Makes sure that unit `i` is here and stays, and asks for those that come next in direction `step`.
    fn hold(&self, rt: &Runtime, i: usize, step: isize) -> Result<()> {
        let mut state = self.lock();
        self.ask(rt, &mut state.units[i])?;
        if let Some(pending) = state.units[i].arriving.take() {
            let arrived = self.wait(pending)?;
            for (p, g) in sharded(&state.units[i].unit).zip(arrived) {
                p.gather(g.full)?;
            }
        }
        state.units[i].holds += 1;
        for ahead in 1..=self.prefetch as isize {
            // The unit of the whole pass is first and is here all the time.
            let next = i as isize + step * ahead;
            if next > 0 && (next as usize) < state.units.len() {
                self.ask(rt, &mut state.units[next as usize])?;
            }
        }
        Ok(())
    }

    /// Issues the gather of a unit that is neither here nor on its way.
    fn ask(&self, rt: &Runtime, live: &mut Live) -> Result<()> {
        if live.arriving.is_some() || sharded(&live.unit).all(Parameter::is_gathered) {
            return Ok(());
        }
        let mut items = vec![];
        for p in sharded(&live.unit) {
            let (shard, shape) = (p.kept()?, p.placement().working_shape());
            let full = rt.empty(&shape, shard.dtype(), Category::Weights)?;
            items.push(GatherTensors { shard, counts: counts(&shape, self.group.size()), full });
        }
        live.arriving = Some(self.group.all_gather_async(items));
        Ok(())
    }

    fn let_go(&self, i: usize) {
        let live = &mut self.lock().units[i];
        live.holds = live.holds.saturating_sub(1);
        if live.holds == 0 && self.reshard != Reshard::AfterStep {
            sharded(&live.unit).for_each(|p| drop(p.release()));
        }
    }

    /// Behind the backward of unit `i`: its parameters go, its gradients are reduced.
    fn backward_done(&self, rt: &Runtime, i: usize) -> Result<()> {
        self.let_go(i);
        if self.sync.load(Ordering::Relaxed) { self.reduce(rt, i) } else { Ok(()) }
    }

    fn reduce(&self, rt: &Runtime, i: usize) -> Result<()> {
        let mut state = self.lock();
        let parameters: Vec<Parameter> = sharded(&state.units[i].unit).filter(|p| p.trainable()).cloned().collect();
        if parameters.is_empty() {
            return Ok(());
        }
        let mut items = vec![];
        for p in &parameters {
            let placement = p.placement();
            let shape = placement.working_shape();
            // A rank where nothing reached the parameter takes part all the same.
            let full = match p.grad().take() {
                Some(grad) => grad,
                None => rt.zeros(&shape, Category::Gradients)?,
            };
            let shard = rt.empty(&placement.kept_shape(), DType::F32, Category::Gradients)?;
            items.push(ScatterTensors { full, counts: counts(&shape, self.group.size()), shard });
        }
        // One at a time is on its way, so that full gradients of two units exist at most.
        let before = state.reducing.take();
        let pending = self.group.reduce_scatter_async(ReduceOp::Sum, items);
        state.reducing = Some((parameters, pending));
        drop(state);
        before.map_or(Ok(()), |b| self.settle(rt, b))
    }

    /// Waits for a call, and notes how long.
    fn wait<T>(&self, pending: Pending<T>) -> Result<T> {
        let since = Instant::now();
        let done = pending.wait().map_err(failed);
        self.blocked.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done
    }

    /// Time in which computing has stood still for communication, since the start.
    pub fn blocked(&self) -> Duration {
        Duration::from_nanos(self.blocked.load(Ordering::Relaxed))
    }

    /// Reduces the gradients of all units, the last one first.
    ///
    /// # Errors
    /// If a peer failed or memory runs out.
    pub fn reduce_all(&self, rt: &Runtime) -> Result<()> {
        let units = self.lock().units.len();
        (0..units).rev().try_for_each(|i| self.reduce(rt, i))
    }

    /// After the backward pass of a micro-batch: all sums have arrived.
    ///
    /// # Errors
    /// If a peer failed.
    pub fn finish_backward(&self, rt: &Runtime) -> Result<()> {
        let last = self.lock().reducing.take();
        last.map_or(Ok(()), |b| self.settle(rt, b))
    }

    /// Adds arrived sums to the kept gradients.
    fn settle(&self, rt: &Runtime, (parameters, pending): Reducing) -> Result<()> {
        let arrived = self.wait(pending)?;
        for (p, item) in parameters.iter().zip(arrived) {
            add(rt, p, item.shard)?;
        }
        Ok(())
    }

    /// The parameters have changed: what was gathered is out of date.
    pub fn parameters_changed(&self) {
        for live in &mut self.lock().units {
            live.arriving = None;
            sharded(&live.unit).for_each(|p| drop(p.release()));
        }
    }
}

fn add(rt: &Runtime, p: &Parameter, shard: Tensor) -> Result<()> {
    let slot = p.kept_grad();
    if slot.get().is_none() {
        slot.put(shard);
        return Ok(());
    }
    let shape = shard.shape().to_vec();
    let values = shard.f32()?;
    slot.add(rt, &shape, |sum| elementwise::add_assign(rt.device(), sum, values, 1.0))?;
    Ok(())
}

fn sharded(unit: &Unit) -> impl Iterator<Item = &Parameter> {
    unit.parameters.iter().filter(|p| p.placement().sharded)
}

/// Elements of each rank's rows of a working part.
fn counts(shape: &[usize], ranks: usize) -> Vec<usize> {
    let row: usize = shape[1..].iter().product();
    (0..ranks).map(|r| chunk(shape[0], ranks, r).len() * row).collect()
}

fn other(e: NnError) -> phalanx_autograd::AutogradError {
    phalanx_autograd::AutogradError::Other(e.to_string())
}
