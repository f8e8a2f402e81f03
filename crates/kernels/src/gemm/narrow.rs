//! Threads, for products of few rows and for many such products at once (ragged groups).
//!
//! A is packed once, then pieces of columns are the tasks. Each packs one panel of B at a time into a near cache and uses it at
//! once for all rows, or lets B run straight through the registers: B, the weights, streams from memory exactly once.

use super::block::multiply;
use super::kernel::{Blocking, Product, even};
use super::tile::{Panel, Side, Tile};
use crate::team::SendPtr;
use crate::{Device, Result};

/// Runs the narrow ones among the products `group(g)`, which have the rows `offsets[g]..offsets[g + 1]` of one A.
///
/// # Safety
/// As [`run`](super::kernel::run) for each group; the processor has the instruction set of `T`.
pub(super) unsafe fn run<T: Tile>(
    dev: &Device,
    offsets: &[usize],
    group: &(dyn Fn(usize) -> Product + Sync),
    by: &Blocking,
) -> Result<()> {
    let groups = offsets.len().saturating_sub(1);
    if groups == 0 || offsets[groups] == offsets[0] {
        return Ok(());
    }
    // The groups differ in M only.
    let Product { n, k, .. } = group(0);
    // Where the rows of B run across panels, a panel alone takes three cache lines of each and misses a page at every step. Few rows of A do not
    // make up for that; many are better off with long blocks of k.
    let few = (0..groups).all(|g| offsets[g + 1] - offsets[g] <= by.narrow);
    let together = if few && group(0).b.along_k().is_none() { ACROSS } else { 1 };
    let kc = even(k, by.narrow_kc.div_ceil(together), T::K_UNIT.max(16));
    let narrow = |g: usize| {
        let m = offsets[g + 1] - offsets[g];
        m > 0 && by.is_narrow(m, k, true)
    };
    // Before group g: its first row, and room for padding each group before it.
    let row = |g: usize| (offsets[g] - offsets[0] + g * (T::ROW_LANES - 1)) / T::ROW_LANES * T::ROW_LANES;
    let (first, rows, padded) = (group(0), row(groups), k.next_multiple_of(T::K_UNIT));
    let room = kc * (together * T::NR).next_multiple_of(T::LANES);
    let b_room = (0..groups).map(|g| group(g).b.room::<T>(room)).max().unwrap_or(0);
    dev.scratch().reserve(b_room)?;
    let mut packed = dev.scratch().packed().take(first.a.room::<T>(rows * padded))?;
    let base = SendPtr(packed.as_mut_ptr());
    let a = |g: usize| base.get().wrapping_add(first.a.room::<T>(row(g) * padded));

    // Few rows stay where they are while B streams past them.
    let streams = |p: &Product| p.m <= T::STREAM_ROWS && p.b.along_k().is_some();
    let side = |p: &Product| if streams(p) { T::STREAM_SIDE } else { Side::A };
    let blocks = k.div_ceil(kc);
    let pack = |task: usize| {
        let (g, p0) = (task / blocks, task % blocks * kc);
        if narrow(g) {
            let p = group(g);
            let before = p.a.room::<T>(p0 * p.m.next_multiple_of(T::ROW_LANES));
            // SAFETY: a block of k of the group's rows, packed into its own place by this task alone.
            unsafe { p.a.pack::<T>((0, p.m), (p0, kc.min(k - p0)), side(&p), a(g).add(before)) };
        }
    };
    if rows * k < SMALL {
        (0..groups * blocks).for_each(pack);
    } else {
        dev.team().run(groups * blocks, &|task, _| pack(task));
    }

    let panels = n.div_ceil(T::NR);
    let piece = panels.div_ceil(8 * dev.team().threads()).next_multiple_of(T::STREAM_PANELS.max(together));
    let pieces = panels.div_ceil(piece);
    dev.team().run(groups * pieces, &|task, worker| {
        let (g, first) = (task / pieces, task % pieces * piece);
        if !narrow(g) {
            return;
        }
        let p = group(g);
        let columns = first * T::NR..n.min((first + piece) * T::NR);
        // SAFETY: these columns of the group's rows of C belong to this task alone; its rows of A were packed before.
        unsafe {
            match p.b.along_k() {
                Some(ldb) if streams(&p) => stream::<T>(&p, p.a.panel::<T>(a(g)), ldb, columns),
                _ => panel_by_panel::<T>(dev, &p, p.a.panel::<T>(a(g)), (kc, together * T::NR), columns, worker),
            }
        }
    });
    Ok(())
}

/// Panels of B that are packed at a time where its memory rows run across them; blocks of k are shorter by as much, so that they take no more of the
/// cache.
const ACROSS: usize = 4;

/// Values of A up to which packing is not worth waking the team.
const SMALL: usize = 1 << 16;

/// # Safety
/// `a` is all of A, packed in blocks of `kc`, and `wide` columns of B are packed at a time; nobody else touches the columns of C; `worker` is this thread's.
unsafe fn panel_by_panel<T: Tile>(
    dev: &Device,
    p: &Product,
    a: Panel,
    (kc, wide): (usize, usize),
    columns: std::ops::Range<usize>,
    worker: usize,
) {
    let rows = p.m.next_multiple_of(T::ROW_LANES);
    let mut space = dev.scratch().worker(worker, p.b.room::<T>(kc * wide.next_multiple_of(T::LANES)));
    let b = space.as_mut_ptr();
    for j in columns.clone().step_by(wide) {
        let n = wide.min(columns.end - j);
        for p0 in (0..p.k).step_by(kc) {
            let k = kc.min(p.k - p0);
            let finish = p.finish.filter(|_| p0 + k == p.k).map(|f| f.at_column(j));
            // SAFETY: columns j..j+n; `b` holds panels of `wide` columns of kc steps.
            unsafe {
                p.b.pack::<T>((j, n), (p0, k), Side::B, b);
                let c = p.c.get().add(j);
                let (a, b) = (a.after::<T>(p0 * rows), p.b.panel::<T>(b));
                multiply::<T>((p.m, n, k), a, b, c, p.n, p.from_c || p0 > 0, finish);
            }
        }
    }
}

/// # Safety
/// As [`panel_by_panel`]; M is at most T::STREAM_ROWS, and B lies along k with stride `ldb`.
unsafe fn stream<T: Tile>(p: &Product, a: Panel, ldb: usize, columns: std::ops::Range<usize>) {
    let (j, n) = (columns.start, columns.len());
    // SAFETY: the caller's promise. One panel of m ≤ MR rows lies the same in memory however k was cut for packing it.
    unsafe {
        let c = p.c.get().add(j);
        let b = (p.b.row(j), p.b.planes::<T>());
        T::multiply_block(|| T::stream((p.m, n, p.k), a, b, ldb, c, p.n, p.from_c));
        if let Some(f) = p.finish {
            f.at_column(j).apply(c, p.n, p.m, n);
        }
    }
}
