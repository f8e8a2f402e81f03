//! Causal attention over packed sequences, the call.
//!
//! Rows of all sequences lie one after another without padding. No S × S buffer exists: scores are formed block by block and
//! folded into a running softmax (the flash scheme: Dao et al., arXiv 2205.14135 and 2307.08691; the running softmax is
//! Milakov & Gimelshein, arXiv 1805.02867). Blocks of keys are counted from the start of the sequence, so that a query row
//! gets the same bits in any batch and also when it is the only row (generation with a cache).

mod backward;
mod forward;
mod panel;
pub mod plain;
mod tile;

use crate::error::{bad_shape, check_len};
use crate::profile::{Cost, Shape};
use crate::{Device, Result};
use panel::BLOCK;

/// One sequence: where its rows lie in Q and in K/V.
///
/// Query i of the sequence stands at position `kv_len + ahead − q_len + i` and sees those of its keys that are at or before that position
/// (causal); in training `q_len == kv_len`, in generation the keys before the queries come from the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq {
    /// First row in Q, the output and the log-sum-exp.
    pub q_start: usize,
    /// Number of query rows.
    pub q_len: usize,
    /// First row in K and V.
    pub kv_start: usize,
    /// Number of key rows; with `ahead` at least `q_len` and at most 2²⁴.
    pub kv_len: usize,
    /// How far the last query stands beyond the last key: 0 unless the keys in between are elsewhere, as where ranks hold pieces of a sequence.
    /// With a window less than that, so that every query sees a key.
    pub ahead: usize,
}

impl Seq {
    /// The keys that query `i` sees, counted from the first key; at least one.
    fn visible(&self, window: Option<usize>, i: usize) -> std::ops::Range<usize> {
        let position = self.kv_len + self.ahead - self.q_len + i;
        window.map_or(0, |w| (position + 1).saturating_sub(w))..(position + 1).min(self.kv_len)
    }
}

/// The form of an attention call.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// The sequences; their Q rows must not overlap.
    pub seqs: &'a [Seq],
    /// Query heads N.
    pub heads: usize,
    /// Key/value heads K; divides `heads` (grouped-query attention).
    pub kv_heads: usize,
    /// Head dimension D of queries and keys.
    pub head_dim: usize,
    /// Head dimension Dv of values and of the output; D in most models.
    pub value_dim: usize,
    /// Factor of the scores, usually 1/√D.
    pub scale: f32,
    /// Sliding window: a query at position p sees keys p−window+1 ..= p.
    pub window: Option<usize>,
}

impl Attention<'_> {
    /// Checks the form against the values of Q and of K; gives their rows Tq and Tk.
    fn check(&self, q: usize, k: usize) -> Result<(usize, usize)> {
        if self.head_dim == 0 || self.value_dim == 0 {
            return bad_shape("attention", "a head dimension of 0");
        }
        if self.heads == 0 || self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return bad_shape(
                "attention",
                format!("{} query heads do not divide over {} key/value heads", self.heads, self.kv_heads),
            );
        }
        let widest = self.head_dim.max(self.value_dim);
        let width = |heads: usize| match heads.checked_mul(widest) {
            Some(_) => Ok(heads * self.head_dim),
            None => bad_shape("attention", format!("{heads} heads of {widest} values are beyond any memory")),
        };
        let (tq, tk) = (q / width(self.heads)?, k / width(self.kv_heads)?);
        if self.window == Some(0) {
            return bad_shape("attention", "a window of 0 hides every key");
        }
        for s in self.seqs {
            // Positions are compared as f32, which is exact up to here.
            let end = s.kv_len.saturating_add(s.ahead);
            if end > 1 << 24 {
                return bad_shape("attention", format!("{end} keys in a sequence, at most 2²⁴ are possible"));
            }
            let fits = |start: usize, len: usize, rows: usize| start.checked_add(len).is_some_and(|end| end <= rows);
            if !fits(s.q_start, s.q_len, tq) || !fits(s.kv_start, s.kv_len, tk) || end < s.q_len {
                return bad_shape("attention", format!("{s:?} does not fit {tq} query rows and {tk} key rows"));
            }
            if s.q_len > 0 && (s.kv_len == 0 || self.window.is_some_and(|w| s.ahead >= w)) {
                return bad_shape("attention", format!("{s:?} has a query that sees no key"));
            }
        }
        if share_queries(self.seqs) {
            return bad_shape("attention", "two sequences share query rows");
        }
        Ok((tq, tk))
    }
}

impl Attention<'_> {
    /// Whether every sequence asks for one new token.
    fn is_decoding(&self) -> bool {
        self.seqs.iter().all(|s| s.q_len == 1 && s.kv_len > 1)
    }

    /// `products` of the keys that are seen; `queries` and `keys`: how often rows as long as those of Q and of K are moved.
    fn cost(&self, products: f64, queries: f64, keys: f64) -> Cost {
        let (mut pairs, mut q_rows, mut k_rows) = (0.0, 0.0, 0.0);
        for s in self.seqs {
            pairs += (0..s.q_len).map(|i| s.visible(self.window, i).len() as f64).sum::<f64>();
            q_rows += s.q_len as f64;
            k_rows += if s.q_len == 0 { 0.0 } else { (s.kv_len - s.visible(self.window, 0).start) as f64 };
        }
        let (heads, kv_heads) = (self.heads as f64, self.kv_heads as f64);
        // As many products and rows have the one width as the other, near enough.
        let dim = (self.head_dim + self.value_dim) as f64 / 2.0;
        Cost {
            flops: 2.0 * products * pairs * heads * dim,
            bytes: 4.0 * dim * (queries * q_rows * heads + keys * k_rows * kv_heads) + 4.0 * q_rows * heads,
            shape: Shape::Heads(self.heads, self.kv_heads, self.head_dim),
        }
    }
}

/// Cuts the first `n` values off `space`.
fn cut<'a>(space: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (head, tail) = std::mem::take(space).split_at_mut(n);
    *space = tail;
    head
}

/// Whether the query rows of two sequences overlap.
fn share_queries(seqs: &[Seq]) -> bool {
    let range = |s: &Seq| (s.q_start, s.q_len);
    let ordered = |a: (usize, usize), b: (usize, usize)| a.0 + a.1 <= b.0;
    if seqs.windows(2).all(|w| ordered(range(&w[0]), range(&w[1]))) {
        return false;
    }
    let mut ranges: Vec<_> = seqs.iter().map(range).filter(|r| r.1 > 0).collect();
    ranges.sort_unstable();
    !ranges.windows(2).all(|w| ordered(w[0], w[1]))
}

/// Forward. `q` [Tq,N,D], `k` [Tk,K,D], `v` [Tk,K,Dv] → `out` [Tq,N,Dv], `lse` [Tq,N] (natural log of the softmax denominator).
/// Rows of `out` and `lse` outside every sequence are left alone.
///
/// # Errors
/// If a length or a sequence does not fit, or there is no memory for the working buffers.
pub fn forward(
    dev: &Device,
    a: &Attention<'_>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
) -> Result<()> {
    let (tq, tk) = a.check(q.len(), k.len())?;
    check_len("attention", "q", q.len(), tq * a.heads * a.head_dim)?;
    check_len("attention", "k", k.len(), tk * a.kv_heads * a.head_dim)?;
    check_len("attention", "v", v.len(), tk * a.kv_heads * a.value_dim)?;
    check_len("attention", "out", out.len(), tq * a.heads * a.value_dim)?;
    check_len("attention", "lse", lse.len(), tq * a.heads)?;
    let name = if a.is_decoding() { "attention decoding" } else { "attention forward" };
    // Two products; Q is read and the output written; K and V are read.
    let _span = dev.profiler().kernel(name, || a.cost(2.0, 2.0, 2.0));
    forward::forward(dev, a, (q, k, v), out, forward::Stats::Final(lse))
}

/// The running softmax of rows whose keys come in several calls, each of which brings some of them, in any order.
///
/// It is (max, sum) and not their log-sum-exp: rounded to f32, that would weigh one call's keys against another's no more exactly than its own
/// size times 2⁻²⁴.
#[derive(Debug)]
pub struct Running<'a> {
    /// The softmax over the keys so far, applied to V: [Tq,N,D]. Zeros at first.
    pub out: &'a mut [f32],
    /// The largest score so far: [Tq,N]. −∞ at first, and as long as a row has seen no key.
    pub max: &'a mut [f32],
    /// Σ e^(score − max): [Tq,N]. Zeros at first.
    pub sum: &'a mut [f32],
}

/// Forward over some more keys; `run` goes on from where it is (for partial results merged after the fact see Liu et al., Ring Attention,
/// arXiv 2310.01889; here the softmax simply runs on). Rows outside every sequence are left alone.
///
/// # Errors
/// As [`forward`].
pub fn forward_onto(
    dev: &Device,
    a: &Attention<'_>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    run: &mut Running<'_>,
) -> Result<()> {
    let (tq, tk) = a.check(q.len(), k.len())?;
    for (what, got, want) in [
        ("q", q.len(), tq * a.heads * a.head_dim),
        ("k", k.len(), tk * a.kv_heads * a.head_dim),
        ("v", v.len(), k.len()),
        ("out", run.out.len(), q.len()),
        ("max", run.max.len(), tq * a.heads),
        ("sum", run.sum.len(), tq * a.heads),
    ] {
        check_len("attention", what, got, want)?;
    }
    // Beside what the forward moves, the output is read.
    let _span = dev.profiler().kernel("attention forward", || a.cost(2.0, 3.0, 2.0));
    forward::forward(dev, a, (q, k, v), run.out, forward::Stats::Running(run.max, run.sum))
}

/// The log-sum-exp of a running softmax, as [`backward`] takes it: max + ln(sum); −∞ for a row that has seen no key.
///
/// # Errors
/// If lengths differ.
pub fn log_sum_exp(max: &[f32], sum: &[f32], lse: &mut [f32]) -> Result<()> {
    check_len("log_sum_exp", "sum", sum.len(), max.len())?;
    check_len("log_sum_exp", "lse", lse.len(), max.len())?;
    for ((lse, &max), &sum) in lse.iter_mut().zip(max).zip(sum) {
        *lse = forward::log_sum_exp(max, sum);
    }
    Ok(())
}

/// Backward. Takes the forward's `q`, `k`, `v`, `out`, `lse` and the gradient `dout` [Tq,N,Dv]; overwrites `dq` [Tq,N,D] on
/// every sequence's rows and `dk` [Tk,K,D], `dv` [Tk,K,Dv] on every row that a sequence covers (others are left alone). Sequences may
/// share key rows: those get the sum.
///
/// # Errors
/// If a length or a sequence does not fit, or there is no memory for the working buffers.
#[allow(clippy::similar_names)]
pub fn backward(
    dev: &Device,
    a: &Attention<'_>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &[f32],
    lse: &[f32],
    dout: &[f32],
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) -> Result<()> {
    backward_call(dev, a, &backward::Inputs { q, k, v, out, lse, dout, scale: a.scale, onto: false }, dq, dk, dv)
}

/// Backward over some of the keys that `out` and `lse` come from, all of them together: as [`backward`], but adds to `dq`, `dk` and `dv`.
///
/// # Errors
/// As [`backward`].
#[allow(clippy::similar_names)]
pub fn backward_onto(
    dev: &Device,
    a: &Attention<'_>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &[f32],
    lse: &[f32],
    dout: &[f32],
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) -> Result<()> {
    backward_call(dev, a, &backward::Inputs { q, k, v, out, lse, dout, scale: a.scale, onto: true }, dq, dk, dv)
}

#[allow(clippy::similar_names)]
fn backward_call(
    dev: &Device,
    a: &Attention<'_>,
    inputs: &backward::Inputs<'_>,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) -> Result<()> {
    let &backward::Inputs { q, k, v, out, lse, dout, .. } = inputs;
    let (tq, tk) = a.check(q.len(), k.len())?;
    let (out_len, v_len) = (tq * a.heads * a.value_dim, tk * a.kv_heads * a.value_dim);
    for (what, got, want) in [
        ("q", q.len(), tq * a.heads * a.head_dim),
        ("k", k.len(), tk * a.kv_heads * a.head_dim),
        ("v", v.len(), v_len),
        ("out", out.len(), out_len),
        ("lse", lse.len(), tq * a.heads),
        ("dout", dout.len(), out_len),
        ("dq", dq.len(), q.len()),
        ("dk", dk.len(), k.len()),
        ("dv", dv.len(), v_len),
    ] {
        check_len("attention backward", what, got, want)?;
    }
    // Five products; of Q's length: Q, output, its gradient, and dQ written; of K's: K, V, and dK, dV written.
    let _span = dev.profiler().kernel("attention backward", || a.cost(5.0, 4.0, 4.0));
    backward::backward(dev, a, inputs, dq, dk, dv)
}
