//! What operations run on: a device and a pool.

use std::sync::Arc;

use half::bf16;
use phalanx_kernels::Device;

use crate::error::{Result, TensorError};
use crate::{Category, DType, Pool, Tensor};

/// A rank's processor and memory. Cheap to clone; clones share both.
#[derive(Clone)]
pub struct Runtime {
    device: Arc<Device>,
    pool: Pool,
}

impl Runtime {
    /// A runtime on the best instruction set with `threads` threads.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn try_new(threads: usize) -> Result<Runtime> {
        Ok(Runtime::on(Device::try_new(threads)?))
    }

    /// As [`Runtime::try_new`], for tests and examples.
    ///
    /// # Panics
    /// If the system refuses a thread.
    pub fn new(threads: usize) -> Runtime {
        Runtime::on(Device::new(threads))
    }

    /// A runtime on a chosen device.
    pub fn on(device: Device) -> Runtime {
        Runtime { device: Arc::new(device), pool: Pool::new() }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The memory pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A tensor whose contents are arbitrary until written.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn empty(&self, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        Tensor::from_pool(&self.pool, shape, dtype, category)
    }

    /// An f32 tensor of zeros.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn zeros(&self, shape: &[usize], category: Category) -> Result<Tensor> {
        let mut t = self.empty(shape, DType::F32, category)?;
        t.f32_mut()?.fill(0.0);
        Ok(t)
    }

    /// An f32 tensor of given values.
    ///
    /// # Errors
    /// If the number of values is not the shape's, or memory runs out.
    pub fn from_f32(&self, shape: &[usize], values: &[f32], category: Category) -> Result<Tensor> {
        let mut t = self.empty(shape, DType::F32, category)?;
        if t.len() != values.len() {
            return Err(TensorError::Elements { what: "from_f32", shape: shape.to_vec(), elements: values.len() });
        }
        t.f32_mut()?.copy_from_slice(values);
        Ok(t)
    }

    /// A copy in another element type (or a fresh copy in the same).
    ///
    /// # Errors
    /// If memory runs out.
    pub fn cast(&self, x: &Tensor, dtype: DType, category: Category) -> Result<Tensor> {
        let mut out = self.empty(x.shape(), dtype, category)?;
        match (x.dtype(), dtype) {
            (DType::F32, DType::F32) => out.f32_mut()?.copy_from_slice(x.f32()?),
            (DType::Bf16, DType::Bf16) => out.bf16_mut()?.copy_from_slice(x.bf16()?),
            (DType::F32, DType::Bf16) => {
                phalanx_kernels::elementwise::to_bf16(&self.device, x.f32()?, out.bf16_mut()?)?
            }
            (DType::Bf16, DType::F32) => {
                phalanx_kernels::elementwise::from_bf16(&self.device, x.bf16()?, out.f32_mut()?)?
            }
        }
        Ok(out)
    }

    /// The values as f32, whatever the element type.
    ///
    /// # Errors
    /// Never for the element types of today; the signature leaves room for quantised ones.
    pub fn to_vec(&self, x: &Tensor) -> Result<Vec<f32>> {
        Ok(match x.dtype() {
            DType::F32 => x.f32()?.to_vec(),
            DType::Bf16 => x.bf16()?.iter().map(|v: &bf16| v.to_f32()).collect(),
        })
    }
}
