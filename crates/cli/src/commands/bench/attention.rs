//! `phalanx bench attention`: forward and backward of causal attention, beside the multiply-add peak.

use phalanx_kernels::attention::{Attention, Seq, backward, forward};
use phalanx_kernels::peak;
use serde_json::json;

use super::super::runtime;
use super::{median, record, rounded, seconds, show, values};
use crate::args::BenchAttention;
use crate::out;
use crate::outcome::{Outcome, Result};

/// Sequences, tokens of each, heads, key/value heads, head dimension.
const SHAPES: &[(usize, usize, usize, usize, usize)] = &[
    (4, 512, 9, 3, 64),
    (1, 1024, 9, 3, 64),
    (1, 2048, 9, 3, 64),
    (1, 4096, 9, 3, 64),
    (1, 1024, 16, 8, 128),
    (1, 2048, 16, 8, 128),
    (1, 4096, 16, 8, 128),
];

pub fn run(a: &BenchAttention) -> Result<Outcome> {
    let rt = runtime(a.threads)?;
    let dev = rt.device();
    let threads = dev.team().threads();
    record(dev, &a.profiling);
    for &(docs, s, heads, kv_heads, d) in SHAPES {
        let seqs: Vec<Seq> =
            (0..docs).map(|i| Seq { q_start: i * s, q_len: s, kv_start: i * s, kv_len: s, ahead: 0 }).collect();
        let call = Attention {
            seqs: &seqs,
            heads,
            kv_heads,
            head_dim: d,
            value_dim: d,
            scale: 1.0 / (d as f32).sqrt(),
            window: None,
        };
        let (nq, nk) = (docs * s * heads * d, docs * s * kv_heads * d);
        let [q, k, v, dout] = [(nq, 1), (nk, 2), (nk, 3), (nq, 4)].map(|(n, seed)| values(&rt, n, seed));
        let (q, k, v, dout) = (q?, k?, v?, dout?);
        let [o, lse, dq, dk, dv] = [nq, nq / d, nq, nk, nk].map(|n| values(&rt, n, 5));
        let (mut o, mut lse, mut dq, mut dk, mut dv) = (o?, lse?, dq?, dk?, dv?);
        let (mut forwards, mut backwards, mut peaks) = (vec![], vec![], vec![]);
        for _ in 0..a.rounds.max(1) {
            let t =
                seconds(dev, || Ok(forward(dev, &call, q.f32()?, k.f32()?, v.f32()?, o.f32_mut()?, lse.f32_mut()?)?))?;
            forwards.push(1e-9 / t);
            let t = seconds(dev, || {
                let (dq, dk, dv) = (dq.f32_mut()?, dk.f32_mut()?, dv.f32_mut()?);
                let (q, k, v) = (q.f32()?, k.f32()?, v.f32()?);
                Ok(backward(dev, &call, q, k, v, o.f32()?, lse.f32()?, dout.f32()?, dq, dk, dv)?)
            })?;
            backwards.push(1e-9 / t);
            peaks.push(peak::fma_gflops(dev));
        }
        // Two products of the visible half in forward, five in backward.
        let product = (docs * s * (s + 1) / 2 * heads * d * 2) as f64;
        let peak = median(peaks);
        for (pass, rate) in
            [("forward", 2.0 * product * median(forwards)), ("backward", 5.0 * product * median(backwards))]
        {
            let shape = format!("{docs}x{s}, {heads}/{kv_heads} heads of {d}");
            if a.json {
                out::line(json!({
                    "pass": pass, "shape": shape, "dtype": "f32", "isa": dev.isa().to_string(), "threads": threads,
                    "gflops": rounded(rate, 1), "fraction_of_peak": rounded(rate / peak, 3), "peak": rounded(peak, 1),
                }))?;
            } else {
                out::line(format_args!(
                    "{pass:<9} {shape:<28} {rate:>7.1} GFLOP/s   {:.2} of the peak {peak:.0}",
                    rate / peak
                ))?;
            }
        }
    }
    show(&rt, &a.profiling, a.json)?;
    Ok(Outcome::Done)
}
