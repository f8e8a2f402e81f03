//! Operands that may be f32 or bf16.

use half::bf16;

/// A read-only operand: f32 or bf16 values, row-major.
#[derive(Clone, Copy, Debug)]
pub enum Mat<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16, widened exactly to f32 as it is read.
    Bf16(&'a [bf16]),
}

impl<'a> Mat<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Mat::F32(x) => x.len(),
            Mat::Bf16(x) => x.len(),
        }
    }

    /// Whether the elements are bf16.
    pub fn is_bf16(&self) -> bool {
        matches!(self, Mat::Bf16(_))
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One element, widened.
    #[inline(always)]
    pub fn at(&self, i: usize) -> f32 {
        match self {
            Mat::F32(x) => x[i],
            Mat::Bf16(x) => x[i].to_f32(),
        }
    }

    /// The elements of a range.
    pub fn slice(&self, r: std::ops::Range<usize>) -> Mat<'a> {
        match self {
            Mat::F32(x) => Mat::F32(&x[r]),
            Mat::Bf16(x) => Mat::Bf16(&x[r]),
        }
    }
}

impl<'a> From<&'a [f32]> for Mat<'a> {
    fn from(x: &'a [f32]) -> Self {
        Mat::F32(x)
    }
}
impl<'a> From<&'a [bf16]> for Mat<'a> {
    fn from(x: &'a [bf16]) -> Self {
        Mat::Bf16(x)
    }
}
impl<'a> From<&'a Vec<f32>> for Mat<'a> {
    fn from(x: &'a Vec<f32>) -> Self {
        Mat::F32(x)
    }
}
