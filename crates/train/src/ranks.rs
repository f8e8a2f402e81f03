//! A training run on several ranks: who does what, and how whole tensors come together where files are written.
//!
//! Every rank runs the same loop over the same sample stream and takes its share of each window; the first one, the *leader*, also writes
//! and talks. Files are those of one rank, with whole tensors under their global names: so a checkpoint of any layout can be gone on with in any
//! other. A tensor is put together only while it is written, one at a time.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use phalanx_comm::{CommOptions, Communicator, World, local_world};
use phalanx_data::Corpus;
use phalanx_nn::{Parameter, Placement};
use phalanx_parallel::Distributed;
use phalanx_report::Step as ProgressStep;
use phalanx_tensor::Tensor;

use crate::job::{Job, Use};
use crate::optimizer::AdamW;
use crate::resume::Start;
use crate::trainer::{Finished, Observer, train_rank};
use crate::{Result, TrainError};

/// Nobody watches a rank that is not the first.
struct Unwatched;

impl Observer for Unwatched {
    fn message(&mut self, _text: &str) {}
    fn step(&mut self, _step: &ProgressStep, _logged: bool) {}
}

/// Trains on `world` ranks. The first rank is the caller's thread, with the caller's job; the others make theirs from its configuration.
pub(crate) fn train(
    world: usize,
    job: &mut Job,
    (corpus, eval): (Corpus, Option<Corpus>),
    start: &Start,
    stop: &AtomicBool,
    watch: &mut dyn Observer,
) -> Result<Finished> {
    let mut comms = local_world(world, &CommOptions::default());
    let first = comms.remove(0);
    let (failure, config) = (first.clone(), job.config.clone());
    // What a rank ends with is told to its peers before it goes, so that none of them waits for it.
    let told = |comm: &Communicator, result: Result<Finished>| {
        if let Err(e) = &result {
            comm.abort(e.to_string());
        }
        result
    };
    let mut results: Vec<Result<Finished>> = std::thread::scope(|scope| {
        let follow = |comm: Communicator| {
            let (config, corpus, eval) = (config.clone(), corpus.clone(), eval.clone());
            std::thread::Builder::new().name(format!("rank-{}", comm.rank())).spawn_scoped(scope, move || {
                let follow = || {
                    let mut job = Job::prepare(config, Use::Train)?;
                    job.place(&comm)?;
                    train_rank(&mut job, corpus, eval, start, stop, &mut Unwatched)
                };
                told(&comm, follow())
            })
        };
        let followers: Vec<_> = comms.into_iter().map(follow).collect();
        let refused = followers.iter().find_map(|f| f.as_ref().err().map(ToString::to_string));
        let own = match refused {
            Some(why) => Err(TrainError::setting("mesh", format!("the system refused a thread for a rank: {why}"))),
            None => job.place(&first).and_then(|()| train_rank(job, corpus.clone(), eval.clone(), start, stop, watch)),
        };
        let mut results = vec![told(&first, own)];
        for handle in followers.into_iter().flatten() {
            let panicked = || TrainError::setting("mesh", "a rank panicked; its message is above");
            results.push(handle.join().unwrap_or_else(|_| Err(panicked())));
        }
        results
    });
    // Where several failed, the first one to fail is what matters; the others only say that it did.
    let culprit = failure.failure().and_then(|f| f.culprit()).filter(|&r| results.get(r).is_some_and(Result::is_err));
    let rank = culprit.or_else(|| results.iter().position(Result::is_err)).unwrap_or(0);
    results.swap_remove(rank).map_err(|error| match rank {
        0 => error,
        rank => TrainError::Rank { layout: format!("mesh {}", job.mesh), rank, error: Box::new(error) },
    })
}

/// Which tensor of a parameter is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The exact value.
    Value,
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
}

const ORDER: [What; 3] = [What::Value, What::ExpAvg, What::ExpAvgSq];
/// Instead of a [`What`]: nothing more is wanted.
const END: u64 = ORDER.len() as u64;

/// A part of a parameter on a rank that answers for it.
struct Part {
    rank: usize,
    at: Vec<Range<usize>>,
}

/// Whole tensors on the leader, from the parts of all ranks.
pub(crate) struct Gathering<'a> {
    world: Communicator,
    optimizer: &'a AdamW,
    parameters: Vec<Parameter>,
    /// For each parameter, the parts that make it up, each once.
    parts: Vec<Vec<Part>>,
}

impl<'a> Gathering<'a> {
    /// Every rank makes one at the same time, for the same parameters.
    pub fn new(d: &Distributed, parameters: Vec<Parameter>, optimizer: &'a AdamW) -> Result<Gathering<'a>> {
        let world: Communicator = (**d.mesh().group::<World>()).clone();
        let mut own: Vec<u64> = vec![];
        for p in &parameters {
            own.push(u64::from(d.counts(p)));
            own.extend(p.placement().kept_box().iter().flat_map(|r| [r.start as u64, r.end as u64]));
        }
        let mut all = vec![0; own.len() * world.size()];
        world.all_gather(&own, &mut all)?;
        let mut parts: Vec<Vec<Part>> = parameters.iter().map(|_| vec![]).collect();
        for (rank, table) in all.chunks(own.len().max(1)).enumerate() {
            let mut rest = table;
            for (p, parts) in parameters.iter().zip(&mut parts) {
                let (numbers, after) = rest.split_at(1 + 2 * p.shape().len());
                rest = after;
                let at: Vec<_> = numbers[1..].chunks(2).map(|r| r[0] as usize..r[1] as usize).collect();
                if numbers[0] == 1 && at.iter().all(|r| !r.is_empty()) {
                    parts.push(Part { rank, at });
                }
            }
        }
        Ok(Gathering { world, optimizer, parameters, parts })
    }

    /// On the leader: a whole tensor. The others are in [`Gathering::serve`].
    pub fn fetch(&self, what: What, p: &Parameter) -> Result<Vec<f32>> {
        let Some(index) = self.parameters.iter().position(|q| q.is(p)) else {
            return Err(TrainError::setting("mesh", format!("{} is not known to all ranks", p.name())));
        };
        self.world.broadcast(0, &mut [what as u64, index as u64])?;
        let mut whole = vec![0f32; p.len()];
        for part in &self.parts[index] {
            let mut values = vec![0f32; part.at.iter().map(Range::len).product()];
            if part.rank == 0 {
                values = self.own(what, p)?;
            } else {
                self.world.recv(part.rank, &mut values)?;
            }
            let kept = 0..part.at.first().map_or(1, Range::len);
            let placement = Placement { working: part.at.clone(), kept, sharded: false };
            let mut rest = values.as_slice();
            for (at, n) in placement.kept_runs(p.shape()) {
                let (run, after) = rest.split_at(n);
                whole[at..at + n].copy_from_slice(run);
                rest = after;
            }
        }
        Ok(whole)
    }

    /// On the leader: nothing more is wanted.
    pub fn end(&self) -> Result<()> {
        Ok(self.world.broadcast(0, &mut [END, 0])?)
    }

    /// On the others: gives what the leader asks for until it has all.
    pub fn serve(&self) -> Result<()> {
        loop {
            let mut wanted = [0u64; 2];
            self.world.broadcast(0, &mut wanted)?;
            let [what, index] = wanted.map(|x| x as usize);
            let Some(&what) = ORDER.get(what) else { return Ok(()) };
            if self.parts[index].iter().any(|part| part.rank == self.world.rank()) {
                self.world.send(0, &self.own(what, &self.parameters[index])?)?;
            }
        }
    }

    /// What this rank keeps of a tensor.
    fn own(&self, what: What, p: &Parameter) -> Result<Vec<f32>> {
        let widen = |t: &Tensor| match t.f32() {
            Ok(values) => Ok(values.to_vec()),
            Err(_) => Ok(t.bf16()?.iter().map(|x| x.to_f32()).collect()),
        };
        let state = self.optimizer.states().iter().find(|s| s.param.is(p));
        match (what, state) {
            (What::ExpAvg, Some(s)) => widen(&s.exp_avg),
            (What::ExpAvgSq, Some(s)) => widen(&s.exp_avg_sq),
            (What::Value, Some(s)) if s.master.is_some() => s.master.as_ref().map_or(Ok(vec![]), widen),
            _ => widen(&p.kept()?),
        }
    }
}
