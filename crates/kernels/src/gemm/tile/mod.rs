//! Registers: a small block of C multiplied from packed panels, and the packing of those panels, for each instruction set.
//!
//! A *panel* is a few rows of op(A) or a few columns of op(B), laid out so that the multiply reads it front to back: for each
//! k in turn, one value of every row (or column). The last panel of an operand is narrower; its layout follows its own width.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod bf16_dot;
pub(crate) mod int8;
pub(crate) mod portable;

/// `tile::<rows, vectors>(arguments)` with both sizes as constants: 1 to 8 rows, 1 to 3 vectors.
#[cfg(target_arch = "x86_64")]
macro_rules! by_size {
    ($tile:ident, $rows:expr, $vectors:expr, $arguments:tt) => {
        match $vectors {
            1 => by_size!(@rows $tile, $rows, 1, $arguments),
            2 => by_size!(@rows $tile, $rows, 2, $arguments),
            _ => by_size!(@rows $tile, $rows, 3, $arguments),
        }
    };
    (@rows $tile:ident, $rows:expr, $v:literal, $arguments:tt) => {
        match $rows {
            1 => $tile::<1, $v> $arguments,
            2 => $tile::<2, $v> $arguments,
            3 => $tile::<3, $v> $arguments,
            4 => $tile::<4, $v> $arguments,
            5 => $tile::<5, $v> $arguments,
            6 => $tile::<6, $v> $arguments,
            7 => $tile::<7, $v> $arguments,
            _ => $tile::<8, $v> $arguments,
        }
    };
}
#[cfg(target_arch = "x86_64")]
use by_size;

use half::bf16;

use crate::lowp::Keys;

/// Where a panel's elements lie in memory: f32 or bf16, at an element stride of 1 one way and `ld` the other way.
#[derive(Clone, Copy)]
pub(crate) enum Src {
    F32(*const f32),
    Bf16(*const bf16),
}

impl Src {
    /// The place `n` elements on.
    ///
    /// # Safety
    /// It lies in the same slice, or one past its end.
    pub(crate) unsafe fn add(self, n: usize) -> Src {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Src::F32(x) => Src::F32(x.add(n)),
                Src::Bf16(x) => Src::Bf16(x.add(n)),
            }
        }
    }
}

/// Which operand a panel is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    A,
    B,
}

/// What packing must know besides the sizes.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// The parts that a value is split into (see [`Tile::planes`]).
    pub(crate) planes: usize,
    /// Whose panel it is.
    pub(crate) side: Side,
    /// Scales that a block shares with others; without them each row of a panel finds its own (only [`int8`]).
    pub(crate) scales: Option<BlockScales>,
    /// Rounding at random instead of to nearest (only [`int8`]).
    pub(crate) noise: Option<Noise>,
}

/// Random numbers for the values of a matrix: each draws that of its place in memory, so that tiles and threads make no difference.
#[derive(Clone, Copy)]
pub(crate) struct Noise {
    pub(crate) keys: Keys,
    /// Place of the first value that is packed.
    pub(crate) at: usize,
}

/// The scales of a matrix in square blocks of [`BLOCK`] × [`BLOCK`], seen from one element on.
#[derive(Clone, Copy)]
pub(crate) struct BlockScales {
    pub(crate) amax: *const f32,
    /// From one block of rows to the next, and from one block of steps of k to the next.
    pub(crate) strides: (usize, usize),
    /// Row and step that packing starts at.
    pub(crate) at: (usize, usize),
}

/// Side of a block that shares a scale.
pub(crate) const BLOCK: usize = 128;

impl BlockScales {
    /// The greatest magnitude of the block that row `i` and step `p` from here lie in.
    ///
    /// # Safety
    /// They lie in the matrix.
    #[inline(always)]
    pub(crate) unsafe fn amax(&self, i: usize, p: usize) -> f32 {
        let (row, step) = ((self.at.0 + i) / BLOCK, (self.at.1 + p) / BLOCK);
        // SAFETY: the caller's promise.
        unsafe { *self.amax.add(row * self.strides.0 + step * self.strides.1) }
    }
}

/// A packed panel.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    pub(crate) at: *const f32,
    /// How many parts each value is split into; 1 but for [`amx`].
    pub(crate) planes: usize,
}

impl Panel {
    /// The place that `values` packed values lie before.
    pub(crate) fn after<T: Tile>(self, values: usize) -> Panel {
        Panel { at: self.at.wrapping_add(T::room(values, self.planes)), ..self }
    }
}

/// The work of one instruction set.
pub(crate) trait Tile {
    /// Rows of a full A panel.
    const MR: usize;
    /// Columns of a full B panel.
    const NR: usize;
    /// Values in a register: the width of a B panel is a multiple of this, padded with zeros.
    const LANES: usize;

    /// The height of an A panel is a multiple of this, padded with zeros.
    const ROW_LANES: usize = 1;
    /// The steps of a panel are a multiple of this, padded with zeros. Where k is cut, it is cut at such a multiple.
    const K_UNIT: usize = 1;

    /// The parts that values of a source are packed as, if f32 may take `most`.
    fn planes(_src: Src, _most: usize) -> usize {
        1
    }

    /// The f32 that `values` packed values (padding included) take.
    fn room(values: usize, _planes: usize) -> usize {
        values
    }

    /// Runs `work`, in which this thread calls [`Tile::multiply`].
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn multiply_block(work: impl FnOnce()) {
        work();
    }

    /// C[mr, nr] = (C or 0) + Σₖ a[k]·b[k], each element one chain over k in order (for [`amx`], [`bf16_dot`]
    /// and [`int8`] a fixed sequence of their own).
    ///
    /// `a` is a panel of width `mr` rounded up to ROW_LANES, `b` one of width `nr` rounded up to LANES.
    ///
    /// # Safety
    /// 1 ≤ `mr` ≤ MR, 1 ≤ `nr` ≤ NR; the panels hold `k` steps; `c` has `mr` rows of `nr` elements at stride `ldc`, which
    /// nobody else touches; the processor has the instruction set.
    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool);

    /// The most rows of A that [`Tile::stream`] takes; 0 where there is no such path.
    const STREAM_ROWS: usize = 0;

    /// Panels of B that [`Tile::stream`] takes at a time.
    const STREAM_PANELS: usize = 1;
    /// The form in which [`Tile::stream`] takes the panel of A.
    const STREAM_SIDE: Side = Side::A;

    /// C[m, n] = (C or 0) + A·B with B straight from memory, stored along k: column j at j·`ldb`, to be split into `b_planes` parts.
    /// `a` is one panel of width m, in the form STREAM_SIDE. The bits are those of [`Tile::multiply`].
    ///
    /// # Safety
    /// 1 ≤ m ≤ STREAM_ROWS; the panel holds k steps, B has n rows of k; `c` as in [`Tile::multiply`].
    unsafe fn stream(
        (_m, _n, _k): (usize, usize, usize),
        _a: Panel,
        (_b, _b_planes): (Src, usize),
        _ldb: usize,
        _c: *mut f32,
        _ldc: usize,
        _from_c: bool,
    ) {
        unreachable!("STREAM_ROWS is 0")
    }

    /// `dst[p·width + i] = src[i·ld + p]` for i < `rows`, p < `k`; zero for `rows` ≤ i < `width`: a source whose rows run
    /// along k. `form`: what else makes a difference.
    ///
    /// # Safety
    /// The source covers `rows` rows of `k` elements, `dst` takes `width`·`k`; the processor has the instruction set.
    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, form: Form, dst: *mut f32);

    /// Packs a whole block whose memory rows run across the panels: for each panel starting at column i,
    /// `dst[i·k + p·width + c] = src[p·ld + i + c]`, zero from `count` on. Panels are `panel` wide, the last one `count` % `panel`
    /// rounded up to `lanes`. All panels at once, because the memory rows then are read in long pieces.
    ///
    /// # Safety
    /// The source covers `k` rows of `count` elements, `dst` takes `count` rounded up to `lanes`, times `k`; the processor has
    /// the instruction set.
    unsafe fn pack_along(
        src: Src,
        ld: usize,
        count: usize,
        k: usize,
        panel: usize,
        lanes: usize,
        form: Form,
        dst: *mut f32,
    );
}
