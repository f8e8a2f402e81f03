//! The tensor itself.

use std::fmt;
use std::sync::Arc;

use half::bf16;
use phalanx_kernels::Mat;

use crate::error::{Result, TensorError};
use crate::pool::Block;
use crate::{Category, DType, Pool};

/// Where on a tape a value was recorded. Opaque here; the autograd crate gives it meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId {
    /// Which tape.
    pub tape: u64,
    /// Which entry of it.
    pub index: usize,
}

/// A contiguous, row-major array over shared pooled memory.
///
/// Cloning shares the memory. Values change only through [`Tensor::f32_mut`] and its kin, which need to be the only holder.
#[derive(Clone)]
pub struct Tensor {
    block: Arc<Block>,
    /// First element, in elements.
    offset: usize,
    shape: Vec<usize>,
    dtype: DType,
    node: Option<NodeId>,
}

/// Elements of a shape; `None` if they, or those of a part of it, cannot be counted. So once a shape was checked here, no product
/// of its dimensions wraps; that is why a dimension of 0 hides nothing.
fn elements(shape: &[usize]) -> Option<usize> {
    let all = shape.iter().filter(|&&n| n > 0).try_fold(1usize, |all, &n| all.checked_mul(n))?;
    Some(if shape.contains(&0) { 0 } else { all })
}

impl Tensor {
    pub(crate) fn from_pool(pool: &Pool, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let bytes = elements(shape).and_then(|n| n.checked_mul(dtype.size()));
        let block = pool.take(bytes.ok_or_else(|| TensorError::TooLarge { shape: shape.to_vec() })?, category)?;
        Ok(Tensor { block: Arc::new(block), offset: 0, shape: shape.to_vec(), dtype, node: None })
    }

    /// The shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Size of dimension `i`; 1 beyond the last.
    pub fn dim(&self, i: usize) -> usize {
        self.shape.get(i).copied().unwrap_or(1)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// What its memory is booked under.
    pub fn category(&self) -> Category {
        self.block.category()
    }

    /// Where it was recorded on a tape, if it was.
    pub fn node(&self) -> Option<NodeId> {
        self.node
    }

    /// The same values, marked as recorded at `node` (or as not recorded).
    pub fn with_node(mut self, node: Option<NodeId>) -> Tensor {
        self.node = node;
        self
    }

    /// Whether nobody else holds the memory.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.block) == 1
    }

    fn want(&self, what: &'static str, want: DType) -> Result<()> {
        if self.dtype == want { Ok(()) } else { Err(TensorError::DType { what, got: self.dtype, want }) }
    }

    /// The elements.
    ///
    /// # Errors
    /// If they are not f32.
    pub fn f32(&self) -> Result<&[f32]> {
        self.want("f32", DType::F32)?;
        // SAFETY: the block holds offset + len elements of initialised bytes (mapped zeroed, any bits are an f32), aligned to
        // at least 64; it lives as long as `self`, and is only changed through `&mut` of its single holder.
        Ok(unsafe { std::slice::from_raw_parts(self.block.ptr().cast::<f32>().add(self.offset), self.len()) })
    }

    /// The elements.
    ///
    /// # Errors
    /// If they are not bf16.
    pub fn bf16(&self) -> Result<&[bf16]> {
        self.want("bf16", DType::Bf16)?;
        // SAFETY: as in `f32`; `bf16` is a transparent u16.
        Ok(unsafe { std::slice::from_raw_parts(self.block.ptr().cast::<bf16>().add(self.offset), self.len()) })
    }

    /// The elements as a kernel operand.
    pub fn mat(&self) -> Mat<'_> {
        // SAFETY: as in `f32` and `bf16`, the type being checked by the match.
        unsafe {
            match self.dtype {
                DType::F32 => {
                    Mat::F32(std::slice::from_raw_parts(self.block.ptr().cast::<f32>().add(self.offset), self.len()))
                }
                DType::Bf16 => {
                    Mat::Bf16(std::slice::from_raw_parts(self.block.ptr().cast::<bf16>().add(self.offset), self.len()))
                }
            }
        }
    }

    /// The elements, to be changed.
    ///
    /// # Errors
    /// If they are not f32, or the memory is shared.
    pub fn f32_mut(&mut self) -> Result<&mut [f32]> {
        self.want("f32_mut", DType::F32)?;
        let (offset, len) = (self.offset, self.len());
        let block = Arc::get_mut(&mut self.block).ok_or(TensorError::Shared { what: "f32_mut" })?;
        // SAFETY: as in `f32`, and `get_mut` shows that this is the only holder.
        Ok(unsafe { std::slice::from_raw_parts_mut(block.ptr().cast::<f32>().add(offset), len) })
    }

    /// The elements, to be changed.
    ///
    /// # Errors
    /// If they are not bf16, or the memory is shared.
    pub fn bf16_mut(&mut self) -> Result<&mut [bf16]> {
        self.want("bf16_mut", DType::Bf16)?;
        let (offset, len) = (self.offset, self.len());
        let block = Arc::get_mut(&mut self.block).ok_or(TensorError::Shared { what: "bf16_mut" })?;
        // SAFETY: as in `bf16`, and `get_mut` shows that this is the only holder.
        Ok(unsafe { std::slice::from_raw_parts_mut(block.ptr().cast::<bf16>().add(offset), len) })
    }

    /// The same elements under another shape. The tape entry is kept: a reshape has the identity as gradient, and gradients are
    /// handed back in the shape that the recorded value had.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        if elements(shape) != Some(self.len()) {
            return Err(TensorError::Elements { what: "reshape", shape: shape.to_vec(), elements: self.len() });
        }
        Ok(Tensor { shape: shape.to_vec(), ..self.clone() })
    }

    /// As [`Tensor::reshape`], giving up this handle, so that a sole holder stays one.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn into_shape(mut self, shape: &[usize]) -> Result<Tensor> {
        if elements(shape) != Some(self.len()) {
            return Err(TensorError::Elements { what: "into_shape", shape: shape.to_vec(), elements: self.len() });
        }
        self.shape = shape.to_vec();
        Ok(self)
    }

    /// Rows `range` of the outermost dimension, sharing memory; not recorded on any tape.
    ///
    /// # Errors
    /// If the range leaves the tensor.
    pub fn rows(&self, range: std::ops::Range<usize>) -> Result<Tensor> {
        if range.end > self.dim(0) || range.start > range.end || self.shape.is_empty() {
            return Err(TensorError::Elements { what: "rows", shape: self.shape.clone(), elements: range.end });
        }
        let row: usize = self.shape[1..].iter().product();
        let mut shape = self.shape.clone();
        shape[0] = range.len();
        Ok(Tensor { offset: self.offset + range.start * row, shape, node: None, ..self.clone() })
    }

    /// The pool its memory came from.
    pub fn pool(&self) -> &Pool {
        self.block.pool()
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor{:?} {} ({})", self.shape, self.dtype, self.category().name())
    }
}

// SAFETY: the memory behind a Block is plain bytes, only read through `&` and only written through `&mut` of the sole holder.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

#[cfg(test)]
mod tests {
    use crate::{Category, DType, Runtime};

    #[test]
    fn shared_memory_is_not_changed() {
        let rt = Runtime::new(1);
        let mut a = rt.from_f32(&[2, 2], &[1., 2., 3., 4.], Category::Activations).unwrap();
        let b = a.rows(1..2).unwrap();
        assert_eq!(b.f32().unwrap(), [3., 4.]);
        assert!(a.f32_mut().is_err());
        drop(b);
        a.f32_mut().unwrap()[0] = 9.0;
        assert_eq!(a.f32().unwrap()[0], 9.0);
        assert!(a.bf16().is_err() && a.reshape(&[3]).is_err() && a.rows(1..3).is_err());
    }

    #[test]
    fn shapes_beyond_any_memory_are_refused() {
        let rt = Runtime::new(1);
        const HALF: usize = 1 << 63;
        for shape in
            [&[HALF, 2][..], &[HALF, 2, 0], &[0, HALF, 2], &[1 << 62], &[1 << 32, 1 << 31], &[usize::MAX], &[1 << 60]]
        {
            for dtype in [DType::F32, DType::Bf16] {
                let made = rt.empty(shape, dtype, Category::Weights);
                assert!(made.is_err() || shape.contains(&0), "{shape:?}: {made:?}");
            }
            assert!(rt.from_f32(shape, &[], Category::Weights).is_err(), "{shape:?}");
        }
        let empty = rt.empty(&[0, HALF], DType::F32, Category::Weights).unwrap();
        assert!(empty.is_empty() && empty.rows(0..0).unwrap().is_empty());
        assert!(empty.reshape(&[HALF, 2]).is_err() && empty.clone().into_shape(&[2, HALF, 0]).is_err());
        let four = rt.empty(&[4], DType::F32, Category::Weights).unwrap();
        assert!(four.reshape(&[HALF + 2, 2]).is_err() && four.into_shape(&[HALF + 2, 2]).is_err());
    }

    #[test]
    fn casts_round_to_bf16_and_widen_exactly() {
        let rt = Runtime::new(1);
        let a = rt.from_f32(&[3], &[1.0, 1.0 + 1.0 / 256.0, -2.5], Category::Weights).unwrap();
        let b = rt.cast(&a, DType::Bf16, Category::Weights).unwrap();
        assert_eq!(rt.to_vec(&b).unwrap(), [1.0, 1.0, -2.5]);
        assert_eq!(b.bytes(), 6);
        let empty = rt.empty(&[0, 4], DType::F32, Category::Weights).unwrap();
        assert!(empty.f32().unwrap().is_empty());
    }
}
