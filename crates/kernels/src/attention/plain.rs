//! The reference attention: one query row at a time, the whole row of scores, in f64.

use super::{Attention, Seq};

fn visible(a: &Attention<'_>, s: &Seq, query: usize) -> std::ops::Range<usize> {
    let position = s.kv_len + s.ahead - s.q_len + query;
    let first = a.window.map_or(0, |w| (position + 1).saturating_sub(w));
    first..s.kv_len.min(position + 1)
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// See [`super::forward`].
pub fn forward(a: &Attention<'_>, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32], lse: &mut [f32]) {
    let (n, kh, d, vd) = (a.heads, a.kv_heads, a.head_dim, a.value_dim);
    for s in a.seqs {
        for i in 0..s.q_len {
            let keys = visible(a, s, i);
            for h in 0..n {
                let row = ((s.q_start + i) * n + h) * d;
                let key = |j: usize| (s.kv_start + j) * kh + h / (n / kh);
                let kv = |j: usize| key(j) * d;
                let scores: Vec<f64> =
                    keys.clone().map(|j| f64::from(a.scale) * dot(&q[row..row + d], &k[kv(j)..kv(j) + d])).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                lse[(s.q_start + i) * n + h] = (max + sum.ln()) as f32;
                for e in 0..vd {
                    let value = |j: usize| f64::from(v[key(j) * vd + e]);
                    let o: f64 = keys.clone().zip(&scores).map(|(j, s)| (s - max).exp() / sum * value(j)).sum();
                    out[((s.q_start + i) * n + h) * vd + e] = o as f32;
                }
            }
        }
    }
}

/// See [`super::backward`].
pub fn backward(
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
) {
    let (n, kh, d, vd) = (a.heads, a.kv_heads, a.head_dim, a.value_dim);
    for s in a.seqs {
        let rows = |d: usize| s.kv_start * kh * d..(s.kv_start + s.kv_len) * kh * d;
        dk[rows(d)].fill(0.0);
        dv[rows(vd)].fill(0.0);
    }
    for s in a.seqs {
        for i in 0..s.q_len {
            for h in 0..n {
                let at = (s.q_start + i) * n + h;
                let (row, vrow) = (at * d, at * vd..(at + 1) * vd);
                let (qr, or, gr) = (&q[row..row + d], &out[vrow.clone()], &dout[vrow]);
                let delta = dot(gr, or);
                let l = f64::from(lse[(s.q_start + i) * n + h]);
                let mut g = vec![0f64; d];
                for j in visible(a, s, i) {
                    let key = (s.kv_start + j) * kh + h / (n / kh);
                    let (kv, vv) = (key * d, key * vd);
                    let p = (f64::from(a.scale) * dot(qr, &k[kv..kv + d]) - l).exp();
                    let ds = p * (dot(gr, &v[vv..vv + vd]) - delta) * f64::from(a.scale);
                    for e in 0..d {
                        g[e] += ds * f64::from(k[kv + e]);
                        dk[kv + e] += (ds * f64::from(qr[e])) as f32;
                    }
                    for e in 0..vd {
                        dv[vv + e] += (p * f64::from(gr[e])) as f32;
                    }
                }
                for e in 0..d {
                    dq[row + e] = g[e] as f32;
                }
            }
        }
    }
}
