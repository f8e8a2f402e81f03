//! From a GGUF file to a Hugging Face folder.

use std::collections::BTreeMap;
use std::path::Path;

use super::model::{GgufModel, Source};
use crate::convert::FloatType;
use crate::error::{FormatError, Result};
use crate::import::{ImportOptions, ImportReport, Progress, write_model_folder, write_rows};
use crate::safetensors_writer::{SafetensorsWriter, TensorSink, TensorSpec};

/// Imports `file` into the new folder `out`: `config.json`, `model.safetensors` (or shards), `tokenizer.json`,
/// `tokenizer_config.json`, `generation_config.json`, and `chat_template.jinja` if there is a template.
///
/// # Errors
/// The file cannot be read, or holds something that is not supported; `out` is taken or the disk is full. Nothing is left
/// of a failed import.
pub fn import(
    file: impl AsRef<Path>,
    out: impl AsRef<Path>,
    options: ImportOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ImportReport> {
    let model = GgufModel::open(file)?;
    let config = model.config();
    let specs: Vec<TensorSpec> = config
        .expected_tensors()
        .into_iter()
        .map(|(name, shape)| TensorSpec::new(name, options.dtype.dtype(), shape))
        .collect();
    let tensors = specs.len();
    let writer = SafetensorsWriter::new(specs)?.max_shard_bytes(options.max_shard_bytes);
    let bytes = writer.total_bytes();

    let written = write_model_folder(out.as_ref(), options.overwrite, |dir| {
        model.write_metadata(dir, options.dtype)?;
        let (mut tensors_done, mut bytes_done) = (0, 0);
        writer.write(dir, |spec, sink| {
            write_tensor(&model.tensor(&spec.name)?, options.dtype, sink)?;
            tensors_done += 1;
            bytes_done += spec.num_bytes();
            progress(Progress { tensor: &spec.name, tensors_done, tensors, bytes_done, bytes });
            Ok(())
        })
    })?;

    let mut types = BTreeMap::new();
    for tensor in model.file().tensors() {
        *types.entry(tensor.ty.to_string()).or_insert(0) += 1;
    }
    Ok(ImportReport {
        model_type: config.family.hf_names().0.to_string(),
        tensors,
        parameters: written.total_elements,
        bytes,
        source_types: types.into_iter().collect(),
        notes: model.notes().to_vec(),
    })
}

fn write_tensor(source: &Source<'_>, to: FloatType, sink: &mut TensorSink<'_>) -> Result<()> {
    write_rows(sink, source.rows(), source.row_len(), None, |range, wide| {
        source.read_rows(range, wide);
        check_values(source, to, wide)
    })
}

/// A damaged block shows as NaN or infinity; a value that the target type cannot hold would become one.
fn check_values(source: &Source<'_>, to: FloatType, values: &[f32]) -> Result<()> {
    let largest = values.iter().fold(0f32, |max, v| max.max(if v.is_nan() { f32::INFINITY } else { v.abs() }));
    if largest == f32::INFINITY {
        return Err(FormatError::malformed(
            source.path(),
            format!("tensor `{}` holds NaN or infinity", source.name()),
            "copy or download the file again",
        ));
    }
    if to == FloatType::F16 && largest > half::f16::MAX.to_f32() {
        return Err(FormatError::unsupported(
            source.path(),
            format!("tensor `{}` holds {largest:e}, which F16 cannot", source.name()),
            "import as BF16 or F32",
        ));
    }
    Ok(())
}
