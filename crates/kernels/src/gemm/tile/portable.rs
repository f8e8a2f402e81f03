//! Plain Rust, shaped so that the compiler can use whatever vectors the target has.
//!
//! The chain is multiply, round, add, round: a fused step would call the C library on a target without the instruction.

use super::{Form, Panel, Src, Tile};

pub(crate) struct Portable;

const MR: usize = 4;
const NR: usize = 8;

impl Tile for Portable {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = NR;

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        let (a, b) = (a.at, b.at);
        // SAFETY: the caller's promise, passed on with the number of rows as a constant.
        unsafe {
            match mr {
                1 => tile::<1>(nr, k, a, b, c, ldc, from_c),
                2 => tile::<2>(nr, k, a, b, c, ldc, from_c),
                3 => tile::<3>(nr, k, a, b, c, ldc, from_c),
                _ => tile::<4>(nr, k, a, b, c, ldc, from_c),
            }
        }
    }

    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, _: Form, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack(src, ld, 1, rows, k, width, dst) }
    }

    unsafe fn pack_along(
        src: Src,
        ld: usize,
        count: usize,
        k: usize,
        panel: usize,
        lanes: usize,
        _: Form,
        dst: *mut f32,
    ) {
        for i in (0..count).step_by(panel) {
            let rows = panel.min(count - i);
            // SAFETY: a panel of the block that the caller promises.
            unsafe { pack(src.add(i), 1, ld, rows, k, rows.next_multiple_of(lanes), dst.add(i * k)) }
        }
    }
}

/// # Safety
/// As [`Tile::multiply`], with `mr` = `M`.
unsafe fn tile<const M: usize>(
    nr: usize,
    k: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let mut acc = [[0f32; NR]; M];
    // SAFETY: C has M rows of nr ≤ NR elements, the panels hold k steps of M and NR values.
    unsafe {
        if from_c {
            for (i, row) in acc.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(c.add(i * ldc), row.as_mut_ptr(), nr);
            }
        }
        for p in 0..k {
            let b = &*b.add(p * NR).cast::<[f32; NR]>();
            let a = &*a.add(p * M).cast::<[f32; M]>();
            for i in 0..M {
                for j in 0..NR {
                    acc[i][j] += a[i] * b[j];
                }
            }
        }
        for (i, row) in acc.iter().enumerate() {
            std::ptr::copy_nonoverlapping(row.as_ptr(), c.add(i * ldc), nr);
        }
    }
}

/// Packs one panel element by element from any strides; the other instruction sets use it for their odd ends.
///
/// # Safety
/// `src[i·row_step + p·k_step]` is readable for i < `rows`, p < `k`; `dst` takes `width`·`k` values.
#[inline(always)]
pub(super) unsafe fn pack(
    src: Src,
    row_step: usize,
    k_step: usize,
    rows: usize,
    k: usize,
    width: usize,
    dst: *mut f32,
) {
    for p in 0..k {
        for i in 0..width {
            // SAFETY: inside the ranges that the caller promises.
            unsafe {
                let at = i * row_step + p * k_step;
                *dst.add(p * width + i) = match src {
                    _ if i >= rows => 0.0,
                    Src::F32(x) => *x.add(at),
                    Src::Bf16(x) => (*x.add(at)).to_f32(),
                };
            }
        }
    }
}
