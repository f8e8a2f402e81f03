//! Threads: how a product is cut into tasks.
//!
//! *Wide* products (many rows): a stretch of B is packed once by all threads, then blocks of rows are the tasks; each packs its
//! own rows of A and walks the whole stretch. *Narrow* ones (few rows, as in decoding): see [`narrow`](super::narrow).
//!
//! No cut is visible in the result: every element is one chain over k, and where k is cut, the chain goes on from C.

use super::block::{Finish, Operand, multiply};
use super::tile::{Side, Tile, int8, portable::Portable};
#[cfg(target_arch = "x86_64")]
use super::tile::{amx::Amx, avx2::Avx2, avx512::Avx512, bf16_dot::Bf16Dot};
use super::{Arithmetic, narrow};
#[cfg(target_arch = "x86_64")]
use crate::isa::{has_fast_bf16_pairs, has_vnni};
use crate::team::SendPtr;
use crate::{Device, Isa, Result};

/// Sizes of the cuts. Any values give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocking {
    /// Steps of k in a packed block.
    pub kc: usize,
    /// Rows of A in a packed block: kc × mc values stay in the second-level cache.
    pub mc: usize,
    /// Values of B that are packed at once, for all threads.
    pub stretch: usize,
    /// Rows up to which a product is always narrow.
    pub narrow: usize,
    /// Rows up to which it is narrow if A has no more than `narrow_values` values and there are columns for every thread.
    pub narrow_rows: usize,
    /// See `narrow_rows`: A passes by once for each panel of B, so it should stay in the second- or third-level cache.
    pub narrow_values: usize,
    /// Steps of k in a panel of a narrow product.
    pub narrow_kc: usize,
}

impl Blocking {
    /// The sizes that measured best for an instruction set and an arithmetic (docs/performance-notes.md, section GEMM).
    pub fn best(isa: Isa, arithmetic: Arithmetic) -> Blocking {
        let other = Blocking {
            kc: 256,
            mc: 144,
            stretch: 1 << 20,
            narrow: 64,
            narrow_rows: 512,
            narrow_values: 1 << 20,
            narrow_kc: 512,
        };
        match Unit::of(isa, arithmetic) {
            #[cfg(target_arch = "x86_64")]
            Unit::Amx => Blocking { kc: 768, mc: 256, narrow_kc: 512, ..other },
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => Blocking { kc: 768, mc: 96, narrow_kc: 1024, ..other },
            #[cfg(target_arch = "x86_64")]
            Unit::Bf16Dot => Blocking { kc: 1536, mc: 96, stretch: 1 << 21, narrow_kc: 1024, ..other },
            #[cfg(target_arch = "x86_64")]
            Unit::Int8 => Blocking { kc: 1536, mc: 192, stretch: 1 << 22, narrow_kc: 2048, ..other },
            _ => other,
        }
    }

    /// Whether every size can be used.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let sizes = [
            ("kc", self.kc, 1, 1 << 16),
            ("mc", self.mc, 1, 1 << 16),
            ("stretch", self.stretch, 1, 1 << 30),
            ("narrow", self.narrow, 0, 1 << 20),
            ("narrow_rows", self.narrow_rows, 0, 1 << 20),
            ("narrow_values", self.narrow_values, 0, 1 << 30),
            ("narrow_kc", self.narrow_kc, 1, 1 << 16),
        ];
        match sizes.into_iter().find(|(_, size, least, most)| !(least..=most).contains(&size)) {
            Some((name, size, least, most)) => Err(format!("{name} is {size}, outside {least}..={most}")),
            None => Ok(()),
        }
    }

    /// Whether a product of these sizes is narrow; `columns`: it has columns for every thread.
    pub(super) fn is_narrow(&self, m: usize, k: usize, columns: bool) -> bool {
        m <= self.narrow || (columns && m <= self.narrow_rows && m * k <= self.narrow_values)
    }
}

/// What makes the products: the tile that serves an instruction set and an arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Bf16Dot,
    #[cfg(target_arch = "x86_64")]
    Int8,
    Int8Plain,
}

impl Unit {
    pub(super) fn of(isa: Isa, arithmetic: Arithmetic) -> Unit {
        #[cfg(target_arch = "x86_64")]
        match (isa, arithmetic) {
            // A simulated product is an f32 product in the end.
            (Isa::Avx512 | Isa::Amx, Arithmetic::Int8Block) if has_vnni() => return Unit::Int8,
            (Isa::Avx512, Arithmetic::Bf16) if has_fast_bf16_pairs() => return Unit::Bf16Dot,
            (Isa::Amx, a) if a != Arithmetic::Int8Block => return Unit::Amx,
            (Isa::Avx512, a) if a != Arithmetic::Int8Block => return Unit::Avx512,
            (Isa::Avx2, a) if a != Arithmetic::Int8Block => return Unit::Avx2,
            _ => {}
        }
        let _ = isa;
        if arithmetic == Arithmetic::Int8Block { Unit::Int8Plain } else { Unit::Portable }
    }
}

/// A product in raw form: sums into C, starting from C or from zero.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    pub(crate) c: SendPtr<f32>,
    pub(crate) from_c: bool,
    pub(crate) finish: Option<Finish>,
    pub(crate) arithmetic: Arithmetic,
}

/// Runs a product with m, n, k ≥ 1.
///
/// # Safety
/// The operands cover M × K and K × N, C is M × N at stride N and nobody else touches it during the call; all stay alive.
pub(crate) unsafe fn run(dev: &Device, p: &Product, by: &Blocking) -> Result<()> {
    // SAFETY: the caller's promise; a `Device` has only instruction sets that the processor has.
    unsafe {
        match Unit::of(dev.isa(), p.arithmetic) {
            #[cfg(target_arch = "x86_64")]
            Unit::Amx => run_tile::<Amx>(dev, p, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => run_tile::<Avx512>(dev, p, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => run_tile::<Avx2>(dev, p, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Bf16Dot => run_tile::<Bf16Dot>(dev, p, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Int8 => run_tile::<int8::Vnni>(dev, p, by),
            Unit::Int8Plain => run_tile::<int8::Plain>(dev, p, by),
            Unit::Portable => run_tile::<Portable>(dev, p, by),
        }
    }
}

/// # Safety
/// As [`run`]; the processor has the instruction set of `T`.
unsafe fn run_tile<T: Tile>(dev: &Device, p: &Product, by: &Blocking) -> Result<()> {
    let threads = dev.team().threads();
    // SAFETY: the caller's promise.
    unsafe {
        if by.is_narrow(p.m, p.k, p.n.div_ceil(T::NR) >= 4 * threads) {
            narrow::run::<T>(dev, &[0, p.m], &|_| *p, by)
        } else {
            wide::<T>(dev, p, by)
        }
    }
}

/// Runs products that differ in M, A's rows, B and C: `group(g)` has the rows `offsets[g]..offsets[g + 1]`.
///
/// # Safety
/// As [`run`] for each group.
pub(crate) unsafe fn run_groups(
    dev: &Device,
    offsets: &[usize],
    group: &(dyn Fn(usize) -> Product + Sync),
    arithmetic: Arithmetic,
    by: &Blocking,
) -> Result<()> {
    // SAFETY: the caller's promise; a `Device` has only instruction sets that the processor has.
    unsafe {
        match Unit::of(dev.isa(), arithmetic) {
            #[cfg(target_arch = "x86_64")]
            Unit::Amx => narrow::run::<Amx>(dev, offsets, group, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => narrow::run::<Avx512>(dev, offsets, group, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => narrow::run::<Avx2>(dev, offsets, group, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Bf16Dot => narrow::run::<Bf16Dot>(dev, offsets, group, by),
            #[cfg(target_arch = "x86_64")]
            Unit::Int8 => narrow::run::<int8::Vnni>(dev, offsets, group, by),
            Unit::Int8Plain => narrow::run::<int8::Plain>(dev, offsets, group, by),
            Unit::Portable => narrow::run::<Portable>(dev, offsets, group, by),
        }?;
        for g in 0..offsets.len().saturating_sub(1) {
            let p = group(g);
            if p.m > 0 && !by.is_narrow(p.m, p.k, true) {
                run(dev, &p, by)?;
            }
        }
    }
    Ok(())
}

/// Panels of B that one task packs: enough for long reads along its memory rows, few enough for several tasks.
const PACK_PANELS: usize = 4;

/// The number of equal pieces, no longer than `most`, that `len` falls into, and their length rounded up to `unit`.
pub(super) fn even(len: usize, most: usize, unit: usize) -> usize {
    len.div_ceil(len.div_ceil(most.max(1))).next_multiple_of(unit)
}

/// # Safety
/// As [`run_tile`].
unsafe fn wide<T: Tile>(dev: &Device, p: &Product, by: &Blocking) -> Result<()> {
    let kc = even(p.k, by.kc, T::K_UNIT.max(16));
    let k_stretch = even(p.k, (by.stretch / p.n).clamp(kc, 8 * kc) / kc * kc, kc);
    let nc = even(p.n, (by.stretch / k_stretch).max(T::NR), T::NR);
    let threads = dev.team().threads();
    let blocks = p.m.div_ceil(by.mc).next_multiple_of(threads);
    let mc = even(p.m, p.m.div_ceil(blocks), T::MR);
    let a_room = p.a.room::<T>(mc.next_multiple_of(T::ROW_LANES) * kc);
    dev.scratch().reserve(a_room)?;
    let mut packed = dev.scratch().packed().take(p.b.room::<T>(k_stretch * nc.next_multiple_of(T::LANES)))?;
    let packed = SendPtr(packed.as_mut_ptr());
    for j0 in (0..p.n).step_by(nc) {
        let n = nc.min(p.n - j0);
        let n_padded = n.next_multiple_of(T::LANES);
        for k0 in (0..p.k).step_by(k_stretch) {
            let depth = k_stretch.min(p.k - k0);
            let group = PACK_PANELS * T::NR;
            let groups = n.div_ceil(group);
            dev.team().run(depth.div_ceil(kc) * groups, &|task, _| {
                let (p0, j) = (task / groups * kc, task % groups * group);
                let k = kc.min(depth - p0);
                // SAFETY: panels inside B; each task writes its own panels of the stretch, which holds depth × n_padded.
                unsafe {
                    let before = p0 * n_padded + j * k.next_multiple_of(T::K_UNIT);
                    let dst = packed.get().add(p.b.room::<T>(before));
                    p.b.pack::<T>((j0 + j, group.min(n - j)), (k0 + p0, k), Side::B, dst);
                }
            });
            dev.team().run(p.m.div_ceil(mc), &|task, worker| {
                let (i, mut space) = (task * mc, dev.scratch().worker(worker, a_room));
                let (m, a) = (mc.min(p.m - i), space.as_mut_ptr());
                for p0 in (0..depth).step_by(kc) {
                    let k = kc.min(depth - p0);
                    let last = k0 + p0 + k == p.k;
                    // SAFETY: rows i..i+m and columns j0..j0+n of C belong to this task alone; `a` has room for mc × kc values; the
                    // stretch was packed by the run before.
                    unsafe {
                        p.a.pack::<T>((i, m), (k0 + p0, k), Side::A, a);
                        multiply::<T>(
                            (m, n, k),
                            p.a.panel::<T>(a),
                            p.b.panel::<T>(packed.get()).after::<T>(p0 * n_padded),
                            p.c.get().add(i * p.n + j0),
                            p.n,
                            p.from_c || k0 + p0 > 0,
                            p.finish.filter(|_| last).map(|f| f.at_column(j0)),
                        );
                    }
                }
            });
        }
    }
    Ok(())
}
