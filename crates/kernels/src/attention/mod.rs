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
/// Query i of the sequence stands at position `kv_len − q_len + i` and sees keys 0..= that position (causal); in training
/// `q_len == kv_len`, in generation the keys before the queries come from the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq {
    /// First row in Q, the output and the log-sum-exp.
    pub q_start: usize,
    /// Number of query rows.
    pub q_len: usize,
    /// First row in K and V.
    pub kv_start: usize,
    /// Number of key rows, at least `q_len` and at most 2²⁴.
    pub kv_len: usize,
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
            if s.kv_len > 1 << 24 {
                return bad_shape("attention", format!("{} keys in a sequence, at most 2²⁴ are possible", s.kv_len));
            }
            let fits = |start: usize, len: usize, rows: usize| start.checked_add(len).is_some_and(|end| end <= rows);
            if !fits(s.q_start, s.q_len, tq) || !fits(s.kv_start, s.kv_len, tk) || s.kv_len < s.q_len {
                return bad_shape("attention", format!("{s:?} does not fit {tq} query rows and {tk} key rows"));
            }
        }
        if overlap(self.seqs, |s| (s.q_start, s.q_len)) {
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
            let window = self.window.unwrap_or(usize::MAX);
            pairs += (s.kv_len - s.q_len + 1..=s.kv_len).map(|seen| seen.min(window) as f64).sum::<f64>();
            q_rows += s.q_len as f64;
            k_rows += s.kv_len.min(s.q_len.saturating_add(window) - 1) as f64;
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

/// Whether the ranges (start, length) of two sequences overlap.
fn overlap(seqs: &[Seq], range: impl Fn(&Seq) -> (usize, usize)) -> bool {
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
    forward::forward(dev, a, (q, k, v), out, lse)
}

/// Backward. Takes the forward's `q`, `k`, `v`, `out`, `lse` and the gradient `dout` [Tq,N,Dv]; overwrites `dq` [Tq,N,D] on
/// every sequence's rows and `dk` [Tk,K,D], `dv` [Tk,K,Dv] on every row that a sequence covers (others are left alone).
///
/// # Errors
/// If a length or a sequence does not fit, two sequences share key rows, or there is no memory for the working buffers.
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
    if overlap(a.seqs, |s| (s.kv_start, s.kv_len)) {
        return bad_shape("attention backward", "two sequences share key rows");
    }
    // Five products; of Q's length: Q, output, its gradient, and dQ written; of K's: K, V, and dK, dV written.
    let _span = dev.profiler().kernel("attention backward", || a.cost(5.0, 4.0, 4.0));
    let inputs = backward::Inputs { q, k, v, out, lse, dout, scale: a.scale };
    backward::backward(dev, a, &inputs, dq, dk, dv)
}
