//! Keys and values go round; every rank attends to those of one rank after another (Ring Attention, arXiv 2310.01889).
//!
//! Rank r has the keys of rank r − i in step i. The next ones are on their way while it computes. The softmax of its rows runs on over the steps;
//! in backward the probabilities are formed anew from the log-sum-exp over *all* keys, and the gradients of K and V follow them round, one
//! hop more, which brings them home. Each step's keys are cut by document, so that what a run of queries does not see is not computed.

use phalanx_comm::{Communicator, Pending};
use phalanx_kernels::attention::{self as kernel, Running};
use phalanx_kernels::elementwise;
use phalanx_nn::Result;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use super::failed;
use super::local::{Form, Output, refused};
use super::runs::{Run, calls};

/// A ring, and the rows of its ranks.
pub(super) struct Ring<'a> {
    pub group: &'a Communicator,
    /// The runs of each rank.
    pub runs: &'a [Vec<Run>],
    pub form: Form,
}

impl Ring<'_> {
    /// The rank whose keys are here in step `i`; it may be counted on to the number of ranks.
    fn source(&self, i: usize) -> usize {
        (self.group.rank() + self.group.size() - i) % self.group.size()
    }

    fn next(&self) -> usize {
        (self.group.rank() + 1) % self.group.size()
    }

    fn previous(&self) -> usize {
        self.source(1)
    }

    fn rows(&self, rank: usize) -> usize {
        self.runs[rank].iter().map(|r| r.len).sum()
    }

    /// Room for K and V of a rank, one behind the other.
    fn room(&self, rt: &Runtime, rank: usize) -> Result<Tensor> {
        let shape = [2 * self.rows(rank), self.form.kv_width()];
        Ok(rt.empty(&shape, DType::F32, Category::Activations)?)
    }

    /// K and V of this rank's rows, one behind the other.
    fn pack(&self, rt: &Runtime, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let mut kv = self.room(rt, self.group.rank())?;
        let half = kv.len() / 2;
        let (to_k, to_v) = kv.f32_mut()?.split_at_mut(half);
        to_k.copy_from_slice(&k.f32()?[..half]);
        to_v.copy_from_slice(&v.f32()?[..half]);
        Ok(kv)
    }

    /// Sends what is here on, and asks for what comes in step `i`.
    fn pass(&self, rt: &Runtime, here: Tensor, i: usize) -> Result<Passing> {
        let sent = self.group.send_async(self.next(), here);
        let coming = self.group.recv_async(self.previous(), self.room(rt, self.source(i))?);
        Ok(Passing { sent, coming })
    }

    /// The output for this rank's queries.
    pub fn forward(&self, rt: &Runtime, [q, k, v]: [&Tensor; 3]) -> Result<Output> {
        let steps = self.group.size();
        let mut out = rt.zeros(q.shape(), Category::Activations)?;
        let stats = [q.dim(0), q.dim(1)];
        let mut max = rt.empty(&stats, DType::F32, Category::Activations)?;
        let mut sum = rt.zeros(&stats, Category::Activations)?;
        max.f32_mut()?.fill(f32::NEG_INFINITY);
        let mut kv = self.pack(rt, k, v)?;
        for i in 0..steps {
            let passing = if i + 1 < steps { Some(self.pass(rt, kv.clone(), i + 1)?) } else { None };
            {
                let (k, v) = kv.f32()?.split_at(kv.len() / 2);
                let mut run = Running { out: out.f32_mut()?, max: max.f32_mut()?, sum: sum.f32_mut()? };
                for seqs in self.calls(i) {
                    kernel::forward_onto(rt.device(), &self.form.over(&seqs), q.f32()?, k, v, &mut run)
                        .map_err(refused)?;
                }
            }
            if let Some(passing) = passing {
                kv = passing.arrive()?;
            }
        }
        let mut lse = rt.empty(&stats, DType::F32, Category::Activations)?;
        kernel::log_sum_exp(max.f32()?, sum.f32()?, lse.f32_mut()?).map_err(refused)?;
        Ok(Output { out, lse })
    }

    /// Gradients of this rank's q, k and v.
    pub fn backward(
        &self,
        rt: &Runtime,
        [q, k, v]: [&Tensor; 3],
        forward: &Output,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let steps = self.group.size();
        let mut dq = rt.zeros(q.shape(), Category::Activations)?;
        let mut kv = self.pack(rt, k, v)?;
        let mut gradients: Option<Passing> = None;
        for i in 0..steps {
            let passing = if i + 1 < steps { Some(self.pass(rt, kv.clone(), i + 1)?) } else { None };
            let mut dkv = rt.zeros(kv.shape(), Category::Activations)?;
            {
                let half = kv.len() / 2;
                let (k, v) = kv.f32()?.split_at(half);
                let (dk, dv) = dkv.f32_mut()?.split_at_mut(half);
                for seqs in self.calls(i) {
                    kernel::backward_onto(
                        rt.device(),
                        &self.form.over(&seqs),
                        q.f32()?,
                        k,
                        v,
                        forward.out.f32()?,
                        forward.lse.f32()?,
                        grad.f32()?,
                        dq.f32_mut()?,
                        dk,
                        dv,
                    )
                    .map_err(refused)?;
                }
            }
            // What the ranks before have found for the same keys came while this one computed.
            if let Some(gradients) = gradients.take() {
                let mut sum = gradients.arrive()?;
                elementwise::add_assign(rt.device(), sum.f32_mut()?, dkv.f32()?, 1.0).map_err(refused)?;
                dkv = sum;
            }
            gradients = Some(self.pass(rt, dkv, i + 1)?);
            if let Some(passing) = passing {
                kv = passing.arrive()?;
            }
        }
        let home = match gradients {
            Some(gradients) => gradients.arrive()?,
            None => self.room(rt, self.group.rank())?,
        };
        let (mut dk, mut dv) =
            (rt.zeros(k.shape(), Category::Activations)?, rt.zeros(v.shape(), Category::Activations)?);
        let half = home.len() / 2;
        dk.f32_mut()?[..half].copy_from_slice(&home.f32()?[..half]);
        dv.f32_mut()?[..half].copy_from_slice(&home.f32()?[half..]);
        Ok([dq, dk, dv])
    }

    /// What this rank's queries see of the keys of step `i`.
    fn calls(&self, i: usize) -> Vec<Vec<kernel::Seq>> {
        calls(&self.runs[self.group.rank()], &self.runs[self.source(i)], self.form.window)
    }
}

/// A hop in progress.
struct Passing {
    sent: Pending<Tensor>,
    coming: Pending<Tensor>,
}

impl Passing {
    /// What has come, once what was here has left.
    fn arrive(self) -> Result<Tensor> {
        let arrived = self.coming.wait().map_err(failed)?;
        self.sent.wait().map_err(failed)?;
        Ok(arrived)
    }
}
