//! `export`: a trained model as one Hugging Face folder.
//!
//! Adapters are merged in f32. Before anything is shipped, the merged model must give the adapted model's logits, and after rounding
//! to the stored type it must differ from the base: an export that silently drops the training is refused.

use std::path::Path;

use phalanx_formats::atomic;
use phalanx_models::{StoredDType, logits, save_weights};
use phalanx_nn::{Arithmetic, Batch, Cx, Env, Parameter};
use phalanx_tensor::{Category, DType};
use serde::Serialize;

use crate::job::Job;
use crate::{Result, TrainError, adapter};

/// What was exported.
#[derive(Clone, Debug, Serialize)]
pub struct Exported {
    /// Type of the stored weights.
    pub dtype: &'static str,
    /// Layers that an adapter was merged into.
    pub merged_layers: usize,
    /// max |Δlogit| between adapted and merged model in f32, relative to the largest logit.
    pub logits_rel: f64,
    /// Share of the merged layers' weights that differ from the base after rounding to the stored type.
    pub changed_share: f64,
}

/// Ids that the check runs on: spread over the vocabulary.
fn probe(vocab: usize) -> Vec<u32> {
    (0..16u64).map(|i| ((i * 2_654_435_761) % vocab as u64) as u32).collect()
}

fn probe_logits(job: &Job, adapted: bool) -> Result<Vec<f32>> {
    let ids = probe(job.model.config().vocab_size);
    let mut env = Env::new(job.rt.clone(), Batch::causal(&[ids.len()]));
    if adapted {
        env.adapters = job.adapters.clone();
    }
    let hidden = job.model.hidden(&mut Cx::eval(&env), &ids.as_slice().into())?;
    Ok(job.rt.to_vec(&logits(&job.rt, &job.model, &hidden, Arithmetic::F32)?)?)
}

/// Merges the job's adapters into its model (in place) and writes the folder, atomically.
///
/// # Errors
/// If the folder is not empty, the merged model does not agree with the adapted one, rounding would wipe out the adapter, or the
/// disk refuses.
pub fn export(job: &mut Job, dir: &Path, dtype: StoredDType, max_shard_bytes: u64) -> Result<Exported> {
    if !atomic::is_free(dir)? {
        return Err(TrainError::setting(
            "export_dir",
            format!("{} holds files; name a new or empty folder", dir.display()),
        ));
    }
    let before = probe_logits(job, true)?;
    let adapters = std::mem::take(&mut job.adapters);
    let params = job.model.parameters();
    let (mut changed, mut of) = (0usize, 0usize);
    for (path, lora) in &adapters.by_path {
        let name = format!("{path}.weight");
        let Some(p) = params.iter().find(|p| p.name() == name) else { continue };
        let old = job.rt.to_vec(&p.value()?)?;
        let new = adapter::merged(&job.rt, p, lora)?;
        changed += old.iter().zip(&new).filter(|(o, n)| round(**o, dtype) != round(**n, dtype)).count();
        of += new.len();
        let mut t = job.rt.empty(p.shape(), DType::F32, Category::Weights)?;
        t.f32_mut()?.copy_from_slice(&new);
        p.set(t)?;
    }
    let after = probe_logits(job, false)?;
    let scale = before.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    // NaN must not pass for equal, and `max` would drop it.
    let finite = before.iter().chain(&after).all(|x| x.is_finite());
    let diff = before.iter().zip(&after).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    let logits_rel = if finite { f64::from(diff / scale) } else { f64::NAN };
    if logits_rel.is_nan() || logits_rel > 1e-3 {
        return Err(TrainError::setting(
            "export_dir",
            format!("merged and adapted logits differ by {logits_rel:.1e} of the largest logit; nothing was written"),
        ));
    }
    let trained = adapters
        .by_path
        .values()
        .any(|l| l.b.value().and_then(|b| Ok(job.rt.to_vec(&b)?)).is_ok_and(|b| b.iter().any(|&x| x != 0.0)));
    if trained && changed == 0 {
        return Err(TrainError::setting(
            "export_dtype",
            format!(
                "the adapter is smaller than a rounding step of {}: the exported model would be the untrained one; use float32",
                dtype.name()
            ),
        ));
    }
    let config = job.model.config().to_json(dtype);
    atomic::write_folder(dir, |tmp| -> Result<()> {
        save_weights(&job.rt, &job.model, tmp, dtype, max_shard_bytes, &|_: &Parameter| Ok(None))?;
        atomic::write_bytes(tmp.join("config.json"), format!("{config:#}\n").as_bytes())?;
        job.write_companions(tmp)
    })?;
    Ok(Exported {
        dtype: dtype.name(),
        merged_layers: adapters.by_path.len(),
        logits_rel,
        changed_share: if of == 0 { 0.0 } else { changed as f64 / of as f64 },
    })
}

fn round(x: f32, dtype: StoredDType) -> u32 {
    match dtype {
        StoredDType::F32 => x.to_bits(),
        StoredDType::Bf16 => u32::from(phalanx_kernels::bf16::from_f32(x).to_bits()),
        StoredDType::F16 => u32::from(phalanx_kernels::f16::from_f32(x).to_bits()),
    }
}
