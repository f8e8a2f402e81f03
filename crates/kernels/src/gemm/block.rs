//! Caches: packing blocks of the operands into panels, and multiplying packed blocks tile by tile.

use super::Arithmetic;
use super::tile::{BlockScales, Form, Noise, Panel, Side, Src, Tile};
use crate::Mat;
use crate::lowp::Keys;

/// An operand as the packing sees it: op(A)[i, p] or op(B)[p, i], with i along the panel and p along k.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    src: Src,
    ld: usize,
    /// Whether memory rows run along k: element (i, p) lies at i·ld + p; else at p·ld + i.
    k_contiguous: bool,
    /// The most parts that a value may be split into (see [`Tile::planes`]).
    most_planes: usize,
    /// The scales that blocks of it share, if they do (see [`Form`]); `at` is (0, 0).
    scales: Option<BlockScales>,
    /// Whether it is rounded at random, and with which numbers.
    noise: Option<Keys>,
}

// SAFETY: a read-only view; `gemm` keeps the borrow behind it alive until every task is done.
unsafe impl Send for Operand {}
// SAFETY: as above.
unsafe impl Sync for Operand {}

impl Operand {
    pub(crate) fn new(m: &Mat<'_>, ld: usize, k_contiguous: bool, arithmetic: Arithmetic) -> Operand {
        let src = match m {
            Mat::F32(x) => Src::F32(x.as_ptr()),
            Mat::Bf16(x) => Src::Bf16(x.as_ptr()),
        };
        Operand { src, ld, k_contiguous, most_planes: arithmetic.planes(), scales: None, noise: None }
    }

    /// The same, rounded at random.
    pub(crate) fn with_noise(self, seed: u64) -> Operand {
        Operand { noise: Some(Keys::new(seed)), ..self }
    }

    /// The same with scales for its square blocks: the greatest magnitudes of the matrix as it lies in memory, `columns` blocks a row.
    pub(crate) fn with_scales(self, amax: *const f32, columns: usize) -> Operand {
        let strides = if self.k_contiguous { (columns, 1) } else { (1, columns) };
        Operand { scales: Some(BlockScales { amax, strides, at: (0, 0) }), ..self }
    }

    /// The parts that a value is packed as.
    pub(crate) fn planes<T: Tile>(&self) -> usize {
        T::planes(self.src, self.most_planes)
    }

    /// The f32 that `values` packed values take.
    pub(crate) fn room<T: Tile>(&self, values: usize) -> usize {
        T::room(values, self.planes::<T>())
    }

    /// A packed panel of this operand.
    pub(crate) fn panel<T: Tile>(&self, at: *const f32) -> Panel {
        Panel { at, planes: self.planes::<T>() }
    }

    /// How far apart the rows lie, if memory rows run along k.
    pub(crate) fn along_k(&self) -> Option<usize> {
        self.k_contiguous.then_some(self.ld)
    }

    /// Where row `i` starts, if memory rows run along k.
    ///
    /// # Safety
    /// The row lies in the operand.
    pub(crate) unsafe fn row(&self, i: usize) -> Src {
        // SAFETY: the caller's promise.
        unsafe { self.src.add(i * self.ld) }
    }

    /// Packs rows `i0..i0+count`, steps `p0..p0+k`, into panels of `panel` rows; a narrower last panel is padded with zeros to
    /// a multiple of `lanes`, as k is to K_UNIT.
    ///
    /// # Safety
    /// The ranges lie in the operand; `dst` takes `count` rounded up to `lanes`, times `k` rounded up to K_UNIT values; the
    /// processor has the instruction set of `T`.
    pub(crate) unsafe fn pack<T: Tile>(
        &self,
        (i0, count): (usize, usize),
        (p0, k): (usize, usize),
        side: Side,
        dst: *mut f32,
    ) {
        let (panel, lanes) = match side {
            Side::A => (T::MR, T::ROW_LANES),
            Side::B => (T::NR, T::LANES),
        };
        let form = |i: usize| {
            let scales = self.scales.map(|s| BlockScales { at: (i, p0), ..s });
            let at = if self.k_contiguous { i * self.ld + p0 } else { p0 * self.ld + i };
            let noise = self.noise.map(|keys| Noise { keys, at });
            Form { planes: self.planes::<T>(), side, scales, noise }
        };
        let padded = k.next_multiple_of(T::K_UNIT);
        // SAFETY: all parts of what the caller promises; the panels before the one at i are full, so it starts at i·padded.
        unsafe {
            if !self.k_contiguous {
                return T::pack_along(self.src.add(p0 * self.ld + i0), self.ld, count, k, panel, lanes, form(i0), dst);
            }
            for i in (0..count).step_by(panel) {
                let rows = panel.min(count - i);
                let src = self.src.add((i0 + i) * self.ld + p0);
                let dst = dst.add(self.room::<T>(i * padded));
                T::pack_across(src, self.ld, rows, k, rows.next_multiple_of(lanes), form(i0 + i), dst);
            }
        }
    }
}

/// What happens to a finished sum: C = α·sum + bias.
#[derive(Clone, Copy)]
pub(crate) struct Finish {
    pub(crate) alpha: f32,
    /// Bias of the first column, or null.
    pub(crate) bias: *const f32,
}

// SAFETY: a read-only view, alive as long as the call.
unsafe impl Send for Finish {}
// SAFETY: as above.
unsafe impl Sync for Finish {}

impl Finish {
    /// The same for the columns from `j` on.
    pub(crate) fn at_column(self, j: usize) -> Finish {
        Finish { bias: if self.bias.is_null() { self.bias } else { self.bias.wrapping_add(j) }, ..self }
    }

    /// # Safety
    /// `c` has `m` rows of `n` elements at stride `ldc`; the bias, if any, has `n`.
    pub(crate) unsafe fn apply(&self, c: *mut f32, ldc: usize, m: usize, n: usize) {
        for i in 0..m {
            // SAFETY: the caller's promise.
            let (row, bias) = unsafe {
                (
                    std::slice::from_raw_parts_mut(c.add(i * ldc), n),
                    (!self.bias.is_null()).then(|| std::slice::from_raw_parts(self.bias, n)),
                )
            };
            if self.alpha != 1.0 {
                row.iter_mut().for_each(|x| *x *= self.alpha);
            }
            if let Some(bias) = bias {
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
        }
    }
}

/// C[m, n] = (C or 0) + A·B over packed blocks of depth `k`, then `finish` if the sums are complete.
///
/// # Safety
/// `a` and `b` are packed with panels of T::MR (padded to T::ROW_LANES) and T::NR (padded to T::LANES), all of depth `k`; `c` has `m` rows of
/// `n` elements at stride `ldc`, which nobody else touches; the processor has the instruction set of `T`.
pub(crate) unsafe fn multiply<T: Tile>(
    (m, n, k): (usize, usize, usize),
    a: Panel,
    b: Panel,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
    finish: Option<Finish>,
) {
    let padded = k.next_multiple_of(T::K_UNIT);
    // A panel of B stays in the first-level cache while the block of A, from the second, passes by.
    let all = || {
        for j in (0..n).step_by(T::NR) {
            let nr = T::NR.min(n - j);
            for i in (0..m).step_by(T::MR) {
                let mr = T::MR.min(m - i);
                // SAFETY: the tile is a part of C; the panels before are full, so these start at i·padded and j·padded.
                unsafe {
                    let tile = c.add(i * ldc + j);
                    T::multiply(mr, nr, k, a.after::<T>(i * padded), b.after::<T>(j * padded), tile, ldc, from_c);
                    if let Some(f) = finish {
                        f.at_column(j).apply(tile, ldc, mr, nr);
                    }
                }
            }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { T::multiply_block(all) }
}
