//! Weights laid out for inference, in pooled memory.

use std::fmt;
use std::sync::Arc;

use phalanx_kernels::gemm::prepared::{Form, Layout, Output, Prepared, multiply};

use crate::error::{Result, TensorError};
use crate::pool::Block;
use crate::{Category, DType, Runtime, Tensor};

/// Memory for the matrices of a model, many in one block: so that small ones lie on huge pages too. With small pages decoding is slower by a third
/// (docs/performance-notes.md).
#[derive(Default)]
pub struct PreparedSpace {
    block: Option<Arc<Block>>,
    /// Bytes of it that are left.
    left: usize,
}

/// Bytes of a block that matrices share.
const SHARED: usize = 16 << 20;

impl PreparedSpace {
    /// Without memory yet.
    pub fn new() -> PreparedSpace {
        PreparedSpace::default()
    }

    /// `bytes` bytes that nobody else has, at an offset of a block.
    fn take(&mut self, rt: &Runtime, bytes: usize) -> Result<(Arc<Block>, usize)> {
        let bytes = bytes.next_multiple_of(64);
        if bytes > SHARED / 2 {
            return Ok((Arc::new(rt.pool().take(bytes, Category::Weights)?), 0));
        }
        match &self.block {
            Some(block) if bytes <= self.left => {
                let at = SHARED - self.left;
                self.left -= bytes;
                Ok((Arc::clone(block), at))
            }
            _ => {
                let block = Arc::new(rt.pool().take(SHARED, Category::Weights)?);
                self.left = SHARED - bytes;
                Ok((Arc::clone(self.block.insert(block)), 0))
            }
        }
    }
}

/// A matrix W [out, in] in the layout of [`phalanx_kernels::gemm::prepared`]: it can be multiplied with and read row by row, not changed.
/// Cloning shares the memory.
#[derive(Clone)]
pub struct PreparedMatrix {
    block: Arc<Block>,
    /// First byte.
    offset: usize,
    layout: Layout,
}

impl PreparedMatrix {
    /// Lays out the matrix whose row i is what `row(i, out)` writes, in the row form of `form`
    /// ([`Form::row_bytes`]).
    ///
    /// # Errors
    /// If memory runs out.
    pub fn from_rows(
        rt: &Runtime,
        space: &mut PreparedSpace,
        form: Form,
        [n, k]: [usize; 2],
        row: &(dyn Fn(usize, &mut [u8]) + Sync),
    ) -> Result<PreparedMatrix> {
        let layout = Layout::new(form, n, k);
        let (block, offset) = space.take(rt, layout.bytes())?;
        // SAFETY: the block has that many bytes there, initialised (mapped zeroed), and nobody else has them yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(block.ptr().add(offset), layout.bytes()) };
        layout.fill(rt.device(), row, bytes)?;
        Ok(PreparedMatrix { block, offset, layout })
    }

    /// Lays out a tensor [n, k], rounding it where `form` asks for that.
    ///
    /// # Errors
    /// If it is not a matrix, or memory runs out.
    pub fn from_tensor(rt: &Runtime, space: &mut PreparedSpace, form: Form, w: &Tensor) -> Result<PreparedMatrix> {
        let &[n, k] = w.shape() else {
            return Err(TensorError::Elements {
                what: "a matrix laid out for inference",
                shape: w.shape().to_vec(),
                elements: w.len(),
            });
        };
        let values = w.mat();
        PreparedMatrix::from_rows(rt, space, form, [n, k], &|i, out| {
            let row: Vec<f32> = (0..k).map(|p| values.at(i * k + p)).collect();
            form.write_row(&row, out);
        })
    }

    /// [n, k].
    pub fn shape(&self) -> [usize; 2] {
        self.layout.shape()
    }

    /// How the values are stored.
    pub fn form(&self) -> Form {
        self.layout.form()
    }

    /// Bytes of the matrix.
    pub fn bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// As a kernel takes it.
    pub fn get(&self) -> Prepared<'_> {
        // SAFETY: the block has that many bytes there, which never change after they were made.
        let bytes = unsafe { std::slice::from_raw_parts(self.block.ptr().add(self.offset), self.layout.bytes()) };
        Prepared { layout: self.layout, bytes }
    }

    /// Reads rows `ids` [T] into `out` [T, k], widened.
    ///
    /// # Errors
    /// If an id has no row, or the length does not fit.
    pub fn gather(&self, ids: &[u32], out: &mut [f32]) -> Result<()> {
        let [_, k] = self.shape();
        if out.len() != ids.len() * k {
            return Err(TensorError::Elements { what: "gather", shape: vec![ids.len(), k], elements: out.len() });
        }
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(k.max(1))) {
            self.layout.read_row(self.get().bytes, id as usize, out)?;
        }
        Ok(())
    }
}

impl fmt::Debug for PreparedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PreparedMatrix{:?} {}", self.shape(), self.form())
    }
}

/// x·Wᵀ + b of several matrices that share x [T, k]: one tensor [T, n] each. Together they cost one start of the threads, and one rounding of x.
///
/// # Errors
/// If a shape does not fit, a bias is not f32, or memory runs out.
pub fn multiply_prepared(
    rt: &Runtime,
    x: &Tensor,
    weights: &[(&PreparedMatrix, Option<&Tensor>)],
) -> Result<Vec<Tensor>> {
    let t = x.dim(0);
    let mut ys = Vec::with_capacity(weights.len());
    for (w, _) in weights {
        ys.push(rt.empty(&[t, w.shape()[0]], DType::F32, Category::Activations)?);
    }
    let mut outputs = Vec::with_capacity(weights.len());
    for ((w, bias), y) in weights.iter().zip(&mut ys) {
        let bias = bias.map(Tensor::f32).transpose()?;
        outputs.push(Output { weight: w.get(), bias, y: y.f32_mut()? });
    }
    multiply(rt.device(), t, x.f32()?, &mut outputs)?;
    Ok(ys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_read_and_multiplied_as_it_was() {
        let rt = Runtime::new(1);
        let w = rt.from_f32(&[2, 3], &[1., 0., 0., 0., 1., 2.], Category::Weights).unwrap();
        let x = rt.from_f32(&[1, 3], &[4., 5., 6.], Category::Activations).unwrap();
        let b = rt.from_f32(&[2], &[10., 20.], Category::Weights).unwrap();
        if !Layout::supported(Form::F32, rt.device()) {
            return;
        }
        for form in [Form::F32, Form::Bf16] {
            let p = PreparedMatrix::from_tensor(&rt, &mut PreparedSpace::new(), form, &w).unwrap();
            let y = multiply_prepared(&rt, &x, &[(&p, None), (&p, Some(&b))]).unwrap();
            assert_eq!((y[0].f32().unwrap(), y[1].f32().unwrap()), (&[4., 17.][..], &[14., 37.][..]));
            let mut rows = [0f32; 6];
            p.gather(&[1, 0], &mut rows).unwrap();
            assert_eq!(rows, [0., 1., 2., 1., 0., 0.]);
            assert!(p.gather(&[2], &mut rows[..3]).is_err());
        }
        assert!(PreparedMatrix::from_tensor(&rt, &mut PreparedSpace::new(), Form::F32, &b).is_err());
    }

    #[test]
    fn matrices_share_blocks_and_keep_apart() {
        let rt = Runtime::new(2);
        let mut space = PreparedSpace::new();
        let make = |space: &mut PreparedSpace, i: usize, n: usize| {
            PreparedMatrix::from_rows(&rt, space, Form::Q8, [n, 512], &|row, out| out.fill((i + row) as u8)).unwrap()
        };
        let sizes = [3000, 5, 3000, 20_000, 9000, 17, 9000, 9000];
        let all: Vec<_> = sizes.iter().enumerate().map(|(i, &n)| make(&mut space, i, n)).collect();
        for (i, (m, &n)) in all.iter().zip(&sizes).enumerate() {
            let alone = make(&mut PreparedSpace::new(), i, n);
            assert_eq!(m.get().bytes, alone.get().bytes, "matrix {i}");
        }
        drop((all, space));
        assert_eq!(rt.pool().current(Category::Weights), 0);
    }
}
