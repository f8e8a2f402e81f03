//! `verify parity`: a folder of golden numbers against what this program computes.
//!
//! The layout is that of `testkit/fixtures/golden/make_golden.py`: a model, a batch, and what `transformers` and PyTorch computed
//! for it: logits, loss, every gradient, eight clipped AdamW steps, a greedy continuation.

use std::path::Path;
use std::sync::Arc;

use phalanx_data::Batch as TokenBatch;
use phalanx_formats::{Dtype, TensorView, WeightFolder};
use phalanx_models::{Model, ModelConfig, ModelError, load_weights, logits};
use phalanx_nn::{Arithmetic, Cx, Env};
use phalanx_tensor::{DType, Runtime};
use serde::Serialize;

use crate::optimizer::{AdamW, AdamWOptions, clip_factor};
use crate::step::{forward_backward, layout};
use crate::{Result, TrainError};

/// What one golden folder gave.
#[derive(Clone, Debug, Serialize)]
pub struct Parity {
    /// Folder name.
    pub case: String,
    /// max |Δlogit| over real positions.
    pub logits_abs: f64,
    /// |Δloss|.
    pub loss_abs: f64,
    /// Largest ‖Δgrad‖ / ‖grad‖ over parameters.
    pub grad_rel_max: f64,
    /// The parameter it belongs to.
    pub grad_worst: String,
    /// Largest |Δloss| over the training steps.
    pub train_loss_abs_max: f64,
    /// Largest relative difference of the gradient norms.
    pub grad_norm_rel_max: f64,
    /// Whether the greedy continuation is the same.
    pub greedy_equal: bool,
    /// Whether all is within tolerance.
    pub pass: bool,
}

#[derive(serde::Deserialize)]
struct Case {
    lr: f32,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
    clip_norm: f64,
    greedy_prompt: Vec<u32>,
    greedy_continuation: Vec<u32>,
}

/// How a golden folder is called in reports.
pub fn case_name(dir: &Path) -> String {
    dir.file_name().map_or_else(|| dir.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// Runs a golden folder.
///
/// # Errors
/// If the folder is not complete, or its family is not supported ([`ModelError::UnknownFamily`]).
pub fn verify(rt: &Runtime, dir: impl AsRef<Path>) -> Result<Parity> {
    let dir = dir.as_ref();
    let case_name = case_name(dir);
    let bad = |why: String| TrainError::Golden { case: dir.display().to_string(), why };
    let case: Case = {
        let path = dir.join("case.json");
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        serde_json::from_str(&text).map_err(|e| bad(format!("case.json: {e}")))?
    };
    let config = ModelConfig::from_folder(dir)?;
    let model = Model::new(&config)?;
    load_weights(rt, &model, dir, &|_| DType::F32)?;

    let batch = WeightFolder::open_file(dir.join("batch.safetensors"))?;
    let ids = batch.get("input_ids")?;
    let shape = ids.shape.to_vec();
    let [b, s] = shape[..] else { return Err(bad("input_ids must be [batch, sequence]".into())) };
    let (ids, labels, mask) = (ints(&ids)?, ints(&batch.get("labels")?)?, ints(&batch.get("attention_mask")?)?);
    if labels.len() != b * s || mask.len() != b * s {
        return Err(bad("labels and attention_mask must have the shape of input_ids".into()));
    }
    let expected = WeightFolder::open_file(dir.join("expected.safetensors"))?;

    // Padding is dropped: rows are packed one after another.
    let rows: Vec<usize> = (0..b).map(|i| mask[i * s..(i + 1) * s].iter().filter(|&&m| m != 0).count()).collect();
    let packed = pack(&ids, &labels, &rows, s);
    let mut env = Env::new(rt.clone(), layout(&packed));
    env.routing.balance = config.experts.as_ref().and_then(|e| e.balance);

    let want = expected.get("logits")?.to_f32()?;
    if want.len() != b * s * config.vocab_size {
        return Err(bad(format!("logits must be [{b}, {s}, {}], found {} values", config.vocab_size, want.len())));
    }
    let ids: Arc<[u32]> = packed.ids.as_slice().into();
    let hidden = model.hidden(&mut Cx::eval(&env), &ids)?;
    let got = logits(rt, &model, &hidden, Arithmetic::F32)?;
    let (got, v) = (got.f32()?, config.vocab_size);
    let (mut logits_abs, mut at) = (0f64, 0);
    for (i, &n) in rows.iter().enumerate() {
        for t in 0..n * v {
            logits_abs = worse(logits_abs, f64::from((got[at + t] - want[i * s * v + t]).abs()));
        }
        at += n * v;
    }

    let options = AdamWOptions {
        beta1: case.betas[0],
        beta2: case.betas[1],
        eps: case.eps,
        weight_decay: case.weight_decay,
        decay_norms_and_biases: true,
    };
    let params = model.parameters();
    let mut optimizer = AdamW::new(rt, &params, &|_| DType::F32, options)?;
    let losses = expected.get("train_losses")?.to_f32()?;
    let norms = expected.get("train_grad_norms")?.to_f32()?;
    let want_loss = f64::from(expected.get("loss")?.to_f32()?.first().copied().unwrap_or(f32::NAN));
    let (mut loss_abs, mut worst) = (f64::NAN, (0f64, String::new()));
    let (mut train_loss_abs_max, mut grad_norm_rel_max) = (0f64, 0f64);
    let greedy = greedy(rt, &model, &case.greedy_prompt, case.greedy_continuation.len())?;
    for (i, (&loss, &norm)) in losses.iter().zip(&norms).enumerate() {
        let sum = forward_backward(&model, &env, &packed)?;
        let n = sum.count.max(1) as f64;
        if i == 0 {
            loss_abs = (sum.mean() - want_loss).abs();
            for p in params.iter().filter(|p| p.trainable()) {
                let want = expected.get(&format!("grad.{}", p.name()))?.to_f32()?;
                let got = match p.grad().get() {
                    Some(g) => g.f32()?.iter().map(|&g| f64::from(g) / n).collect(),
                    None => vec![0f64; want.len()],
                };
                let rel = rel_norm(&got, &want);
                if rel > worst.0 || rel.is_nan() {
                    worst = (rel, p.name().to_owned());
                }
            }
        }
        let got_norm = optimizer.grad_norm(rt)? / n;
        train_loss_abs_max = worse(train_loss_abs_max, (sum.mean() - f64::from(loss)).abs());
        grad_norm_rel_max = worse(grad_norm_rel_max, (got_norm - f64::from(norm)).abs() / f64::from(norm));
        optimizer.step(rt, case.lr, (clip_factor(got_norm, case.clip_norm) / n) as f32)?;
    }
    let greedy_equal = greedy == case.greedy_continuation;
    let pass = logits_abs <= 2e-4
        && loss_abs <= 1e-5
        && worst.0 <= 1e-4
        && train_loss_abs_max <= 5e-4
        && grad_norm_rel_max <= 1e-3
        && greedy_equal;
    Ok(Parity {
        case: case_name,
        logits_abs,
        loss_abs,
        grad_rel_max: worst.0,
        grad_worst: worst.1,
        train_loss_abs_max,
        grad_norm_rel_max,
        greedy_equal,
        pass,
    })
}

/// Whether an error says that the family of a golden folder is not supported (exit code 3 of the command).
pub fn is_unsupported(e: &TrainError) -> bool {
    matches!(e, TrainError::Model(ModelError::UnknownFamily { .. }))
}

fn ints(t: &TensorView<'_>) -> Result<Vec<i64>> {
    if t.dtype != Dtype::I64 {
        return Err(TrainError::Golden { case: t.name.to_string(), why: format!("must be int64, found {}", t.dtype) });
    }
    Ok(t.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
}

/// Real positions only, targets shifted inside each row.
fn pack(ids: &[i64], labels: &[i64], rows: &[usize], s: usize) -> TokenBatch {
    let mut out = TokenBatch::default();
    for (i, &n) in rows.iter().enumerate() {
        let start = out.ids.len();
        for t in 0..n {
            let target = if t + 1 < n { labels[i * s + t + 1] as i32 } else { phalanx_data::IGNORED };
            out.ids.push(ids[i * s + t] as u32);
            out.targets.push(target);
            out.positions.push(t as u32);
            out.num_targets += usize::from(target != phalanx_data::IGNORED);
        }
        out.docs.push(start..out.ids.len());
        out.sample_ids.push(i as u64);
    }
    out
}

fn greedy(rt: &Runtime, model: &Model, prompt: &[u32], n: usize) -> Result<Vec<u32>> {
    let mut ids = prompt.to_vec();
    for _ in 0..n {
        let env = Env::new(rt.clone(), phalanx_nn::Batch::causal(&[ids.len()]));
        let hidden = model.hidden(&mut Cx::eval(&env), &ids.as_slice().into())?;
        let last = logits(rt, model, &hidden.rows(ids.len() - 1..ids.len())?, Arithmetic::F32)?;
        let row = last.f32()?;
        let best = (0..row.len()).fold(0, |b, i| if row[i] > row[b] { i } else { b });
        ids.push(best as u32);
    }
    Ok(ids.split_off(prompt.len()))
}

/// The larger of two differences, NaN being the largest: a value that is no number must not pass for equal.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a >= b { a } else { b }
}

fn rel_norm(x: &[f64], r: &[f32]) -> f64 {
    let num: f64 = x.iter().zip(r).map(|(&x, &r)| (x - f64::from(r)).powi(2)).sum();
    let den: f64 = r.iter().map(|&r| f64::from(r).powi(2)).sum();
    if den == 0.0 { num.sqrt() } else { (num / den).sqrt() }
}
