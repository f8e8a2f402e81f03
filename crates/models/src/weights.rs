//! Parameters from and to safetensors.

use std::path::Path;

use phalanx_formats::{Dtype, SafetensorsWriter, TensorSpec, WeightFolder};
use phalanx_nn::{Parameter, init};
use phalanx_tensor::{Category, DType, Runtime};

use crate::{Model, ModelError, Result, StoredDType, stored};

/// Tensors that files may hold and nobody needs: buffers of old checkpoints.
const IGNORABLE: &[&str] = &["*.rotary_emb.inv_freq", "*.attn.bias", "*.masked_bias"];

/// Fills every parameter from the safetensors of `dir`, as the type that `dtype_of` names for it.
///
/// Names and shapes are all checked first; then each tensor is read once from the memory-mapped file and scanned for values that are
/// not finite.
///
/// # Errors
/// If a tensor is missing, unexpected, mis-shaped or not finite, or memory runs out.
pub fn load_weights(
    rt: &Runtime,
    model: &Model,
    dir: impl AsRef<Path>,
    dtype_of: &dyn Fn(&str) -> DType,
) -> Result<()> {
    let folder = check_weights(model, dir)?;
    for p in &model.parameters() {
        read_parameter(rt, &folder, p, dtype_of(p.name()))?;
    }
    Ok(())
}

/// Checks by the headers alone that `dir` holds the model's tensors: files whole, nothing missing, unexpected or mis-shaped.
///
/// # Errors
/// As [`load_weights`], but for values.
pub fn check_weights(model: &Model, dir: impl AsRef<Path>) -> Result<WeightFolder> {
    let folder = WeightFolder::open(dir)?;
    let params = model.parameters();
    let expected = stored::expected(&folder, &params);
    let further = model.config().blocks_passed_over();
    let mut ignorable: Vec<&str> = IGNORABLE.iter().copied().chain(further.iter().map(String::as_str)).collect();
    if model.config().tie_word_embeddings {
        // Some writers store the tied head a second time.
        ignorable.push("lm_head.weight");
    }
    folder.check_names(&expected, &ignorable)?;
    Ok(folder)
}

fn read_parameter(rt: &Runtime, folder: &WeightFolder, p: &Parameter, dtype: DType) -> Result<()> {
    let view = stored::find(folder, p)?;
    let dtype = if p.is_buffer() { DType::F32 } else { dtype };
    if let Some(index) = view.first_non_finite()? {
        let file = folder.place().display().to_string();
        return Err(ModelError::NotFinite { file, tensor: p.name().into(), index });
    }
    // Only what is kept here is read.
    let placement = p.placement();
    let mut t = rt.empty(&placement.kept_shape(), dtype, Category::Weights)?;
    let mut done = 0;
    for (at, n) in placement.kept_runs(p.shape()) {
        match dtype {
            DType::F32 => view.read_f32_at(at, &mut t.f32_mut()?[done..done + n])?,
            DType::Bf16 => view.read_bf16_at(at, &mut t.bf16_mut()?[done..done + n])?,
        }
        done += n;
    }
    p.set(t)?;
    Ok(())
}

/// Draws initial values: normal with the config's standard deviation for matrices, 1 for norms, 0 for biases and buffers; each from the seed and
/// its own name alone.
///
/// # Errors
/// If memory runs out.
pub fn initialise(rt: &Runtime, model: &Model, seed: u64) -> Result<()> {
    for p in model.parameters() {
        if p.shape().len() >= 2 {
            init::normal(rt, &p, seed, model.config().initializer_range)?;
        } else {
            init::constant(rt, &p, if p.is_buffer() || p.name().ends_with(".bias") { 0.0 } else { 1.0 })?;
        }
    }
    Ok(())
}

/// Writes the parameters into `dir` as Hugging Face safetensors of at most `max_shard_bytes` each (with an index when several).
/// `value_of` may supply other f32 values for a parameter (master weights, merged adapters).
///
/// # Errors
/// If the disk refuses.
pub fn save_weights(
    rt: &Runtime,
    model: &Model,
    dir: impl AsRef<Path>,
    dtype: StoredDType,
    max_shard_bytes: u64,
    value_of: &dyn Fn(&Parameter) -> Result<Option<Vec<f32>>>,
) -> Result<()> {
    let stored = match dtype {
        StoredDType::F32 => Dtype::F32,
        StoredDType::Bf16 => Dtype::BF16,
        StoredDType::F16 => Dtype::F16,
    };
    let params = model.parameters();
    let of = |p: &Parameter| if p.is_buffer() { Dtype::F32 } else { stored };
    let specs = params.iter().map(|p| TensorSpec::new(p.name(), of(p), p.shape())).collect();
    let writer = SafetensorsWriter::new(specs)?.max_shard_bytes(max_shard_bytes);
    let by_name: std::collections::HashMap<&str, &Parameter> = params.iter().map(|p| (p.name(), p)).collect();
    let mut failed = None;
    let written = writer.write(dir.as_ref(), |spec, sink| {
        let p = by_name[spec.name.as_str()];
        let values = match value_of(p) {
            Ok(Some(v)) => Ok(v),
            Ok(None) => p.value().map_err(ModelError::from).and_then(|v| Ok(rt.to_vec(&v)?)),
            Err(e) => Err(e),
        };
        match values {
            Ok(v) => sink.write_f32(&v),
            Err(e) => {
                failed = Some(e);
                sink.write_f32(&[])
            }
        }
    });
    match failed {
        Some(e) => Err(e),
        None => Ok(written.map(|_| ())?),
    }
}
