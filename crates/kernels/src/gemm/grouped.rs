//! One product for ragged groups of rows, each with its own B: the experts of a mixture, the adapters of a batch.

use super::block::Operand;
use super::kernel::{Blocking, Product, run_groups};
use super::{Arithmetic, Gemm, gemm};
use crate::error::{bad_shape, check_len};
use crate::profile::{Cost, Shape, bytes_of};
use crate::team::SendPtr;
use crate::{Device, Mat, Result};

/// C[rows of g, N] = A[rows of g, K] · op(B[g]) for every group g.
#[derive(Clone, Copy, Debug)]
pub struct Grouped<'a> {
    /// Columns of C.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// A, stored T × K, the rows of a group one after another.
    pub a: Mat<'a>,
    /// Where each group's rows start, and the end: G + 1 values, from 0 to T, none below the one before. Groups may be empty.
    pub offsets: &'a [usize],
    /// One B a group, stored K × N, or N × K when `b_trans`.
    pub b: &'a [Mat<'a>],
    /// Whether each B is stored transposed.
    pub b_trans: bool,
    /// Start the sums from C instead of zero.
    pub accumulate: bool,
    /// How exact the products must be. A block recipe takes the groups one by one.
    pub arithmetic: Arithmetic,
    /// As [`Gemm::gradient_noise`].
    pub gradient_noise: Option<u64>,
}

impl<'a> Grouped<'a> {
    /// C = A · B[g]ᵀ: linear layers forward, with each W stored [out, in]; N = out, K = in.
    pub fn nt(n: usize, k: usize, a: Mat<'a>, offsets: &'a [usize], b: &'a [Mat<'a>]) -> Self {
        let (accumulate, arithmetic) = (false, Arithmetic::F32);
        Grouped { n, k, a, offsets, b, b_trans: true, accumulate, arithmetic, gradient_noise: None }
    }
    /// C = A · B[g]: the gradient of linear layers' inputs; N = in, K = out.
    pub fn nn(n: usize, k: usize, a: Mat<'a>, offsets: &'a [usize], b: &'a [Mat<'a>]) -> Self {
        Grouped { b_trans: false, ..Grouped::nt(n, k, a, offsets, b) }
    }
    /// Permits less exact products.
    pub fn arithmetic(self, arithmetic: Arithmetic) -> Self {
        Grouped { arithmetic, ..self }
    }
    /// Rounds a gradient at random, in a block recipe.
    pub fn gradient_noise(self, seed: Option<u64>) -> Self {
        Grouped { gradient_noise: seed, ..self }
    }
}

/// Runs the products of all groups; C is T × N.
///
/// The bits are those of one [`gemm`](super::gemm) for each group. Groups of few rows share the threads, so that many small ones
/// cost no more than one large one.
///
/// # Errors
/// If a slice's length is not what the sizes ask for, the offsets do not rise from 0, or there is no memory for
/// packing.
pub fn grouped(dev: &Device, g: &Grouped<'_>, c: &mut [f32]) -> Result<()> {
    grouped_blocked(dev, g, c, &dev.blocking(g.arithmetic))
}

pub(super) fn grouped_blocked(dev: &Device, g: &Grouped<'_>, c: &mut [f32], by: &Blocking) -> Result<()> {
    check_len("grouped gemm", "offsets", g.offsets.len(), g.b.len() + 1)?;
    if g.offsets[0] != 0 || g.offsets.windows(2).any(|w| w[0] > w[1]) {
        return bad_shape("grouped gemm", format!("the offsets {:?} must rise from 0", g.offsets));
    }
    let rows = g.offsets[g.b.len()];
    check_len("grouped gemm", "A", g.a.len(), rows.saturating_mul(g.k))?;
    check_len("grouped gemm", "C", c.len(), rows.saturating_mul(g.n))?;
    for b in g.b {
        check_len("grouped gemm", "B of a group", b.len(), g.k.saturating_mul(g.n))?;
    }
    if rows == 0 || g.n == 0 {
        return Ok(());
    }
    if g.k == 0 {
        if !g.accumulate {
            c.fill(0.0);
        }
        return Ok(());
    }
    let _span = dev.profiler().kernel("gemm grouped", || {
        let passes = if g.accumulate { 2.0 } else { 1.0 };
        let used = g.b.iter().zip(g.offsets.windows(2)).filter(|(_, rows)| rows[0] < rows[1]);
        Cost {
            flops: 2.0 * rows as f64 * g.n as f64 * g.k as f64,
            bytes: bytes_of(&g.a) + used.map(|(b, _)| bytes_of(b)).sum::<f64>() + 4.0 * c.len() as f64 * passes,
            shape: Shape::Product {
                m: Some(rows),
                n: g.n,
                k: Some(g.k),
                bf16: (g.a.is_bf16(), g.b.iter().any(Mat::is_bf16)),
                arithmetic: g.arithmetic,
            },
        }
    });
    if g.arithmetic.is_block_recipe() {
        for (rows, b) in g.offsets.windows(2).map(|w| w[0]..w[1]).zip(g.b) {
            let a = g.a.slice(rows.start * g.k..rows.end * g.k);
            let one = if g.b_trans { Gemm::nt } else { Gemm::nn }(rows.len(), g.n, g.k, a, *b);
            let one = one.accumulate(g.accumulate).arithmetic(g.arithmetic).gradient_noise(g.gradient_noise);
            gemm(dev, &one, &mut c[rows.start * g.n..rows.end * g.n])?;
        }
        return Ok(());
    }
    let c = SendPtr(c.as_mut_ptr());
    let product = |i: usize| {
        let rows = g.offsets[i]..g.offsets[i + 1];
        Product {
            m: rows.len(),
            n: g.n,
            k: g.k,
            a: Operand::new(&g.a.slice(rows.start * g.k..rows.end * g.k), g.k, true, g.arithmetic),
            b: Operand::new(&g.b[i], if g.b_trans { g.k } else { g.n }, g.b_trans, g.arithmetic),
            c: SendPtr(c.get().wrapping_add(rows.start * g.n)),
            from_c: g.accumulate,
            finish: None,
            arithmetic: g.arithmetic,
        }
    };
    // SAFETY: lengths were checked above, the groups' rows do not overlap, and C is borrowed mutably.
    unsafe { run_groups(dev, g.offsets, &product, g.arithmetic, by) }
}
