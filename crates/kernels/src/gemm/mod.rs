//! Matrix multiply, the call: C = α·op(A)·op(B) [+ C] [+ bias].
//!
//! The scheme is Goto & van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34, 2008): panels packed for
//! the caches, a small block of C in registers. What is added here is that a cut through k never splits a sum: the next block
//! takes the chain up from C.

mod arithmetic;
mod block;
mod grouped;
mod kernel;
mod narrow;
pub mod plain;
pub mod prepared;
mod simulate;
#[cfg(test)]
mod tests;
mod tile;
pub mod tuning;

/// Whether this process may use AMX.
pub(crate) fn amx_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return tile::amx::available();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
pub(crate) use self::tile::avx512::pack::transpose16;

pub use self::arithmetic::Arithmetic;
use self::block::{Finish, Operand};
pub use self::grouped::{Grouped, grouped};
pub use self::kernel::Blocking;
use self::kernel::{Product, run};
use self::tile::{BLOCK, int8};
use crate::error::{bad_shape, check_len};
pub use crate::lowp::Operand as Role;
use crate::profile::{self, Cost, Shape, bytes_of};
use crate::team::SendPtr;
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
    /// How exact it must be.
    pub arithmetic: Arithmetic,
    /// What A and B are in a linear layer. Only block recipes care: a weight shares its scales over square blocks, so that it is rounded to
    /// the same values whichever way it is read, and gradients may have a format of their own.
    pub roles: [Role; 2],
    /// Rounds a gradient at random, with this seed, where the arithmetic is a block recipe: its mean then is the value itself.
    pub gradient_noise: Option<u64>,
    /// Scales of A and B that are known beforehand, for a recipe with delayed scaling; `None` takes the operand's own magnitude. No other
    /// arithmetic looks at them.
    pub scales: [Option<f32>; 2],
}

impl<'a> Gemm<'a> {
    /// C[M,N] = A[M,K] · B[N,K]ᵀ: a linear layer forward, with W stored [out, in].
    pub fn nt(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        let arithmetic = Arithmetic::F32;
        Gemm {
            m,
            n,
            k,
            a,
            a_trans: false,
            b,
            b_trans: true,
            alpha: 1.0,
            accumulate: false,
            bias: None,
            arithmetic,
            roles: [Role::Activation, Role::Weight],
            gradient_noise: None,
            scales: [None; 2],
        }
    }
    /// C[M,N] = A[M,K] · B[K,N]: the gradient of a linear layer's input.
    pub fn nn(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        Gemm { b_trans: false, roles: [Role::Gradient, Role::Weight], ..Gemm::nt(m, n, k, a, b) }
    }
    /// C[M,N] = A[K,M]ᵀ · B[K,N]: the gradient of a linear layer's weight.
    pub fn tn(m: usize, n: usize, k: usize, a: Mat<'a>, b: Mat<'a>) -> Self {
        let roles = [Role::Gradient, Role::Activation];
        Gemm { a_trans: true, b_trans: false, roles, ..Gemm::nt(m, n, k, a, b) }
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
    /// Permits a less exact product.
    pub fn arithmetic(self, arithmetic: Arithmetic) -> Self {
        Gemm { arithmetic, ..self }
    }
    /// Rounds a gradient at random, in a block recipe.
    pub fn gradient_noise(self, seed: Option<u64>) -> Self {
        Gemm { gradient_noise: seed, ..self }
    }
    /// Scales of A and B that are known beforehand.
    pub fn scales(self, scales: [Option<f32>; 2]) -> Self {
        Gemm { scales, ..self }
    }
    /// Adds a bias of length N to every row.
    pub fn bias(self, bias: Option<&'a [f32]>) -> Self {
        Gemm { bias, ..self }
    }

    /// Which product of a linear layer it is, for profiles.
    fn role(&self) -> &'static str {
        match (self.a_trans, self.b_trans) {
            (false, true) => profile::FORWARD,
            (false, false) => profile::DGRAD,
            (true, false) => profile::WGRAD,
            (true, true) => "gemm tt",
        }
    }

    fn cost(&self) -> Cost {
        let (m, n, k) = (self.m as f64, self.n as f64, self.k as f64);
        let passes = if self.accumulate { 2.0 } else { 1.0 };
        Cost {
            flops: 2.0 * m * n * k,
            bytes: bytes_of(&self.a) + bytes_of(&self.b) + 4.0 * m * n * passes,
            shape: Shape::Product {
                m: Some(self.m),
                n: self.n,
                k: Some(self.k),
                bf16: (self.a.is_bf16(), self.b.is_bf16()),
                arithmetic: self.arithmetic,
            },
        }
    }
}

/// Runs one product.
///
/// Every element of C is one chain of multiply-adds (another fixed sequence with [`Isa::Amx`](crate::Isa::Amx), or where a faster way is permitted and
/// there is one: [`Arithmetic`]) over k = 0, 1, …, K−1 (starting from C when accumulating with α = 1), then
/// the bias; so a row of C depends only on its row of op(A) and on op(B), to the bit, whatever M, N and the threads are.
///
/// # Errors
/// If a slice's length is not what the sizes ask for, the bias has not N elements, or there is no memory for packing.
pub fn gemm(dev: &Device, g: &Gemm<'_>, c: &mut [f32]) -> Result<()> {
    gemm_blocked(dev, g, c, &dev.blocking(g.arithmetic))
}

/// [`gemm`] with chosen block sizes, for measuring and testing them.
///
/// # Errors
/// As [`gemm`].
#[doc(hidden)]
pub fn gemm_blocked(dev: &Device, g: &Gemm<'_>, c: &mut [f32], by: &Blocking) -> Result<()> {
    // Saturated, a product of absurd sizes is longer than any slice.
    check_len("gemm", "A", g.a.len(), g.m.saturating_mul(g.k))?;
    check_len("gemm", "B", g.b.len(), g.k.saturating_mul(g.n))?;
    check_len("gemm", "C", c.len(), g.m.saturating_mul(g.n))?;
    if let Some(b) = g.bias {
        check_len("gemm", "bias", b.len(), g.n)?;
    }
    if g.bias.is_some() && g.accumulate {
        return bad_shape("gemm", "a bias together with accumulate would be added twice over two calls; use one");
    }
    if g.m == 0 || g.n == 0 {
        return Ok(());
    }
    let _span = dev.profiler().kernel(g.role(), || g.cost());
    let finish = Finish { alpha: g.alpha, bias: g.bias.map_or(std::ptr::null(), <[f32]>::as_ptr) };
    if g.k == 0 {
        if !g.accumulate {
            c.fill(0.0);
        }
        if let Some(bias) = g.bias {
            c.chunks_exact_mut(g.n).for_each(|row| row.copy_from_slice(bias));
        }
        return Ok(());
    }
    if let Arithmetic::Simulated(recipe) = g.arithmetic {
        return simulate::gemm(dev, g, recipe, c, by);
    }
    let mut space;
    let mut b = Operand::new(&g.b, if g.b_trans { g.k } else { g.n }, g.b_trans, g.arithmetic);
    if g.arithmetic == Arithmetic::Int8Block && g.roles[1] == Role::Weight {
        let (rows, columns) = if g.b_trans { (g.n, g.k) } else { (g.k, g.n) };
        let across = columns.div_ceil(BLOCK);
        space = dev.scratch().scales().take(rows.div_ceil(BLOCK) * across)?;
        let amax = space.as_mut_slice();
        dev.team().for_chunks_mut(amax, across, &|i, amax| {
            let from = i * BLOCK;
            let rows = g.b.slice(from * columns..rows.min(from + BLOCK) * columns);
            int8::greatest_of_blocks(dev.isa(), &rows, columns, amax);
        });
        b = b.with_scales(amax.as_ptr(), across);
    }
    let mut a = Operand::new(&g.a, if g.a_trans { g.m } else { g.k }, !g.a_trans, g.arithmetic);
    if let (Role::Gradient, Some(seed)) = (g.roles[0], g.gradient_noise) {
        a = a.with_noise(seed);
    }
    let product = Product {
        m: g.m,
        n: g.n,
        k: g.k,
        a,
        b,
        c: SendPtr(c.as_mut_ptr()),
        from_c: g.accumulate,
        finish: (g.alpha != 1.0 || g.bias.is_some()).then_some(finish),
        arithmetic: g.arithmetic,
    };
    if g.accumulate && g.alpha != 1.0 {
        // The factor belongs to the sum, not to what C held: the sums wait beside C until they are complete.
        let mut space = dev.scratch().sums().take(c.len())?;
        let sums = space.as_mut_slice();
        let beside = Product { c: SendPtr(sums.as_mut_ptr()), from_c: false, ..product };
        // SAFETY: lengths were checked above; `sums` has M × N values of its own.
        unsafe { run(dev, &beside, by)? };
        let sums = &*sums;
        const PIECE: usize = 1 << 14;
        dev.team().for_chunks_mut(c, PIECE, &|i, c| {
            c.iter_mut().zip(&sums[i * PIECE..]).for_each(|(c, s)| *c += s);
        });
        return Ok(());
    }
    // SAFETY: lengths were checked above, and C is borrowed mutably.
    unsafe { run(dev, &product, by) }
}
