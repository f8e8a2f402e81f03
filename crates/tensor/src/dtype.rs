//! Element types of tensors.

use std::fmt;

/// What the elements of a [`crate::Tensor`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float: arithmetic, master weights, gradients.
    F32,
    /// bfloat16: storage; widened as it is read.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
        })
    }
}
