//! The kernel level of the forward: how rows are cut into tasks.

use super::panel::{Group, Running, VECTORS, bounds, fold, key_blocks, transpose_in};
use super::{Attention, BLOCK, Seq, cut};
use crate::par::Parts;
use crate::simd::{Simd, simd_fn};
use crate::{Device, Result};

/// Query rows of a task: whole panels on every instruction set.
const TASK_ROWS: usize = 192;

/// Rows of one sequence (for one key/value head) that a task handles.
struct Item {
    seq: Seq,
    first: usize,
    rows: usize,
}

/// All tasks but for the key/value head, the longest first.
fn items(a: &Attention<'_>) -> Vec<Item> {
    let share = a.heads / a.kv_heads;
    let mut items = vec![];
    for &seq in a.seqs {
        let rows = seq.q_len * share;
        let pieces = (0..rows).step_by(TASK_ROWS);
        items.extend(pieces.map(|first| Item { seq, first, rows: TASK_ROWS.min(rows - first) }));
    }
    // Keys of the last row times rows; a stable sort, so that the order is a matter of shapes.
    items.sort_by_cached_key(|i| {
        let seen = Group::new(a, i.seq, 0).visible(i.first + i.rows - 1);
        std::cmp::Reverse(seen.len() * i.rows)
    });
    items
}

/// See [`super::forward`]; lengths and sequences have been checked, Q rows of sequences do not overlap.
pub(super) fn forward(
    dev: &Device,
    a: &Attention<'_>,
    (q, k, v): (&[f32], &[f32], &[f32]),
    out: &mut [f32],
    stats: Stats<'_>,
) -> Result<()> {
    dev.scratch().reserve(space_len(a))?;
    let items = items(a);
    let out = Parts::new(out);
    let (running, first, second) = match stats {
        Stats::Final(lse) => (false, Parts::new(lse), Parts::new(&mut [])),
        Stats::Running(max, sum) => (true, Parts::new(max), Parts::new(sum)),
    };
    dev.team().run(items.len() * a.kv_heads, &|task, worker| {
        let item = &items[task / a.kv_heads];
        let g = Group::new(a, item.seq, task % a.kv_heads);
        let mut space = dev.scratch().worker(worker, space_len(a));
        let write = |r: usize| {
            let row = g.row_index(r);
            // SAFETY: no two tasks have a row in common, and a task lets go of a row before it asks for it again.
            unsafe {
                let first = &mut first.get(row..row + 1)[0];
                let stats = if running {
                    RowStats::Running(first, &mut second.get(row..row + 1)[0])
                } else {
                    RowStats::Final(first)
                };
                (out.get(row * g.value_dim..(row + 1) * g.value_dim), stats)
            }
        };
        rows(dev.isa(), g, (item.first, item.rows), a.scale, (q, k, v), space.as_mut_slice(), &write);
    });
    Ok(())
}

/// Lanes of the widest panel.
const WIDEST: usize = VECTORS * 16;

fn space_len(a: &Attention<'_>) -> usize {
    WIDEST * (a.head_dim + a.value_dim + BLOCK + 6)
}

/// What is left of the softmax beside the output: only its log-sum-exp, or all that is needed to go on, from which this call goes on too.
pub(super) enum Stats<'a> {
    Final(&'a mut [f32]),
    Running(&'a mut [f32], &'a mut [f32]),
}

/// The same for one row.
enum RowStats<'a> {
    Final(&'a mut f32),
    Running(&'a mut f32, &'a mut f32),
}

/// max + ln(sum).
pub(super) fn log_sum_exp(max: f32, sum: f32) -> f32 {
    (f64::from(max) + f64::from(sum).ln()) as f32
}

/// Gives the places where row `r` of a group leaves its output and statistics.
type Write<'a> = &'a dyn Fn(usize) -> (&'a mut [f32], RowStats<'a>);

simd_fn! {
    fn rows(
        s,
        g: Group,
        range: (usize, usize),
        scale: f32,
        qkv: (&[f32], &[f32], &[f32]),
        space: &mut [f32],
        write: Write<'_>,
    ) {
        let (mut first, mut left) = range;
        while left > 0 {
            // Narrow panels for what is left, so that a single row does not pay for three vectors.
            let n = left.div_ceil(S::LANES).min(VECTORS);
            let rows = left.min(n * S::LANES);
            match n {
                1 => panel::<S, 1>(s, g, (first, rows), scale, qkv, space, write),
                2 => panel::<S, 2>(s, g, (first, rows), scale, qkv, space, write),
                _ => panel::<S, 3>(s, g, (first, rows), scale, qkv, space, write),
            }
            (first, left) = (first + rows, left - rows);
        }
    }
}

#[inline(always)]
fn panel<S: Simd, const N: usize>(
    s: S,
    g: Group,
    (first, rows): (usize, usize),
    scale: f32,
    (q, k, v): (&[f32], &[f32], &[f32]),
    mut space: &mut [f32],
    write: Write<'_>,
) {
    let w = N * S::LANES;
    let queries = cut(&mut space, g.dim * w);
    let out = cut(&mut space, g.value_dim * w);
    let scores = cut(&mut space, BLOCK * w);
    let (from, to) = (cut(&mut space, w), cut(&mut space, w));
    let (max, sum, factor) = (cut(&mut space, w), cut(&mut space, w), cut(&mut space, w));
    transpose_in(g, (q, g.dim), (first, rows), scale, queries, w);
    bounds(g, first, rows, from, to);
    out.fill(0.0);
    sum.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    for i in 0..rows {
        let (so_far, RowStats::Running(from_max, from_sum)) = write(first + i) else { break };
        (max[i], sum[i]) = (*from_max, *from_sum);
        so_far.iter().enumerate().for_each(|(d, o)| out[d * w + i] = o * sum[i]);
    }
    let mut run = Running { max, sum, out, factor };
    for keys in key_blocks(g, first, rows) {
        // SAFETY: the pieces of `space` have the lengths asked for, the caller has checked K and V.
        unsafe { fold::<S, N>(s, g, (keys, rows), (k, v), queries, scores, (from, to), &mut run) };
    }
    let Running { max, sum, out, factor: inverse } = run;
    for (i, s) in inverse.iter_mut().zip(sum.iter()) {
        *i = 1.0 / s;
    }
    for i in 0..rows {
        let (to, stats) = write(first + i);
        for (d, o) in to.iter_mut().enumerate() {
            // + 0 makes a sum that underflowed to −0 the same as one that a masked block touched afterwards.
            *o = out[d * w + i] * inverse[i] + 0.0;
        }
        match stats {
            RowStats::Final(lse) => *lse = log_sum_exp(max[i], sum[i]),
            RowStats::Running(to_max, to_sum) => (*to_max, *to_sum) = (max[i], sum[i]),
        }
    }
}
