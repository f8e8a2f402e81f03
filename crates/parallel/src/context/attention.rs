//! The attention of one micro-batch whose rows lie on several ranks: the parts put together, and its place on the tape.

use std::sync::Arc;

use phalanx_autograd::{AutogradError, Function, Saved, Tape};
use phalanx_comm::Communicator;
use phalanx_kernels::attention::Seq;
use phalanx_nn::{ContextAttention, Result};
use phalanx_tensor::{Runtime, Tensor};

use super::all_gather;
use super::heads::Heads;
use super::local::{self, Form, Output};
use super::order::Order;
use super::ring::Ring;
use super::runs::{Run, calls};
use super::ulysses::Exchange;

/// How keys of other groups come.
#[derive(Debug)]
pub(super) enum Outer {
    /// All at once.
    AllGather { group: Communicator, order: Order },
    /// One rank's after another's; with the runs of each.
    Ring { group: Communicator, runs: Vec<Vec<Run>> },
}

/// Where the rows of a micro-batch are.
#[derive(Debug)]
pub(super) struct MicroBatch {
    /// The ranks among which rows are exchanged for heads, and their rows.
    pub inner: Option<(Communicator, Order)>,
    /// How keys come from beyond those.
    pub outer: Option<Outer>,
    /// The rows of the ranks of `inner`, or this rank's.
    pub queries: Vec<Run>,
    /// All rows.
    pub documents: Vec<Run>,
}

impl MicroBatch {
    pub fn shared(self) -> ContextRows {
        ContextRows(Arc::new(self))
    }

    /// What the queries see of all keys. No query occurs twice in it, so it is one call.
    fn seqs(&self, window: Option<usize>) -> Vec<Seq> {
        calls(&self.queries, &self.documents, window).into_iter().flatten().collect()
    }

    /// Which heads this rank works on, among those it exchanges them with.
    fn exchange(&self, heads: usize, kv_heads: usize) -> Result<Option<(Exchange<'_>, Heads, Heads)>> {
        let Some((group, order)) = &self.inner else { return Ok(None) };
        let (q, kv) = Heads::deal(heads, kv_heads, group.size())?;
        Ok(Some((Exchange { group, order }, q, kv)))
    }
}

/// A [`MicroBatch`] that passes share.
#[derive(Clone, Debug)]
pub(super) struct ContextRows(Arc<MicroBatch>);

impl ContextAttention for ContextRows {
    fn attention(
        &self,
        rt: &Runtime,
        tape: Option<&mut Tape>,
        [q, k, v]: [&Tensor; 3],
        scale: f32,
        window: Option<usize>,
    ) -> Result<Tensor> {
        let micro = &*self.0;
        let sizes = Sizes { rows: q.dim(0), heads: q.dim(1), kv_heads: k.dim(1), dim: q.dim(2) };
        let exchange = micro.exchange(sizes.heads, sizes.kv_heads)?;
        let mut inputs = match &exchange {
            Some((exchange, heads, kv_heads)) => {
                let parts = [(q, heads), (k, kv_heads), (v, kv_heads)];
                exchange.to_heads(rt, &parts, sizes.dim)?
            }
            None => vec![q.clone(), k.clone(), v.clone()],
        };
        if let Some(Outer::AllGather { group, order }) = &micro.outer {
            let [k, v] = all_gather::gather(rt, group, order, [&inputs[1], &inputs[2]])?;
            inputs.splice(1.., [k, v]);
        }
        let [q_in, k_in, v_in] = [&inputs[0], &inputs[1], &inputs[2]];
        let form = Form::new(q_in, k_in, scale, window);
        let output = match &micro.outer {
            Some(Outer::Ring { group, runs }) => Ring { group, runs, form }.forward(rt, [q_in, k_in, v_in])?,
            _ => local::forward(rt, form, &micro.seqs(window), [q_in, k_in, v_in])?,
        };
        let out = match &exchange {
            Some((exchange, heads, _)) => {
                exchange.to_rows(rt, &[(&output.out, heads)], sizes.dim, sizes.rows)?.swap_remove(0)
            }
            None => output.out.clone(),
        };
        let Some(tape) = tape else { return Ok(out) };
        // What is on the tape may have a recipe; what was exchanged or gathered has not.
        let saved = [&inputs[0], &inputs[1], &inputs[2]].map(|t| tape.save(t));
        let function = Attention { micro: Arc::clone(&self.0), saved, output, form, sizes };
        Ok(tape.record(&[q, k, v], false, out, function, None))
    }
}

/// Of this rank's rows, before any exchange.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

struct Attention {
    micro: Arc<MicroBatch>,
    /// q, k and v as the kernel saw them.
    saved: [Saved; 3],
    output: Output,
    form: Form,
    sizes: Sizes,
}

impl Function for Attention {
    fn name(&self) -> &'static str {
        "context attention"
    }

    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> phalanx_autograd::Result<Vec<Option<Tensor>>> {
        let [q, k, v] = &self.saved;
        let inputs = [q.get(rt)?, k.get(rt)?, v.get(rt)?];
        let gradients = self.gradients(rt, [&inputs[0], &inputs[1], &inputs[2]], grad);
        Ok(gradients.map_err(|e| AutogradError::Other(e.to_string()))?.into_iter().map(Some).collect())
    }
}

impl Attention {
    fn gradients(&self, rt: &Runtime, qkv: [&Tensor; 3], grad: Tensor) -> Result<Vec<Tensor>> {
        let (micro, form, sizes) = (&*self.micro, self.form, self.sizes);
        let exchange = micro.exchange(sizes.heads, sizes.kv_heads)?;
        let grad = match &exchange {
            Some((exchange, heads, _)) => exchange.to_heads(rt, &[(&grad, heads)], sizes.dim)?.swap_remove(0),
            None => grad,
        };
        let [dq, mut dk, mut dv] = match &micro.outer {
            Some(Outer::Ring { group, runs }) => Ring { group, runs, form }.backward(rt, qkv, &self.output, &grad)?,
            _ => local::backward(rt, form, &micro.seqs(form.window), qkv, &self.output, &grad)?,
        };
        if let Some(Outer::AllGather { group, order }) = &micro.outer {
            [dk, dv] = all_gather::reduce_scatter(rt, group, order, [dk, dv], dq.dim(0))?;
        }
        match &exchange {
            Some((exchange, heads, kv_heads)) => {
                let parts = [(&dq, heads), (&dk, kv_heads), (&dv, kv_heads)];
                exchange.to_rows(rt, &parts, sizes.dim, sizes.rows)
            }
            None => Ok(vec![dq, dk, dv]),
        }
    }
}
