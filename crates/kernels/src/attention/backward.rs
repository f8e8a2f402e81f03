//! The backward: probabilities are computed again from the log-sum-exp, block by block.
//!
//! With P = e^(S − lse) and δ = dO·O (a number a row): dV = Pᵀ·dO, dS = P∘(dO·Vᵀ − δ), dQ = dS·K·scale, dK = dSᵀ·Q·scale.
//! A task owns a *part*: a run of rows of one sequence and one key/value head. It finishes dQ of its rows, and leaves what they
//! add to dK and dV in a partial sum of its own; a second round adds the parts of a sequence (and of those that share its keys) in order. Parts are cut by the
//! length of the sequence alone, so even one sequence keeps several threads busy, and the bits stay the same for all.

use super::panel::{BLOCK, Group, VECTORS, bounds, if_seen, key_blocks, transpose_in};
use super::tile::{Left, Start, product, wide_product};
use super::{Attention, Seq, cut};
use crate::elementwise::add_scaled_piece;
use crate::par::Parts;
use crate::simd::math::{exp, sum_over};
use crate::simd::{Simd, simd_fn};
use crate::{Device, Result};

/// Queries that make it worth to cut a sequence once more.
const PART_QUERIES: usize = 256;

/// Parts of a sequence at most: each needs a partial sum as long as the keys that it sees.
const MAX_PARTS: usize = 4;

/// Values of partial sums that may be in memory at once (64 MiB), unless one sequence alone needs more.
const SUMS: usize = 16 << 20;

/// Lanes of the widest panel, and what rows of D values are padded to.
const WIDEST: usize = VECTORS * 16;
const PAD: usize = 16;

/// Lengths of a padded row of K and of V.
#[derive(Clone, Copy)]
struct Padded {
    key: usize,
    value: usize,
}

impl Padded {
    /// Of partial sums of dK and dV for one key.
    fn both(self) -> usize {
        self.key + self.value
    }
}

/// What goes in.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) out: &'a [f32],
    pub(super) lse: &'a [f32],
    pub(super) dout: &'a [f32],
    pub(super) scale: f32,
    /// Whether the results are added to what is there.
    pub(super) onto: bool,
}

/// A run of rows of one group, the keys they see, and where their partial sums begin.
#[derive(Clone, Copy)]
struct Part {
    group: Group,
    first: usize,
    rows: usize,
    first_key: usize,
    keys: usize,
    sums: usize,
}

/// The parts of a group in order, and the length of all their sums.
fn parts(g: Group, padded: Padded, mut sums: usize, out: &mut Vec<Part>) -> usize {
    let queries = g.seq.q_len;
    let each = queries.div_ceil((queries / PART_QUERIES).clamp(1, MAX_PARTS)).max(1);
    for start in (0..queries).step_by(each) {
        let (first, rows) = (start * g.share, each.min(queries - start) * g.share);
        let first_key = g.visible(first).start;
        let keys = g.visible(first + rows - 1).end - first_key;
        out.push(Part { group: g, first, rows, first_key, keys, sums });
        sums += keys * padded.both();
    }
    sums
}

/// Sequences that share key rows, and so finish them together, for one key/value head.
#[derive(Clone, Copy)]
struct Finish<'a> {
    seqs: &'a [Seq],
    kv_head: usize,
    /// Their parts among those of the wave.
    parts: (usize, usize),
}

/// The sequences in the order of their keys, and where each run of those that share some ends.
fn by_keys(seqs: &[Seq]) -> (Vec<Seq>, Vec<usize>) {
    let mut sorted = seqs.to_vec();
    sorted.sort_by_key(|s| s.kv_start);
    let (mut ends, mut reach) = (vec![], 0);
    for (i, s) in sorted.iter().enumerate() {
        if i > 0 && s.kv_start >= reach {
            ends.push(i);
        }
        reach = reach.max(s.kv_start + s.kv_len);
    }
    ends.push(sorted.len());
    (sorted, ends)
}

/// See [`super::backward`]; lengths and sequences have been checked, Q rows of sequences do not overlap.
pub(super) fn backward(
    dev: &Device,
    a: &Attention<'_>,
    x: &Inputs<'_>,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) -> Result<()> {
    let padded = Padded { key: a.head_dim.next_multiple_of(PAD), value: a.value_dim.next_multiple_of(PAD) };
    let space = space_len((a.head_dim, a.value_dim), padded);
    dev.scratch().reserve(space)?;
    let (dq, dk, dv) = (Parts::new(dq), Parts::new(dk), Parts::new(dv));
    let (seqs, ends) = by_keys(a.seqs);
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let runs = starts.zip(&ends).map(|(start, &end)| &seqs[start..end]);
    let (mut wave, mut pending, mut sums): (Vec<Finish<'_>>, Vec<Part>, usize) = (vec![], vec![], 0);
    for (run, kv_head) in runs.flat_map(|run| (0..a.kv_heads).map(move |kv_head| (run, kv_head))) {
        let mut own = vec![];
        let add = |own: &mut Vec<Part>, sums| {
            run.iter().fold(sums, |sums, &seq| parts(Group::new(a, seq, kv_head), padded, sums, own))
        };
        let mut end = add(&mut own, sums);
        if end > SUMS && !wave.is_empty() {
            run_wave(dev, a, x, padded, (&wave, &pending, sums), &dq, &dk, &dv)?;
            wave.clear();
            pending.clear();
            own.clear();
            end = add(&mut own, 0);
        }
        wave.push(Finish { seqs: run, kv_head, parts: (pending.len(), pending.len() + own.len()) });
        pending.append(&mut own);
        sums = end;
    }
    run_wave(dev, a, x, padded, (&wave, &pending, sums), &dq, &dk, &dv)
}

/// Both rounds for some sequences.
fn run_wave(
    dev: &Device,
    a: &Attention<'_>,
    x: &Inputs<'_>,
    padded: Padded,
    (finishes, parts, sums): (&[Finish<'_>], &[Part], usize),
    dq: &Parts<'_, f32>,
    dk: &Parts<'_, f32>,
    dv: &Parts<'_, f32>,
) -> Result<()> {
    let mut space = dev.scratch().sums().take(sums)?;
    let sums = space.as_mut_slice();
    let mut order: Vec<&Part> = parts.iter().collect();
    order.sort_by_key(|p| std::cmp::Reverse(p.rows * p.keys));
    {
        let sums = Parts::new(sums);
        dev.team().run(order.len(), &|i, worker| {
            let p = *order[i];
            let mut space = dev.scratch().worker(worker, space_len((p.group.dim, p.group.value_dim), padded));
            // SAFETY: parts have different rows and different sums.
            let sums = unsafe { sums.get(p.sums..p.sums + p.keys * padded.both()) };
            part(dev.isa(), p, x, padded, sums, space.as_mut_slice(), dq);
        });
    }
    let sums = &*sums;
    let mut jobs = vec![];
    for f in finishes {
        let Some(first) = f.seqs.first().map(|s| s.kv_start) else { continue };
        let end = f.seqs.iter().map(|s| s.kv_start + s.kv_len).max().unwrap_or(first);
        jobs.extend((first..end).step_by(FINISH_KEYS).map(|row| (f, row, (row + FINISH_KEYS).min(end))));
    }
    dev.team().run(jobs.len(), &|i, _| {
        let (f, first, end) = jobs[i];
        let parts = &parts[f.parts.0..f.parts.1];
        for row in first..end {
            let at = row * a.kv_heads + f.kv_head;
            // A part's sums of keys come first, those of values behind them.
            let halves = [(dk, a.head_dim, padded.key, false), (dv, a.value_dim, padded.value, true)];
            for (grad, dim, width, values) in halves {
                // SAFETY: no two jobs have a key row in common.
                let to = unsafe { grad.get(at * dim..(at + 1) * dim) };
                if !x.onto {
                    to.fill(0.0);
                }
                for p in parts {
                    let first = p.group.seq.kv_start + p.first_key;
                    if (first..first + p.keys).contains(&row) {
                        let start = p.sums + if values { p.keys * padded.key } else { 0 };
                        let from = start + (row - first) * width;
                        add_scaled_piece(dev.isa(), to, &sums[from..from + dim], 1.0);
                    }
                }
            }
        }
    });
    Ok(())
}

/// Keys that a task of the second round adds up.
const FINISH_KEYS: usize = 256;

fn space_len((dim, value_dim): (usize, usize), padded: Padded) -> usize {
    WIDEST * (2 * dim + value_dim + padded.both() + 2 * BLOCK + 4)
}

simd_fn! {
    fn part(
        s,
        part: Part,
        x: &Inputs<'_>,
        padded: Padded,
        sums: &mut [f32],
        space: &mut [f32],
        dq: &Parts<'_, f32>,
    ) {
        sums.fill(0.0);
        let end = part.first + part.rows;
        let mut first = part.first;
        while first < end {
            let n = (end - first).div_ceil(S::LANES).min(VECTORS);
            let rows = (end - first).min(n * S::LANES);
            match n {
                1 => panel::<S, 1>(s, &part, (first, rows), x, padded, sums, space, dq),
                2 => panel::<S, 2>(s, &part, (first, rows), x, padded, sums, space, dq),
                _ => panel::<S, 3>(s, &part, (first, rows), x, padded, sums, space, dq),
            }
            first += rows;
        }
    }
}

#[inline(always)]
fn panel<S: Simd, const N: usize>(
    s: S,
    part: &Part,
    (first, rows): (usize, usize),
    x: &Inputs<'_>,
    padded: Padded,
    sums: &mut [f32],
    mut space: &mut [f32],
    dq: &Parts<'_, f32>,
) {
    let (g, w) = (part.group, N * S::LANES);
    let (dim, stride, value_dim, value_stride) = (g.dim, g.key_stride(), g.value_dim, g.value_stride());
    let queries = cut(&mut space, dim * w);
    let grads = cut(&mut space, value_dim * w);
    let query_grads = cut(&mut space, dim * w);
    let query_rows = cut(&mut space, w * padded.key);
    let grad_rows = cut(&mut space, w * padded.value);
    let probs = cut(&mut space, BLOCK * w);
    let score_grads = cut(&mut space, BLOCK * w);
    let (from, to) = (cut(&mut space, w), cut(&mut space, w));
    let (lse, delta) = (cut(&mut space, w), cut(&mut space, w));
    transpose_in(g, (x.q, dim), (first, rows), x.scale, queries, w);
    transpose_in(g, (x.dout, value_dim), (first, rows), 1.0, grads, w);
    bounds(g, first, rows, from, to);
    for i in 0..w {
        // Rows that only fill up the panel are zero, so whatever their probabilities they add nothing.
        let (query_row, grad_row) = (&mut query_rows[i * padded.key..], &mut grad_rows[i * padded.value..]);
        query_row[..padded.key].fill(0.0);
        grad_row[..padded.value].fill(0.0);
        (lse[i], delta[i]) = (0.0, 0.0);
        if i < rows {
            let index = g.row_index(first + i);
            let (row, value_row) = (index * dim..(index + 1) * dim, index * value_dim..(index + 1) * value_dim);
            let (q, out, dout) = (&x.q[row], &x.out[value_row.clone()], &x.dout[value_row]);
            query_row.iter_mut().zip(q).for_each(|(to, q)| *to = q * x.scale);
            grad_row[..value_dim].copy_from_slice(dout);
            lse[i] = x.lse[index];
            delta[i] = sum_over(
                s,
                value_dim,
                #[inline(always)]
                |d, sum| s.fma(s.load(dout, d), s.load(out, d), sum),
            );
        }
    }
    query_grads.fill(0.0);
    let (key_sums, value_sums) = sums.split_at_mut(part.keys * padded.key);
    for keys in key_blocks(g, first, rows) {
        let (at, value_at) = (g.key_offset(keys.first), g.value_offset(keys.first));
        let sum_at = keys.first - part.first_key;
        // SAFETY: buffers have the lengths asked for, K and V the keys, the sums every key that the part sees.
        unsafe {
            let a = Left { ptr: x.k.as_ptr().add(at), row: stride, step: 1 };
            product::<S, N>(s, keys.count, dim, a, (queries.as_ptr(), w), (probs.as_mut_ptr(), w), Start::Zero);
            let a = Left { ptr: x.v.as_ptr().add(value_at), row: value_stride, step: 1 };
            product::<S, N>(
                s,
                keys.count,
                value_dim,
                a,
                (grads.as_ptr(), w),
                (score_grads.as_mut_ptr(), w),
                Start::Zero,
            );
            let zero = s.splat(0.0);
            for lane in (0..w).step_by(S::LANES) {
                let (from, to) = (s.load_ptr(from.as_ptr().add(lane)), s.load_ptr(to.as_ptr().add(lane)));
                let (lse, delta) = (s.load_ptr(lse.as_ptr().add(lane)), s.load_ptr(delta.as_ptr().add(lane)));
                for j in 0..keys.count {
                    let (p, d) = (probs.as_mut_ptr().add(j * w + lane), score_grads.as_mut_ptr().add(j * w + lane));
                    let mut prob = exp(s, s.sub(s.load_ptr(p), lse));
                    let mut grad = s.mul(prob, s.sub(s.load_ptr(d), delta));
                    if keys.masked {
                        prob = if_seen(s, keys.first + j, from, to, prob, zero);
                        grad = if_seen(s, keys.first + j, from, to, grad, zero);
                    }
                    s.store_ptr(p, prob);
                    s.store_ptr(d, grad);
                }
            }
            let rows_of = |x: &[f32]| Left { ptr: x.as_ptr(), row: w, step: 1 };
            let (b, c) = (grad_rows.as_ptr(), value_sums.as_mut_ptr().add(sum_at * padded.value));
            let (b, c) = ((b, padded.value), (c, padded.value));
            wide_product(s, keys.count, w, rows_of(probs), b, c, padded.value, Start::Sum);
            let (b, c) = (query_rows.as_ptr(), key_sums.as_mut_ptr().add(sum_at * padded.key));
            let (b, c) = ((b, padded.key), (c, padded.key));
            wide_product(s, keys.count, w, rows_of(score_grads), b, c, padded.key, Start::Sum);
            let a = Left { ptr: x.k.as_ptr().add(at), row: 1, step: stride };
            let c = (query_grads.as_mut_ptr(), w);
            product::<S, N>(s, dim, keys.count, a, (score_grads.as_ptr(), w), c, Start::Sum);
        }
    }
    for i in 0..rows {
        let index = g.row_index(first + i);
        // SAFETY: no two tasks have a row in common.
        let row = unsafe { dq.get(index * dim..(index + 1) * dim) };
        for (d, to) in row.iter_mut().enumerate() {
            let grad = query_grads[d * w + i] * x.scale;
            *to = if x.onto { *to + grad } else { grad };
        }
    }
}
