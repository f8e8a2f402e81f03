//! One block of C, up to 32 × 32, from packed panels.
//!
//! Registers: tmm0–3 hold C (rows 0–15 in 0 and 1, rows 16–31 in 2 and 3), tmm4–5 a plane of A, tmm6–7 a plane of B. A panel holds,
//! for each step of 32 of k, its planes one after another, each as one or two tiles.

use std::arch::asm;

use super::super::Panel;

/// `C` in a buffer of its own, where the block is not whole.
#[repr(align(64))]
struct Whole([f32; 32 * 32]);

/// # Safety
/// As [`Tile::multiply`](super::super::Tile::multiply), over `steps` steps of 32; the unit is configured.
pub(super) unsafe fn multiply(
    mr: usize,
    nr: usize,
    steps: usize,
    a: Panel,
    b: Panel,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let (rows, columns) = (mr.next_multiple_of(16), nr.next_multiple_of(16));
    if (rows, columns) == (mr, nr) {
        // SAFETY: the block is whole.
        return unsafe { whole((rows, columns, steps), a, b, c, ldc, from_c) };
    }
    let mut space = Whole([0.0; 32 * 32]);
    let buffer = space.0.as_mut_ptr();
    // SAFETY: `mr` rows of `nr` values in C and, at a stride of 32, in the buffer.
    unsafe {
        if from_c {
            for i in 0..mr {
                std::ptr::copy_nonoverlapping(c.add(i * ldc), buffer.add(i * 32), nr);
            }
        }
        whole((rows, columns, steps), a, b, buffer, 32, from_c);
        for i in 0..mr {
            std::ptr::copy_nonoverlapping(buffer.add(i * 32), c.add(i * ldc), nr);
        }
    }
}

/// Assembly text of one operation of a step: `A i` and `B j` load a plane, `M` multiplies what is loaded.
macro_rules! operation {
    ((A $i:literal), 2, $columns:tt) => {
        concat!(
            "tileloadd tmm4, [{a} + {s} + 2048*", $i, "]\n",
            "tileloadd tmm5, [{a} + {s} + 2048*", $i, " + 1024]\n"
        )
    };
    ((A $i:literal), 1, $columns:tt) => {
        concat!("tileloadd tmm4, [{a} + {s} + 1024*", $i, "]\n")
    };
    ((B $j:literal), $rows:tt, 2) => {
        concat!(
            "tileloadd tmm6, [{b} + {s} + 2048*", $j, "]\n",
            "tileloadd tmm7, [{b} + {s} + 2048*", $j, " + 1024]\n"
        )
    };
    ((B $j:literal), $rows:tt, 1) => {
        concat!("tileloadd tmm6, [{b} + {s} + 1024*", $j, "]\n")
    };
    ((M), 2, 2) => {
        "tdpbf16ps tmm0, tmm4, tmm6\ntdpbf16ps tmm1, tmm4, tmm7\ntdpbf16ps tmm2, tmm5, tmm6\ntdpbf16ps tmm3, tmm5, tmm7\n"
    };
    ((M), 2, 1) => {
        "tdpbf16ps tmm0, tmm4, tmm6\ntdpbf16ps tmm2, tmm5, tmm6\n"
    };
    ((M), 1, 2) => {
        "tdpbf16ps tmm0, tmm4, tmm6\ntdpbf16ps tmm1, tmm4, tmm7\n"
    };
    ((M), 1, 1) => {
        "tdpbf16ps tmm0, tmm4, tmm6\n"
    };
}

/// Assembly text that does `$what` ("tileloadd" or "tilestored" with C, "tilezero") for the tiles of C.
macro_rules! tiles_of_c {
    (load, $rows:tt, 2) => {
        concat!("tileloadd tmm0, [{c} + {l}]\ntileloadd tmm1, [{c} + {l} + 64]\n", tiles_of_c!(load_lower, $rows, 2))
    };
    (load, $rows:tt, 1) => {
        concat!("tileloadd tmm0, [{c} + {l}]\n", tiles_of_c!(load_lower, $rows, 1))
    };
    (load_lower, 2, 2) => {
        "tileloadd tmm2, [{d} + {l}]\ntileloadd tmm3, [{d} + {l} + 64]\n"
    };
    (load_lower, 2, 1) => {
        "tileloadd tmm2, [{d} + {l}]\n"
    };
    (store, $rows:tt, 2) => {
        concat!("tilestored [{c} + {l}], tmm0\ntilestored [{c} + {l} + 64], tmm1\n", tiles_of_c!(store_lower, $rows, 2))
    };
    (store, $rows:tt, 1) => {
        concat!("tilestored [{c} + {l}], tmm0\n", tiles_of_c!(store_lower, $rows, 1))
    };
    (store_lower, 2, 2) => {
        "tilestored [{d} + {l}], tmm2\ntilestored [{d} + {l} + 64], tmm3\n"
    };
    (store_lower, 2, 1) => {
        "tilestored [{d} + {l}], tmm2\n"
    };
    // No second row of tiles: its address is only named.
    ($lower:tt, 1, $columns:tt) => {
        "# {d}\n"
    };
}

/// The loop over k for a block of `$rows` × `$columns` tiles with `$pa` and `$pb` planes.
macro_rules! block {
    ($rows:tt, $columns:tt, $pa:literal, $pb:literal, [$($operation:tt)*], $x:expr) => {
        asm!(
            concat!(
                "test {f}, {f}\n",
                "jz 2f\n",
                tiles_of_c!(load, $rows, $columns),
                "jmp 3f\n",
                "2:\n",
                "tilezero tmm0\ntilezero tmm1\ntilezero tmm2\ntilezero tmm3\n",
                "3:\n",
                $(operation!($operation, $rows, $columns),)*
                "add {a}, ", $pa, "*1024*", $rows, "\n",
                "add {b}, ", $pb, "*1024*", $columns, "\n",
                "dec {n}\n",
                "jnz 3b\n",
                tiles_of_c!(store, $rows, $columns),
            ),
            a = inout(reg) $x.a => _,
            b = inout(reg) $x.b => _,
            c = in(reg) $x.c,
            d = in(reg) $x.c.wrapping_add(16 * $x.ldc),
            l = in(reg) $x.ldc * 4,
            s = in(reg) 64usize,
            n = inout(reg) $x.steps => _,
            f = in(reg) usize::from($x.from_c),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        )
    };
}

/// What the loop works on.
struct Work {
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    steps: usize,
    from_c: bool,
}

/// # Safety
/// As [`multiply`], with a block of whole tiles and at least one step.
unsafe fn whole(
    (rows, columns, steps): (usize, usize, usize),
    a: Panel,
    b: Panel,
    c: *mut f32,
    ldc: usize,
    from_c: bool,
) {
    let x = Work { a: a.at, b: b.at, c, ldc, steps, from_c };
    // Of the products of planes, those whose numbers add up to less than the larger count of planes; the order spares loads.
    macro_rules! for_planes {
        ($rows:tt, $columns:tt) => {
            match (a.planes, b.planes) {
                (1, 1) => block!($rows, $columns, 1, 1, [(A 0) (B 0) (M)], x),
                (2, 1) => block!($rows, $columns, 2, 1, [(B 0) (A 1) (M) (A 0) (M)], x),
                (1, 2) => block!($rows, $columns, 1, 2, [(A 0) (B 1) (M) (B 0) (M)], x),
                (2, 2) => block!($rows, $columns, 2, 2, [(A 0) (B 1) (M) (B 0) (M) (A 1) (M)], x),
                (3, 1) => block!($rows, $columns, 3, 1, [(B 0) (A 2) (M) (A 1) (M) (A 0) (M)], x),
                (1, 3) => block!($rows, $columns, 1, 3, [(A 0) (B 2) (M) (B 1) (M) (B 0) (M)], x),
                (3, 3) => block!(
                    $rows, $columns, 3, 3,
                    [(A 1) (B 1) (M) (A 0) (M) (B 2) (M) (B 0) (M) (A 1) (M) (A 2) (M)], x
                ),
                other => unreachable!("planes {other:?}"),
            }
        };
    }
    // SAFETY: the panels hold `steps` steps of their planes, C whole tiles at the stride; the unit is configured.
    unsafe {
        match (rows, columns) {
            (32, 32) => for_planes!(2, 2),
            (32, _) => for_planes!(2, 1),
            (_, 32) => for_planes!(1, 2),
            _ => for_planes!(1, 1),
        }
    }
}
