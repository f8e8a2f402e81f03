//! Runs a pipeline schedule: a rank walks down its list of actions, whatever the schedule is.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_autograd::{Tape, WeightGradients};
use phalanx_comm::{Group, Pending, Pp};
use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, head_loss};
use phalanx_nn::{Cx, Env};
use phalanx_parallel::pipeline::{Action, Part};
use phalanx_parallel::{Distributed, Stages};
use phalanx_tensor::{Category, DType, Tensor};

use crate::step::{LossCount, Rows};
use crate::window::MicroBatch;
use crate::{Result, TrainError};

/// A stage of a micro-batch between its forward and its backward.
struct Forwarded {
    tape: Tape,
    /// What came from the stage before; the first stage has ids.
    input: Option<Tensor>,
    /// What goes on, or the loss.
    output: Tensor,
}

struct Run<'a> {
    model: &'a Model,
    stages: &'a Stages,
    group: &'a Group<Pp>,
    rows: Vec<Rows>,
    live: HashMap<Part, Forwarded>,
    deferred: HashMap<Part, WeightGradients>,
    /// Rows that a stage of this rank is to work on, and the gradients of what it made.
    activations: HashMap<Part, Tensor>,
    gradients: HashMap<Part, Tensor>,
    /// On their way to other ranks.
    sending: Vec<Pending<Tensor>>,
    loss: LossCount,
}

/// Forward and backward of all micro-batches of a window through the stages of this rank. Gradients of parameters add up in the order of
/// micro-batches. The loss is that of the stage that has it; elsewhere it is zero.
///
/// # Errors
/// As [`forward_backward`](crate::step::forward_backward); if the schedule cannot do so many micro-batches, or a peer fails.
pub fn run(
    model: &Model,
    env: &Env,
    batches: &[MicroBatch],
    d: &Arc<Distributed>,
    stages: &Stages,
) -> Result<LossCount> {
    let group = d.mesh().group::<Pp>();
    let schedule = stages.schedule(batches.len())?;
    let rows = batches.iter().map(|b| Rows::new(env, &b.tokens, b.moment)).collect();
    let mut run = Run {
        model,
        stages,
        group,
        rows,
        live: HashMap::new(),
        deferred: HashMap::new(),
        activations: HashMap::new(),
        gradients: HashMap::new(),
        sending: vec![],
        loss: LossCount::default(),
    };
    for action in &schedule.ranks[group.rank()] {
        run.act(*action)?;
    }
    for sent in run.sending {
        drop(sent.wait()?);
    }
    Ok(run.loss)
}

/// The loss of one micro-batch, forward only, through all stages in turn; zero on ranks without the loss.
///
/// # Errors
/// As [`run`].
pub fn evaluate(
    model: &Model,
    env: &Env,
    batch: &TokenBatch,
    d: &Arc<Distributed>,
    stages: &Stages,
) -> Result<LossCount> {
    let group = d.mesh().group::<Pp>();
    let rows = Rows::new(env, batch, env.moment);
    let (rank_of, net) = (&stages.rank_of_stage, model.net());
    let mut h_th: Option<Tensor> = None;
    for (s, stage) in stages.layers.iter().enumerate().filter(|(s, _)| rank_of[*s] == group.rank()) {
        if s > 0 && rank_of[s - 1] != group.rank() {
            h_th = Some(receive(group, model, &rows, rank_of[s - 1])?);
        }
        let mut cx = Cx::eval(&rows.env);
        let out = cx.whole(|cx| -> Result<_> {
            let mut h = match h_th.take() {
                Some(h) if !stage.embedding => h,
                _ => net.embed(cx, &rows.ids)?,
            };
            for i in stage.layers.clone() {
                h = net.block(cx, i, h)?;
            }
            if !stage.head {
                return Ok((Some(h), None));
            }
            let h = net.norm(cx, h)?;
            Ok((None, Some(head_loss(model, cx, h, &rows.targets)?)))
        })?;
        match out {
            (_, Some(loss)) => return Ok(LossCount { sum: loss.sum.sum, count: loss.sum.count as u64 }),
            (Some(h), None) if rank_of[s + 1] == group.rank() => h_th = Some(h),
            (Some(h), None) => group.send(rank_of[s + 1], h.f32()?)?,
            (None, None) => {}
        }
    }
    Ok(LossCount::default())
}

/// Rows of a micro-batch from another stage.
fn receive(group: &Group<Pp>, model: &Model, rows: &Rows, from: usize) -> Result<Tensor> {
    let shape = [rows.ids.len(), model.config().hidden_size];
    let mut t = rows.env.rt.empty(&shape, DType::F32, Category::Activations)?;
    group.recv(from, t.f32_mut()?)?;
    Ok(t)
}

impl Run<'_> {
    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Forward(part) => self.forward(part),
            Action::Backward(part) => self.backward(part, false),
            Action::InputGrad(part) => self.backward(part, true),
            Action::WeightGrad(part) => match self.deferred.remove(&part) {
                Some(weights) => Ok(weights.run(&self.rows[part.micro_batch].env.rt)?),
                None => Err(out_of_order(action)),
            },
            Action::Overlapped { forward, backward } => {
                self.forward(forward)?;
                self.backward(backward, false)
            }
            Action::SendActivation { part, to } => {
                let rows = self.activations.remove(&after(part)).ok_or_else(|| out_of_order(action))?;
                self.sending.push(self.group.send_async(to, rows));
                Ok(())
            }
            Action::SendGrad { part, to } => {
                let grad = self.gradients.remove(&before(part)).ok_or_else(|| out_of_order(action))?;
                self.sending.push(self.group.send_async(to, grad));
                Ok(())
            }
            Action::RecvActivation { part, from } => {
                let rows = receive(self.group, self.model, &self.rows[part.micro_batch], from)?;
                self.activations.insert(part, rows);
                Ok(())
            }
            Action::RecvGrad { part, from } => {
                let grad = receive(self.group, self.model, &self.rows[part.micro_batch], from)?;
                self.gradients.insert(part, grad);
                Ok(())
            }
        }
    }

    fn forward(&mut self, part: Part) -> Result<()> {
        let (rows, stage) = (&self.rows[part.micro_batch], &self.stages.layers[part.stage]);
        let (net, mut input) = (self.model.net(), None);
        let mut cx = Cx::train(&rows.env);
        let (output, loss) = cx.whole(|cx| -> Result<_> {
            let mut h_th = match self.activations.remove(&part) {
                _ if stage.embedding => net.embed(cx, &rows.ids)?,
                Some(h_th) => {
                    let h_th = cx.tape().map_or_else(|| h_th.clone(), |tape| tape.input(h_th.clone()));
                    input = Some(h_th.clone().with_node(h_th.node()));
                    h_th
                }
                None => return Err(out_of_order(Action::Forward(part))),
            };
            for i in stage.layers.clone() {
                h_th = net.block(cx, i, h_th)?;
            }
            if !stage.head {
                return Ok((h_th, None));
            }
            let h_th = net.norm(cx, h_th)?;
            let out = head_loss(self.model, cx, h_th, &rows.targets)?;
            Ok((out.loss, Some(out.sum)))
        })?;
        match loss {
            Some(sum) => self.loss.add(LossCount { sum: sum.sum, count: sum.count as u64 }),
            None => drop(self.activations.insert(after(part), output.clone().with_node(None))),
        }
        if let Some(tape) = cx.into_tape() {
            self.live.insert(part, Forwarded { tape, input, output });
        }
        Ok(())
    }

    fn backward(&mut self, part: Part, split: bool) -> Result<()> {
        let rt = &self.rows[part.micro_batch].env.rt;
        let missing = || out_of_order(Action::Backward(part));
        let Forwarded { tape, input, output } = self.live.remove(&part).ok_or_else(missing)?;
        let seed = match self.stages.layers[part.stage].head {
            true => rt.from_f32(&[1], &[1.0], Category::Activations)?,
            false => self.gradients.remove(&part).ok_or_else(missing)?,
        };
        let mut gradients = if split {
            let (gradients, weights) = tape.backward_inputs(rt, &output, seed)?;
            self.deferred.insert(part, weights);
            gradients
        } else {
            tape.backward(rt, &output, seed)?
        };
        if let Some(input) = input {
            // Nothing flows where nothing is trained; the stage before waits all the same.
            let grad = match gradients.take(&input) {
                Some(grad) => grad,
                None => rt.zeros(input.shape(), Category::Activations)?,
            };
            self.gradients.insert(before(part), grad);
        }
        Ok(())
    }
}

fn after(part: Part) -> Part {
    Part::new(part.stage + 1, part.micro_batch)
}

fn before(part: Part) -> Part {
    Part::new(part.stage - 1, part.micro_batch)
}

fn out_of_order(action: Action) -> TrainError {
    TrainError::setting("pipeline", format!("{action} comes before what it needs; the schedule is not sound"))
}
