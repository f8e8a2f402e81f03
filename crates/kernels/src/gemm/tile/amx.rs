//! AMX: 32 × 32 of C in four tile registers, products of bf16 with f32 sums, sixteen times the rate of f32 multiply-adds.
//!
//! **f32 operands keep their precision.** A value is the sum of three bf16 *planes* (8 + 8 + 8 bits of its 24), split without
//! loss; of the nine products of planes the six that matter at 2⁻²⁴ are made: (0,0), (0,1), (1,0), (0,2), (1,1), (2,0). A bf16
//! operand is one plane already. The idea is old ("Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
//! Computations", Henry, Tang & Heinecke, ARITH 2019); since the unit sums 32 products before it adds them to C, the error against
//! f64 is smaller than that of a chain of f32 multiply-adds (tests in `gemm/tests.rs`).
//!
//! **Same bits, whatever the batch.** An element of C is a fixed sequence of tile operations over its own row of A and its own
//! column of B, in steps of 32 of k; rows, columns and steps that are missing are zeros.
//!
//! Values below 2⁻¹²⁶·2¹⁶ lose low bits (the unit takes subnormals for zero). An infinite operand gives NaN: not finite all
//! the same.

mod multiply;
mod pack;
mod stream;
mod unit;

pub(crate) use unit::available;

use super::{Form, Panel, Src, Tile};

pub(crate) struct Amx;

/// Bytes of a tile: 16 rows of 64.
const TILE: usize = 1024;
/// Steps of k in a tile.
const STEP: usize = 32;

impl Tile for Amx {
    const MR: usize = 32;
    const NR: usize = 32;
    const LANES: usize = 16;
    const ROW_LANES: usize = 16;
    const K_UNIT: usize = STEP;

    fn planes(src: Src, most: usize) -> usize {
        match src {
            Src::F32(_) => most,
            Src::Bf16(_) => 1,
        }
    }

    fn room(values: usize, planes: usize) -> usize {
        // Two bytes a value and plane; values come in whole tiles.
        values * planes / 2
    }

    unsafe fn multiply_block(work: impl FnOnce()) {
        // SAFETY: the caller's promise: the processor has the unit.
        unsafe { unit::configure() };
        work();
        // SAFETY: as above.
        unsafe { unit::release() };
    }

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        // SAFETY: the caller's promise.
        unsafe { multiply::multiply(mr, nr, k.div_ceil(STEP), a, b, c, ldc, from_c) }
    }

    const STREAM_ROWS: usize = 32;
    const STREAM_PANELS: usize = stream::ROWS / Self::NR;
    const STREAM_SIDE: super::Side = super::Side::B;

    unsafe fn stream(
        size: (usize, usize, usize),
        a: Panel,
        (b, planes): (Src, usize),
        ldb: usize,
        c: *mut f32,
        ldc: usize,
        from_c: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match b {
                Src::F32(b) => stream::stream(size, a, (b, planes), ldb, c, ldc, from_c),
                Src::Bf16(b) => stream::stream(size, a, (b, planes), ldb, c, ldc, from_c),
            }
        }
    }

    unsafe fn pack_across(
        src: Src,
        ld: usize,
        rows: usize,
        k: usize,
        width: usize,
        Form { planes, side, .. }: Form,
        dst: *mut f32,
    ) {
        let by_rows = side == super::Side::A;
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => pack::across(x, ld, rows, k, width, planes, by_rows, pack::ahead(x), dst.cast()),
                Src::Bf16(x) => pack::across(x, ld, rows, k, width, planes, by_rows, pack::ahead(x), dst.cast()),
            }
        }
    }

    unsafe fn pack_along(
        src: Src,
        ld: usize,
        count: usize,
        k: usize,
        panel: usize,
        lanes: usize,
        Form { planes, side, .. }: Form,
        dst: *mut f32,
    ) {
        let by_rows = side == super::Side::A;
        // SAFETY: the caller's promise.
        unsafe {
            match src {
                Src::F32(x) => pack::along(x, ld, count, k, panel, lanes, planes, by_rows, dst.cast()),
                Src::Bf16(x) => pack::along(x, ld, count, k, panel, lanes, planes, by_rows, dst.cast()),
            }
        }
    }
}
