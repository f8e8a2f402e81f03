//! Pairs of functions that move rows [T, …] between the ranks of a group: each one's backward is the other's forward.
//!
//! Rank i has rows [`chunk`]`(T, ranks, i)`, which may be none.

use phalanx_autograd::{AutogradError, Function, Recipe, Result, Tape};
use phalanx_comm::{Communicator, ReduceOp};
use phalanx_nn::chunk;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

/// What a rank's rows are a part of.
#[derive(Clone)]
pub(super) struct Rows {
    pub group: Communicator,
    /// Rows of all ranks T.
    pub total: usize,
}

impl Rows {
    /// Elements that each rank has, for rows like those of `x`.
    fn counts(&self, x: &Tensor) -> Vec<usize> {
        let row: usize = x.shape()[1..].iter().product();
        (0..self.group.size()).map(|r| chunk(self.total, self.group.size(), r).len() * row).collect()
    }

    /// A tensor like `x` of `rows` rows.
    fn like(rt: &Runtime, x: &Tensor, rows: usize) -> Result<Tensor> {
        let mut shape = x.shape().to_vec();
        shape[0] = rows;
        Ok(rt.empty(&shape, DType::F32, Category::Activations)?)
    }

    fn own(&self) -> std::ops::Range<usize> {
        chunk(self.total, self.group.size(), self.group.rank())
    }

    /// The rows of all ranks.
    fn all_gather(&self, rt: &Runtime, x: &Tensor) -> Result<Tensor> {
        let mut all = Rows::like(rt, x, self.total)?;
        self.group.all_gather_v(x.f32()?, &self.counts(x), all.f32_mut()?).map_err(failed)?;
        Ok(all)
    }

    /// This rank's rows of the sum over all ranks.
    fn reduce_scatter(&self, rt: &Runtime, x: &Tensor) -> Result<Tensor> {
        let mut own = Rows::like(rt, x, self.own().len())?;
        let counts = self.counts(x);
        self.group.reduce_scatter_v(ReduceOp::Sum, x.f32()?, &counts, own.f32_mut()?).map_err(failed)?;
        Ok(own)
    }

    /// This rank's rows of those that all ranks have.
    fn take(&self, rt: &Runtime, x: &Tensor) -> Result<Tensor> {
        let (rows, width) = (self.own(), x.shape()[1..].iter().product::<usize>());
        let mut own = Rows::like(rt, x, rows.len())?;
        own.f32_mut()?.copy_from_slice(&x.f32()?[rows.start * width..rows.end * width]);
        Ok(own)
    }
}

fn failed(e: phalanx_comm::CommError) -> AutogradError {
    AutogradError::Other(e.to_string())
}

/// What each rank has of the gradient of rows that were gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gradient {
    /// A part: the sum is the gradient.
    Part,
    /// All of it.
    Whole,
}

/// Rows of all ranks from those of this rank: x [T_i, …] → [T, …]. With `again`, what is gathered is not kept for backward but gathered again.
pub(super) fn gather(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    rows: Rows,
    x: &Tensor,
    gradient: Gradient,
    again: bool,
) -> Result<Tensor> {
    let y = rows.all_gather(rt, x)?;
    let Some(tape) = tape else { return Ok(y) };
    let recipe = again.then(|| {
        let (x, rows) = (tape.save(x), rows.clone());
        Recipe::new(move |rt| rows.all_gather(rt, &x.get(rt)?))
    });
    Ok(tape.record(&[x], false, y, Gathered { rows, gradient }, recipe))
}

struct Gathered {
    rows: Rows,
    gradient: Gradient,
}

impl Function for Gathered {
    fn name(&self) -> &'static str {
        "gather_rows"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(match self.gradient {
            Gradient::Part => self.rows.reduce_scatter(rt, &grad)?,
            Gradient::Whole => self.rows.take(rt, &grad)?,
        })])
    }
}

/// This rank's rows of the sum over all ranks: y [T, …] → [T_i, …]. `trains` says that a parameter of the module is trained, perhaps on another rank only: every
/// rank records the same.
pub(super) fn reduce_scatter(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    rows: Rows,
    y: &Tensor,
    trains: bool,
) -> Result<Tensor> {
    let own = rows.reduce_scatter(rt, y)?;
    Ok(match tape {
        Some(tape) => tape.record(&[y], trains, own, Scattered { rows }, None),
        None => own,
    })
}

/// This rank's rows of those that every rank has: y [T, …] → [T_i, …].
pub(super) fn take(rt: &Runtime, tape: Option<&mut Tape>, rows: Rows, y: &Tensor) -> Result<Tensor> {
    let own = rows.take(rt, y)?;
    Ok(match tape {
        Some(tape) => tape.record(&[y], false, own, Scattered { rows }, None),
        None => own,
    })
}

struct Scattered {
    rows: Rows,
}

impl Function for Scattered {
    fn name(&self) -> &'static str {
        "scatter_rows"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.rows.all_gather(rt, &grad)?)])
    }
}
