//! The row kernels' references: one element at a time, in f64. Only tests use them.
//!
//! Arguments are those of the kernels, results are returned. Products and attention have theirs beside them:
//! [`gemm::plain`](crate::gemm::plain), [`attention::plain`](crate::attention::plain).

use crate::adamw::AdamW;
use crate::cross_entropy::{IGNORE, LinearCrossEntropy};
use crate::glu::Act;

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&v| v as f32).collect()
}

/// Norm of each row; `centre` subtracts the mean (layer norm). (y, mean, rstd).
pub fn norm(x: &[f32], w: &[f32], b: &[f32], eps: f32, centre: bool) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let h = w.len();
    let (mut y, mut means, mut rstds) = (vec![], vec![], vec![]);
    for row in x.chunks_exact(h) {
        let row = widen(row);
        let mean = if centre { row.iter().sum::<f64>() / h as f64 } else { 0.0 };
        let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / h as f64;
        let rstd = 1.0 / (var + f64::from(eps)).sqrt();
        for (j, v) in row.iter().enumerate() {
            let bias = b.get(j).map_or(0.0, |&b| f64::from(b));
            y.push(((v - mean) * rstd * f64::from(w[j]) + bias) as f32);
        }
        means.push(mean as f32);
        rstds.push(rstd as f32);
    }
    (y, means, rstds)
}

/// Backward of [`norm`]: (dx, dw, db).
pub fn norm_backward(x: &[f32], w: &[f32], eps: f32, dy: &[f32], centre: bool) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let h = w.len();
    let (mut dx, mut dw, mut db) = (vec![], vec![0f64; h], vec![0f64; h]);
    for (row, dy) in x.chunks_exact(h).zip(dy.chunks_exact(h)) {
        let (row, dy) = (widen(row), widen(dy));
        let mean = if centre { row.iter().sum::<f64>() / h as f64 } else { 0.0 };
        let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / h as f64;
        let rstd = 1.0 / (var + f64::from(eps)).sqrt();
        let hat: Vec<f64> = row.iter().map(|v| (v - mean) * rstd).collect();
        let g: Vec<f64> = dy.iter().zip(w).map(|(d, &w)| d * f64::from(w)).collect();
        let s1 = if centre { g.iter().sum::<f64>() / h as f64 } else { 0.0 };
        let s2 = g.iter().zip(&hat).map(|(g, x)| g * x).sum::<f64>() / h as f64;
        for j in 0..h {
            dx.push((rstd * (g[j] - s1 - hat[j] * s2)) as f32);
            dw[j] += dy[j] * hat[j];
            db[j] += dy[j];
        }
    }
    (dx, narrow(&dw), narrow(&db))
}

/// See [`rope::apply`](crate::rope::apply).
pub fn rope(x: &[f32], heads: usize, head_dim: usize, cos: &[f32], sin: &[f32], inverse: bool) -> Vec<f32> {
    let t = x.len() / (heads * head_dim);
    let half = cos.len() / t;
    let mut y = x.to_vec();
    for i in 0..t {
        for h in 0..heads {
            let row = (i * heads + h) * head_dim;
            for j in 0..half {
                let (c, s) = (f64::from(cos[i * half + j]), f64::from(sin[i * half + j]));
                let s = if inverse { -s } else { s };
                let (a, b) = (f64::from(x[row + j]), f64::from(x[row + j + half]));
                y[row + j] = (a * c - b * s) as f32;
                y[row + j + half] = (b * c + a * s) as f32;
            }
        }
    }
    y
}

/// See [`glu::forward`](crate::glu::forward) and [`glu::backward`](crate::glu::backward): (out, dgate, dup).
pub fn glu(act: Act, gate: &[f32], up: &[f32], dout: &[f32]) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (mut out, mut dgate, mut dup) = (vec![], vec![], vec![]);
    for ((&g, &u), &d) in gate.iter().zip(up).zip(dout) {
        let (value, slope) = act.value_and_slope(f64::from(g));
        out.push((value * f64::from(u)) as f32);
        dgate.push((f64::from(d) * f64::from(u) * slope) as f32);
        dup.push((f64::from(d) * value) as f32);
    }
    (out, dgate, dup)
}

/// ln Σ eˣ of each row of `v` values.
pub fn log_sum_exps(logits: &[f32], v: usize) -> Vec<f32> {
    logits
        .chunks_exact(v)
        .map(|row| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum();
            (f64::from(max) + sum.ln()) as f32
        })
        .collect()
}

/// What [`linear_cross_entropy`](crate::cross_entropy::linear_cross_entropy) computes, with all logits at once.
pub struct HeadLoss {
    /// Σ −log p.
    pub sum: f64,
    /// Counted tokens.
    pub count: usize,
    /// [T]
    pub logp: Vec<f32>,
    /// [T,H]
    pub d_hidden: Vec<f32>,
    /// [V,H]
    pub d_weight: Vec<f32>,
    /// [V]
    pub d_bias: Vec<f32>,
}

/// See [`HeadLoss`].
pub fn linear_cross_entropy(a: &LinearCrossEntropy<'_>) -> HeadLoss {
    let (t, h) = (a.targets.len(), a.hidden_size);
    let v = a.weight.len() / h;
    let scale = f64::from(a.grad_scale);
    let (mut sum, mut count, mut logp) = (0.0, 0, vec![0f32; t]);
    let (mut dx, mut dw, mut db) = (vec![0f64; t * h], vec![0f64; v * h], vec![0f64; v]);
    for (i, &target) in a.targets.iter().enumerate().filter(|&(_, &t)| t != IGNORE) {
        let x = widen(&a.hidden[i * h..(i + 1) * h]);
        let z: Vec<f64> = (0..v)
            .map(|k| {
                let dot: f64 = x.iter().enumerate().map(|(j, x)| x * f64::from(a.weight.at(k * h + j))).sum();
                dot + a.bias.map_or(0.0, |b| f64::from(b[k]))
            })
            .collect();
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        let lp = z[target as usize] - lse;
        (sum, count, logp[i]) = (sum - lp, count + 1, lp as f32);
        for k in 0..v {
            let g = ((z[k] - lse).exp() - if k == target as usize { 1.0 } else { 0.0 }) * scale;
            db[k] += g;
            for j in 0..h {
                dx[i * h + j] += g * f64::from(a.weight.at(k * h + j));
                dw[k * h + j] += g * x[j];
            }
        }
    }
    HeadLoss { sum, count, logp, d_hidden: narrow(&dx), d_weight: narrow(&dw), d_bias: narrow(&db) }
}

/// One AdamW update of state held in f64, as `torch.optim.AdamW` does it.
pub fn adamw(o: &AdamW, param: &mut [f64], grad: &[f32], m: &mut [f64], v: &mut [f64]) {
    let (b1, b2) = (f64::from(o.beta1), f64::from(o.beta2));
    let (c1, c2) = (1.0 - b1.powf(o.step as f64), 1.0 - b2.powf(o.step as f64));
    let (lr, eps) = (f64::from(o.lr), f64::from(o.eps));
    for i in 0..param.len() {
        let g = f64::from(grad[i]) * f64::from(o.grad_scale);
        m[i] = b1 * m[i] + (1.0 - b1) * g;
        v[i] = b2 * v[i] + (1.0 - b2) * g * g;
        let denom = v[i].sqrt() / c2.sqrt() + eps;
        param[i] = param[i] * (1.0 - lr * f64::from(o.weight_decay)) - lr / c1 * m[i] / denom;
    }
}
