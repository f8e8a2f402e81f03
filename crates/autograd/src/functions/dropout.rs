//! Dropout whose mask is a function of position, so that none is kept.

use std::sync::Arc;

use phalanx_kernels::elementwise;
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Function, Result, Tape};

/// Zeroes a share `p` of the elements of x, drawn from `stream`, and scales the rest by 1/(1−p). `p` = 0 is the identity.
///
/// # Errors
/// If memory runs out.
pub fn dropout(rt: &Runtime, tape: Option<&mut Tape>, x: &Tensor, p: f32, stream: Stream) -> Result<Tensor> {
    dropout_part(rt, tape, x, p, stream, Part::default())
}

/// Where the rows that are here lie in greater ones, so that every rank draws its part of one mask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// First row that is here.
    pub row: usize,
    /// Where neighbours are not neighbours in the greater ones: which of those each row is, from `row` on.
    pub rows: Option<Arc<[u32]>>,
    /// First column that is here, and columns of a whole row; `None`: rows are whole.
    pub column: Option<(usize, usize)>,
}

impl Part {
    /// Offset in the whole of element `i` of a part whose rows have `width` elements.
    fn offset(&self, i: u64, width: u64) -> u64 {
        let row = self.row as u64 + i / width;
        let row = self.rows.as_ref().map_or(row, |rows| u64::from(rows[row as usize]));
        let (first, of) = self.column.unwrap_or((0, width as usize));
        row * of as u64 + first as u64 + i % width
    }
}

/// As [`dropout`] for a part of the rows x [T, …] and columns: what the whole would drop there.
///
/// # Errors
/// If memory runs out.
pub fn dropout_part(
    rt: &Runtime,
    tape: Option<&mut Tape>,
    x: &Tensor,
    p: f32,
    stream: Stream,
    part: Part,
) -> Result<Tensor> {
    if p == 0.0 {
        return Ok(x.clone());
    }
    let f = Dropout { p, stream, part };
    let y = f.apply(rt, x)?;
    Ok(match tape {
        None => y,
        Some(t) => t.record(&[x], false, y, f, None),
    })
}

struct Dropout {
    p: f32,
    stream: Stream,
    part: Part,
}

impl Dropout {
    fn apply(&self, rt: &Runtime, x: &Tensor) -> Result<Tensor> {
        let mut y = rt.empty(x.shape(), DType::F32, Category::Activations)?;
        let width = x.shape()[1..].iter().product::<usize>() as u64;
        let bits = |i| self.stream.bits(self.part.offset(i, width));
        elementwise::dropout(rt.device(), x.f32()?, self.p, &bits, y.f32_mut()?)?;
        Ok(y)
    }
}

impl Function for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }
    fn backward(self: Box<Self>, rt: &Runtime, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.apply(rt, &grad)?)])
    }
}
