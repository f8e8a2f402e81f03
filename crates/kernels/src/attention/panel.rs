//! The block level: a panel of query rows, kept transposed so that each row is one lane.
//!
//! With rows in lanes the softmax needs no sum across a register: a row's maximum, sum and scores are values of its own lane,
//! and nothing that a row computes depends on which lane, panel or batch it is in.

use super::tile::{Left, Start, product};
use super::{Attention, Seq};
use crate::simd::Simd;
use crate::simd::math::exp;

/// Keys of a block, counted from the start of a sequence's keys. The running softmax is rescaled once a block, so this number
/// is part of what a result's bits depend on.
pub(super) const BLOCK: usize = 64;

/// Vectors of rows in a full panel.
pub(super) const VECTORS: usize = 3;

/// Query rows of one key/value head in one sequence. Row r is head `kv_head·G + r mod G` of the query r / G.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Group {
    /// The sequence.
    pub(super) seq: Seq,
    /// The key/value head.
    pub(super) kv_head: usize,
    /// Query heads that share a key/value head.
    pub(super) share: usize,
    heads: usize,
    kv_heads: usize,
    /// D of queries and keys.
    pub(super) dim: usize,
    /// D of values.
    pub(super) value_dim: usize,
    window: Option<usize>,
}

impl Group {
    pub(super) fn new(a: &Attention<'_>, seq: Seq, kv_head: usize) -> Group {
        let share = a.heads / a.kv_heads;
        let (dim, value_dim) = (a.head_dim, a.value_dim);
        Group { seq, kv_head, share, heads: a.heads, kv_heads: a.kv_heads, dim, value_dim, window: a.window }
    }

    /// Index of a row among all [Tq,N] rows.
    pub(super) fn row_index(&self, r: usize) -> usize {
        (self.seq.q_start + r / self.share) * self.heads + self.kv_head * self.share + r % self.share
    }

    /// Keys that a row sees.
    pub(super) fn visible(&self, r: usize) -> std::ops::Range<usize> {
        self.seq.visible(self.window, r / self.share)
    }

    /// Elements between a head's rows of K at neighbouring positions.
    pub(super) fn key_stride(&self) -> usize {
        self.kv_heads * self.dim
    }

    /// The same of V.
    pub(super) fn value_stride(&self) -> usize {
        self.kv_heads * self.value_dim
    }

    /// Offset of key `j` of the sequence in K.
    pub(super) fn key_offset(&self, j: usize) -> usize {
        (self.seq.kv_start + j) * self.key_stride() + self.kv_head * self.dim
    }

    /// Offset of its value in V.
    pub(super) fn value_offset(&self, j: usize) -> usize {
        (self.seq.kv_start + j) * self.value_stride() + self.kv_head * self.value_dim
    }
}

/// The part of a key block that a panel works on.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    /// First key.
    pub(super) first: usize,
    /// Number of keys, at most [`BLOCK`].
    pub(super) count: usize,
    /// Whether some row of the panel does not see all of them.
    pub(super) masked: bool,
}

/// The key blocks of rows `first..first + rows`, in order.
pub(super) fn key_blocks(g: Group, first: usize, rows: usize) -> impl Iterator<Item = Keys> {
    let (top, bottom) = (g.visible(first), g.visible(first + rows - 1));
    (top.start / BLOCK..bottom.end.div_ceil(BLOCK)).map(move |b| {
        let (start, end) = ((b * BLOCK).max(top.start), ((b + 1) * BLOCK).min(bottom.end));
        Keys { first: start, count: end - start, masked: end > top.end || start < bottom.start }
    })
}

/// The bounds of what each row of a panel sees, as whole numbers in f32 (exact below 2²⁴).
pub(super) fn bounds(g: Group, first: usize, rows: usize, from: &mut [f32], to: &mut [f32]) {
    for (i, (from, to)) in from.iter_mut().zip(to).enumerate() {
        // A lane without a row does as the last row.
        let seen = g.visible(first + i.min(rows - 1));
        (*from, *to) = (seen.start as f32, seen.end as f32);
    }
}

/// Where `key` is seen by a lane whose bounds are `from..to`: `yes`, else `no`.
#[inline(always)]
pub(super) fn if_seen<S: Simd>(s: S, key: usize, from: S::V, to: S::V, yes: S::V, no: S::V) -> S::V {
    let key = s.splat(key as f32);
    s.select_lt(key, from, no, s.select_lt(key, to, yes, no))
}

/// Rows of `x` [.., `dim`] into the columns of `out` [`dim`,`width`], times `scale`; columns without a row become zero.
pub(super) fn transpose_in(
    g: Group,
    (x, dim): (&[f32], usize),
    (first, rows): (usize, usize),
    scale: f32,
    out: &mut [f32],
    width: usize,
) {
    for i in 0..width {
        if i < rows {
            let row = g.row_index(first + i) * dim;
            for (d, v) in x[row..row + dim].iter().enumerate() {
                out[d * width + i] = v * scale;
            }
        } else {
            out.iter_mut().skip(i).step_by(width).for_each(|v| *v = 0.0);
        }
    }
}

/// The running softmax of a panel: all rows' state in lanes.
pub(super) struct Running<'a> {
    /// Greatest score so far, [W].
    pub(super) max: &'a mut [f32],
    /// Σ e^(score − max), [W].
    pub(super) sum: &'a mut [f32],
    /// Σ e^(score − max)·v, [D of values,W].
    pub(super) out: &'a mut [f32],
    /// What the last block multiplied the sums by, [W].
    pub(super) factor: &'a mut [f32],
}

/// Folds `keys` into the running softmax of `rows` rows. `q` [D,W] holds the scaled queries, `p` [BLOCK,W] is working space.
///
/// # Safety
/// Slices must have the lengths given, W = N·LANES, and K and V the rows of `keys`.
#[inline(always)]
pub(super) unsafe fn fold<S: Simd, const N: usize>(
    s: S,
    g: Group,
    (keys, rows): (Keys, usize),
    (k, v): (&[f32], &[f32]),
    q: &[f32],
    p: &mut [f32],
    (from, to): (&[f32], &[f32]),
    run: &mut Running<'_>,
) {
    let (w, at, stride) = (N * S::LANES, g.key_offset(keys.first), g.key_stride());
    // SAFETY: the caller's promise.
    unsafe {
        if N == 1 {
            prefetch(s, k.as_ptr().wrapping_add(g.key_offset(keys.first + BLOCK)), (keys.count, stride), g.dim);
        }
        let few = if S::TRANSPOSES && N == 1 && g.dim.is_multiple_of(S::LANES) {
            let (k, count) = ((k.as_ptr().add(at), stride), keys.count);
            match rows {
                1 => few_scores::<S, 1>(s, g.dim, count, k, q, p),
                2 => few_scores::<S, 2>(s, g.dim, count, k, q, p),
                3 => few_scores::<S, 3>(s, g.dim, count, k, q, p),
                4 => few_scores::<S, 4>(s, g.dim, count, k, q, p),
                _ => 0,
            }
        } else {
            0
        };
        let a = Left { ptr: k.as_ptr().add(at + few * stride), row: stride, step: 1 };
        let rest = (p.as_mut_ptr().add(few * w), w);
        product::<S, N>(s, keys.count - few, g.dim, a, (q.as_ptr(), w), rest, Start::Zero);
        let never = s.splat(f32::NEG_INFINITY);
        for n in 0..N {
            let lane = n * S::LANES;
            let column = p.as_mut_ptr().add(lane);
            let old = s.load_ptr(run.max.as_ptr().add(lane));
            let mut max = old;
            if keys.masked {
                let (from, to) = (s.load_ptr(from.as_ptr().add(lane)), s.load_ptr(to.as_ptr().add(lane)));
                for j in 0..keys.count {
                    let score = if_seen(s, keys.first + j, from, to, s.load_ptr(column.add(j * w)), never);
                    s.store_ptr(column.add(j * w), score);
                    max = s.max(max, score);
                }
            } else {
                for j in 0..keys.count {
                    max = s.max(max, s.load_ptr(column.add(j * w)));
                }
            }
            // A row that has seen no key yet keeps −∞ as its maximum, but must not compute −∞ − −∞.
            let base = s.select_lt(never, max, max, s.select_lt(max, s.splat(f32::INFINITY), s.splat(0.0), max));
            let mut sum = s.splat(0.0);
            for j in 0..keys.count {
                let e = exp(s, s.sub(s.load_ptr(column.add(j * w)), base));
                s.store_ptr(column.add(j * w), e);
                sum = s.add(sum, e);
            }
            let factor = exp(s, s.sub(old, base));
            let total = s.fma(s.load_ptr(run.sum.as_ptr().add(lane)), factor, sum);
            s.store_ptr(run.max.as_mut_ptr().add(lane), max);
            s.store_ptr(run.sum.as_mut_ptr().add(lane), total);
            s.store_ptr(run.factor.as_mut_ptr().add(lane), factor);
        }
        if keys.masked && !finite(s, g, keys, v) {
            return fold_values_exactly::<S, N>(s, g, keys, v, p, (from, to), run);
        }
        let (dim, at, stride) = (g.value_dim, g.value_offset(keys.first), g.value_stride());
        if N == 1 {
            prefetch(s, v.as_ptr().wrapping_add(g.value_offset(keys.first + BLOCK)), (keys.count, stride), dim);
        }
        if N == 1 && dim.is_multiple_of(S::LANES) {
            let v = v.as_ptr().add(at);
            match rows {
                1 => return few_rows::<S, 1>(s, dim, keys.count, (v, stride), p, run),
                2 => return few_rows::<S, 2>(s, dim, keys.count, (v, stride), p, run),
                3 => return few_rows::<S, 3>(s, dim, keys.count, (v, stride), p, run),
                4 => return few_rows::<S, 4>(s, dim, keys.count, (v, stride), p, run),
                _ => {}
            }
        }
        let a = Left { ptr: v.as_ptr().add(at), row: 1, step: stride };
        let start = Start::Scaled(run.factor.as_ptr());
        product::<S, N>(s, dim, keys.count, a, (p.as_ptr(), w), (run.out.as_mut_ptr(), w), start);
    }
}

/// The scores of R rows, with keys in lanes, as far as whole vectors of keys go; returns for how many keys. The chains are those of [`product`].
///
/// # Safety
/// `k` has `count` rows of `dim` elements, a multiple of LANES, `stride` apart; one vector of rows in `q` and `p`; the instruction set has a transpose.
#[inline(always)]
unsafe fn few_scores<S: Simd, const R: usize>(
    s: S,
    dim: usize,
    count: usize,
    (k, stride): (*const f32, usize),
    q: &[f32],
    p: &mut [f32],
) -> usize {
    let whole = count / 16 * 16;
    for j in (0..whole).step_by(16) {
        let mut sums = [s.splat(0.0); R];
        for d in (0..dim).step_by(16) {
            let mut rows = [s.splat(0.0); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                // SAFETY: elements d..d + 16 of key j + i, as the caller promises.
                *row = unsafe { s.load_ptr(k.add((j + i) * stride + d)) };
            }
            for (i, values) in s.transpose16(rows).into_iter().enumerate() {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = s.fma(values, s.splat(q[(d + i) * 16 + r]), *sum);
                }
            }
        }
        let mut scores = [0f32; 16];
        for (r, sum) in sums.into_iter().enumerate() {
            s.store(&mut scores, 0, sum);
            for (i, score) in scores.iter().enumerate() {
                p[(j + i) * 16 + r] = *score;
            }
        }
    }
    whole
}

/// The last step of [`fold`] for R rows: with so few of them in lanes, vectors along D do with a fraction of the multiply-adds. The chains are the
/// same, and so are the bits.
///
/// # Safety
/// `v` has `count` rows of `dim` elements, a multiple of LANES, `stride` apart; one vector of rows in `p` and `run`.
#[inline(always)]
unsafe fn few_rows<S: Simd, const R: usize>(
    s: S,
    dim: usize,
    count: usize,
    (v, stride): (*const f32, usize),
    p: &[f32],
    run: &mut Running<'_>,
) {
    // SAFETY: the caller's promise; the strips lie in the rows.
    unsafe {
        let mut d = 0;
        while d < dim {
            let left = dim - d;
            d += if S::LANES == 16 && left >= 4 * S::LANES {
                strip::<S, R, 4>(s, d, count, (v, stride), p, run)
            } else if left >= 2 * S::LANES {
                strip::<S, R, 2>(s, d, count, (v, stride), p, run)
            } else {
                strip::<S, R, 1>(s, d, count, (v, stride), p, run)
            };
        }
    }
}

/// V vectors along D of [`few_rows`], from `d` on; returns how many values they are.
///
/// # Safety
/// As [`few_rows`]; the vectors lie in the rows.
#[inline(always)]
unsafe fn strip<S: Simd, const R: usize, const V: usize>(
    s: S,
    d: usize,
    count: usize,
    (v, stride): (*const f32, usize),
    p: &[f32],
    run: &mut Running<'_>,
) -> usize {
    let w = S::LANES;
    let mut sums = [[s.splat(0.0); V]; R];
    let mut column = [0f32; 16];
    // SAFETY: the caller's promise; a vector has at most 16 values.
    unsafe {
        for r in 0..R {
            for n in 0..V {
                for (lane, x) in column.iter_mut().enumerate().take(w) {
                    *x = run.out[(d + n * w + lane) * w + r];
                }
                sums[r][n] = s.mul(s.load_ptr(column.as_ptr()), s.splat(run.factor[r]));
            }
        }
        for j in 0..count {
            let mut values = [s.splat(0.0); V];
            for n in 0..V {
                values[n] = s.load_ptr(v.add(j * stride + d + n * w));
            }
            for r in 0..R {
                let weight = s.splat(*p.get_unchecked(j * w + r));
                for n in 0..V {
                    sums[r][n] = s.fma(values[n], weight, sums[r][n]);
                }
            }
        }
        for r in 0..R {
            for n in 0..V {
                s.store_ptr(column.as_mut_ptr(), sums[r][n]);
                for (lane, x) in column.iter().enumerate().take(w) {
                    run.out[(d + n * w + lane) * w + r] = *x;
                }
            }
        }
    }
    V * w
}

/// Asks for `count` rows of `dim` values, `stride` apart: those of the block after the one at hand. A decoding step does so little with each row that memory sets its pace, and rows of
/// one head lie too far apart for the processor to foresee.
#[inline(always)]
fn prefetch<S: Simd>(s: S, x: *const f32, (count, stride): (usize, usize), dim: usize) {
    for j in 0..count {
        let row = x.wrapping_add(j * stride);
        for d in (0..dim).step_by(16) {
            s.prefetch(row.wrapping_add(d));
        }
    }
}

/// Whether all values of `keys` are finite: only then may a masked one be multiplied by zero.
#[inline(always)]
fn finite<S: Simd>(s: S, g: Group, keys: Keys, v: &[f32]) -> bool {
    let zero = s.splat(0.0);
    let mut sum = zero;
    for j in keys.first..keys.first + keys.count {
        let at = g.value_offset(j);
        let row = &v[at..at + g.value_dim];
        let mut d = 0;
        while d < g.value_dim {
            sum = s.fma(s.load(row, d), zero, sum);
            d += S::LANES;
        }
    }
    s.sum(sum) == 0.0
}

/// The last step of [`fold`] where a masked value is not finite: each row takes up only what it sees, in the same order.
#[inline(always)]
unsafe fn fold_values_exactly<S: Simd, const N: usize>(
    s: S,
    g: Group,
    keys: Keys,
    v: &[f32],
    p: &[f32],
    (from, to): (&[f32], &[f32]),
    run: &mut Running<'_>,
) {
    let w = N * S::LANES;
    // SAFETY: as `fold`.
    unsafe {
        for lane in (0..w).step_by(S::LANES) {
            let (from, to) = (s.load_ptr(from.as_ptr().add(lane)), s.load_ptr(to.as_ptr().add(lane)));
            let factor = s.load_ptr(run.factor.as_ptr().add(lane));
            for d in 0..g.value_dim {
                let out = run.out.as_mut_ptr().add(d * w + lane);
                let mut sum = s.mul(s.load_ptr(out), factor);
                for j in 0..keys.count {
                    let value = s.splat(v[g.value_offset(keys.first + j) + d]);
                    let more = s.fma(value, s.load_ptr(p.as_ptr().add(j * w + lane)), sum);
                    sum = if_seen(s, keys.first + j, from, to, more, sum);
                }
                s.store_ptr(out, sum);
            }
        }
    }
}
