//! A training run on several ranks: who does what, and how whole tensors come together where files are written.
//!
//! Every rank runs the same loop over the same sample stream and takes its share of each window; the first one, the *leader*, also writes
//! and talks. Files are those of one rank, with whole tensors under their global names: so a checkpoint of any layout can be gone on with in any
//! other. A tensor is put together only while it is written, one at a time.

use std::ops::Range;

use phalanx_comm::{Communicator, World};
use phalanx_nn::{Parameter, Placement};
use phalanx_parallel::Distributed;
use phalanx_tensor::Tensor;

use crate::optimizer::AdamW;
use crate::{Result, TrainError};

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
