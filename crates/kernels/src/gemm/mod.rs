//! Matrix multiply, the call: C = α·op(A)·op(B) [+ C] [+ bias].

pub mod plain;

use crate::error::{bad_shape, check_len};
use crate::{Device, Mat, Result};

/// One matrix product. `op(A)` is M × K, `op(B)` is K × N, C is M × N, all row-major.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// A, stored M × K, or K × M when `a_trans`.
    pub a: Mat<'a>,
    /// Whether A is stored transposed.
    pub a_trans: bool,
    /// B, stored K × N, or N × K when `b_trans`.
    pub b: Mat<'a>,
    /// Whether B is stored transposed.
    pub b_trans: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Start the sums from C instead of zero. With `alpha` = 1 the chain over k continues the sum in C.
    pub accumulate: bool,
    /// Added to every row of C after the product, length N.
    pub bias: Option<&'a [f32]>,
}

impl<'a> Gemm<'a> {
    /// C[M,N] = A[M,K] · B[N,K]ᵀ: a linear layer forward, with W stored [out, in].
    pub fn nt(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        Gemm { m, n, k, a, a_trans: false, b, b_trans: true, alpha: 1.0, accumulate: false, bias: None }
    }
    /// C[M,N] = A[M,K] · B[K,N]: the gradient of a linear layer's input.
    pub fn nn(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        Gemm { b_trans: false, ..Gemm::nt(m, n, k, a, b) }
    }
    /// C[M,N] = A[K,M]ᵀ · B[K,N]: the gradient of a linear layer's weight.
    pub fn tn(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        Gemm { a_trans: true, b_trans: false, ..Gemm::nt(m, n, k, a, b) }
    }
    /// C[M,N] = A[K,M]ᵀ · B[N,K]ᵀ.
    pub fn tt(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        Gemm { a_trans: true, ..Gemm::nt(m, n, k, a, b) }
    }
    /// Adds to C instead of overwriting it.
    pub fn accumulate(self, yes: bool) -> Self {
        Gemm { accumulate: yes, ..self }
    }
    /// Scales the product.
    pub fn alpha(self, alpha: f32) -> Self {
        Gemm { alpha, ..self }
    }
    /// Adds a bias of length N to every row.
    pub fn bias(self, bias: Option<&'a [f32]>) -> Self {
        Gemm { bias, ..self }
    }
}

/// Runs one product.
///
/// Every element of C is one chain of multiply-adds over k = 0, 1, …, K−1 (starting from C when accumulating with α = 1), then
/// the bias; so a row of C depends only on its row of op(A) and on op(B), to the bit, whatever M, N and the threads are.
///
/// # Errors
/// If a slice's length is not what the sizes ask for, or the bias has not N elements.
pub fn gemm(dev: &Device, g: &Gemm<'_>, c: &mut [f32]) -> Result<()> {
    check_len("gemm", "A", g.a.len(), g.m * g.k)?;
    check_len("gemm", "B", g.b.len(), g.k * g.n)?;
    check_len("gemm", "C", c.len(), g.m * g.n)?;
    if let Some(b) = g.bias {
        check_len("gemm", "bias", b.len(), g.n)?;
    }
    if g.bias.is_some() && g.accumulate {
        return bad_shape("gemm", "a bias together with accumulate would be added twice over two calls; use one");
    }
    let _ = dev;
    plain::gemm(g, c);
    Ok(())
}
