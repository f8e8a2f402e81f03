//! With AVX-512: up to eight rows straight from memory, more of them past a stretch of weights in a cache.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::{Form, LANES, Product, Rows};
use super::{BLOCK_PANELS, BLOCK_ROWS, DEPTH, SHALLOW, STREAM, WIDENED};
use crate::Device;
use crate::gemm::tile::avx512::Avx512;
use crate::gemm::tile::{Form as TileForm, Side, Src, Tile};

/// How far ahead weights are asked for, in bytes, over all panels that are multiplied together.
const AHEAD: usize = 4096;

/// # Safety
/// `rows` rows of `k` values at `x`, room for as many at `out`; the processor has AVX-512.
pub(super) unsafe fn pack_rows(x: *const f32, rows: usize, k: usize, out: *mut f32) {
    let form = TileForm { planes: 1, side: Side::A, scales: None, noise: None };
    // SAFETY: the caller's promise.
    unsafe { Avx512::pack_across(Src::F32(x), k, rows, k, rows, form, out) }
}

/// A step of k of sixteen outputs: f32, or two steps of bf16 in the halves of the lanes.
trait Stored {
    /// Steps that a vector holds.
    const STEPS: usize;
    /// One of them.
    ///
    /// # Safety
    /// The processor has AVX-512.
    unsafe fn step(v: __m512i, which: usize) -> __m512;
}

struct Whole;
struct Pairs;

impl Stored for Whole {
    const STEPS: usize = 1;
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn step(v: __m512i, _: usize) -> __m512 {
        _mm512_castsi512_ps(v)
    }
}

impl Stored for Pairs {
    const STEPS: usize = 2;
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn step(v: __m512i, which: usize) -> __m512 {
        let high = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
        _mm512_castsi512_ps(if which == 0 { _mm512_slli_epi32::<16>(v) } else { _mm512_and_si512(v, high) })
    }
}

/// Panels of weights and a panel of rows, and where their product goes.
#[derive(Clone, Copy)]
struct Work {
    /// First step of the first panel.
    w: *const u8,
    /// Bytes from panel to panel.
    apart: usize,
    /// For each step the value of every row.
    x: *const f32,
    /// Steps.
    k: usize,
    y: *mut f32,
    ldc: usize,
    /// Columns.
    n: usize,
    /// Whether the sums go on from y.
    from_y: bool,
    /// Where [`STRETCH`] begins to ask, in the first panel.
    next: *const u8,
}

/// What is asked for in advance while multiplying: nothing;
const NOTHING: usize = 0;
/// the panels themselves, AHEAD;
const AHEAD_HERE: usize = 1;
/// half as many steps as there are, from `Work::next` on.
const STRETCH: usize = 2;

/// # Safety
/// As [`super::panels`]; the processor has AVX-512.
pub(super) unsafe fn panels(dev: &Device, p: &Product<'_>, rows: Rows<'_>, panels: Range<usize>, worker: usize) {
    let layout = p.weight.layout;
    let (k, n, apart) = (layout.k, layout.n, layout.panel_bytes());
    // SAFETY: the caller's promise; every piece of work stays inside these panels and rows.
    unsafe {
        let at = |panel: usize| p.weight.bytes.as_ptr().add(panel * apart);
        if rows.m <= STREAM {
            let work = |panel: usize| Work {
                w: at(panel),
                apart,
                x: rows.exact.as_ptr(),
                k,
                y: p.y.at(panel * LANES),
                ldc: n,
                n: n - panel * LANES,
                from_y: false,
                next: std::ptr::null(),
            };
            return match layout.form {
                Form::F32 => stream::<Whole>(rows.m, panels, &work),
                _ => stream::<Pairs>(rows.m, panels, &work),
            };
        }
        // Two blocks of rows pass by a stretch that stays in the first-level cache; bf16 is widened twice then, which costs less than writing it.
        let few = rows.m <= 2 * BLOCK_ROWS;
        let steps = if layout.form == Form::F32 { 1 } else { 2 };
        let most = if few { SHALLOW * steps } else { DEPTH };
        let mut space = dev.scratch().worker(worker, WIDENED);
        for panel in panels.clone().step_by(BLOCK_PANELS) {
            let count = BLOCK_PANELS.min(panels.end - panel);
            for p0 in (0..k).step_by(most) {
                let depth = most.min(k - p0);
                let (w, apart) = if layout.form == Form::F32 || few {
                    (at(panel).add(p0 / steps * LANES * 4), apart)
                } else {
                    let wide = space.as_mut_ptr();
                    for v in 0..count {
                        widen(at(panel + v).add(p0 / 2 * LANES * 4), depth, wide.add(v * DEPTH * LANES));
                    }
                    (wide.cast_const().cast(), DEPTH * LANES * 4)
                };
                for i in (0..rows.m).step_by(BLOCK_ROWS) {
                    let m = BLOCK_ROWS.min(rows.m - i);
                    let x = rows.exact.as_ptr().add(i * k + p0 * m);
                    let y = p.y.at(i * n + panel * LANES);
                    // Each block of rows asks for half of the next stretch.
                    let next = if p0 + depth < k {
                        w.wrapping_add(SHALLOW * 64)
                    } else {
                        at(panel).wrapping_add(count * apart)
                    };
                    let next = next.wrapping_add(if i == 0 { 0 } else { SHALLOW / 2 * 64 });
                    let work = Work { w, apart, x, k: depth, y, ldc: n, n: n - panel * LANES, from_y: p0 > 0, next };
                    match (few, layout.form) {
                        (false, _) => block::<Whole, NOTHING>(m, count, &work),
                        (true, Form::F32) => block::<Whole, STRETCH>(m, count, &work),
                        _ => block::<Pairs, STRETCH>(m, count, &work),
                    }
                }
            }
        }
    }
}

/// # Safety
/// The processor has AVX-512; `depth` steps at `from`, pairs of bf16, room for as many at `to`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn widen(from: *const u8, depth: usize, to: *mut f32) {
    for p in 0..depth {
        // SAFETY: the caller's promise.
        unsafe {
            let v = _mm512_loadu_si512(from.add(p / 2 * LANES * 4).cast());
            _mm512_storeu_ps(to.add(p * LANES), Pairs::step(v, p % 2));
        }
    }
}

/// Up to STREAM rows, with as many panels at once as the registers take.
///
/// # Safety
/// `work(panel)` is sound for one row of panels from there on, `m` rows wide.
unsafe fn stream<S: Stored>(m: usize, panels: Range<usize>, work: &dyn Fn(usize) -> Work) {
    let mut panel = panels.start;
    macro_rules! rows {
        ($($m:literal $v:literal),*) => {
            match m {
                $($m => {
                    if panels.end - panel >= $v {
                        multiply::<S, $m, $v, AHEAD_HERE>(&work(panel));
                        panel += $v;
                    } else {
                        multiply::<S, $m, 1, AHEAD_HERE>(&work(panel));
                        panel += 1;
                    }
                })*
                _ => unreachable!("at most {STREAM} rows"),
            }
        };
    }
    while panel < panels.end {
        // SAFETY: the caller's promise.
        unsafe { rows!(1 4, 2 4, 3 4, 4 4, 5 4, 6 4, 7 3, 8 3) }
    }
}

/// Up to BLOCK_ROWS rows and BLOCK_PANELS panels.
///
/// # Safety
/// The work is sound.
unsafe fn block<S: Stored, const ASK: usize>(m: usize, panels: usize, work: &Work) {
    macro_rules! rows {
        ($v:literal: $($m:literal)*) => {
            match m {
                $($m => multiply::<S, $m, $v, ASK>(work),)*
                _ => unreachable!("at most {BLOCK_ROWS} rows"),
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match panels {
            1 => rows!(1: 1 2 3 4 5 6 7 8),
            2 => rows!(2: 1 2 3 4 5 6 7 8),
            _ => rows!(3: 1 2 3 4 5 6 7 8),
        }
    }
}

/// `M` rows times `V` panels.
///
/// # Safety
/// The panels hold `k` steps; `y` has M rows of up to 16·V columns, the caller's alone; the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply<S: Stored, const M: usize, const V: usize, const ASK: usize>(work: &Work) {
    let &Work { w, apart, x, k, y, ldc, n, from_y, next: stretch } = work;
    let keep = |v: usize| -> __mmask16 {
        let left = n.saturating_sub(v * LANES);
        if left >= LANES { !0 } else { (1 << left) - 1 }
    };
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    // SAFETY: the caller's promise; the masks keep to the columns that there are.
    unsafe {
        if from_y {
            for i in 0..M {
                for v in 0..V {
                    sums[i][v] = _mm512_maskz_loadu_ps(keep(v), y.add(i * ldc + v * LANES));
                }
            }
        }
        let mut p = 0;
        while p < k {
            // Near the end of these panels: of the panels after them.
            let here = p / S::STEPS * LANES * 4 + AHEAD / V;
            let next = AHEAD / V + if here < apart { 0 } else { (V - 1) * apart };
            let mut raw = [_mm512_setzero_si512(); V];
            for v in 0..V {
                let at = w.add(v * apart + p / S::STEPS * LANES * 4);
                if ASK == AHEAD_HERE {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(next).cast());
                }
                if ASK == STRETCH && (p / S::STEPS).is_multiple_of(2) {
                    _mm_prefetch::<_MM_HINT_T1>(stretch.wrapping_add(v * apart + p / S::STEPS / 2 * 64).cast());
                }
                raw[v] = _mm512_loadu_si512(at.cast());
            }
            for s in 0..S::STEPS {
                // An odd k leaves half a pair.
                if s > 0 && p + s >= k {
                    break;
                }
                let mut ws = [_mm512_setzero_ps(); V];
                for v in 0..V {
                    ws[v] = S::step(raw[v], s);
                }
                for i in 0..M {
                    let x = _mm512_set1_ps(*x.add((p + s) * M + i));
                    for v in 0..V {
                        sums[i][v] = _mm512_fmadd_ps(x, ws[v], sums[i][v]);
                    }
                }
            }
            p += S::STEPS;
        }
        for i in 0..M {
            for v in 0..V {
                _mm512_mask_storeu_ps(y.add(i * ldc + v * LANES), keep(v), sums[i][v]);
            }
        }
    }
}
