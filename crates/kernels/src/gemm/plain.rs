//! The reference product: three loops, sums in f64.

use super::Gemm;

/// C = α·op(A)·op(B) [+ C] [+ bias], each element summed in f64 and rounded once.
pub fn gemm(g: &Gemm<'_>, c: &mut [f32]) {
    for i in 0..g.m {
        for j in 0..g.n {
            let mut sum = 0f64;
            for p in 0..g.k {
                let a = g.a.at(if g.a_trans { p * g.m + i } else { i * g.k + p });
                let b = g.b.at(if g.b_trans { j * g.k + p } else { p * g.n + j });
                sum += f64::from(a) * f64::from(b);
            }
            sum *= f64::from(g.alpha);
            if g.accumulate {
                sum += f64::from(c[i * g.n + j]);
            }
            if let Some(bias) = g.bias {
                sum += f64::from(bias[j]);
            }
            c[i * g.n + j] = sum as f32;
        }
    }
}
