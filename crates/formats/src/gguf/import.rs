//! From a GGUF file to a Hugging Face folder.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::config;
use super::dequant::dequantize;
use super::file::{GgufFile, GgufTensor};
use super::tensor_names::hf_name;
use super::tokenizer::{self, Tokenizer};
use crate::atomic;
use crate::convert::FloatType;
use crate::error::{FormatError, Result};
use crate::hf_config::ModelConfig;
use crate::import::{ImportOptions, ImportReport, Progress, write_json, write_model_folder, write_rows};
use crate::names::compare;
use crate::safetensors_writer::{SafetensorsWriter, TensorSink, TensorSpec};

/// A tensor to write, and where it comes from.
struct Plan<'a> {
    source: &'a GgufTensor,
    /// Width of a head if the rows have to be put into Hugging Face's order.
    reorder: Option<usize>,
}

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
    let file = GgufFile::open(file)?;
    let config = config::read(&file)?;
    let tokenizer = tokenizer::convert(&file)?;
    if tokenizer.num_tokens > config.vocab_size {
        return Err(FormatError::malformed(
            file.path(),
            format!("{} tokens, but the embedding has {} rows only", tokenizer.num_tokens, config.vocab_size),
            "take another file",
        ));
    }
    let plans = plan(&file, &config)?;
    let specs: Vec<TensorSpec> = config
        .expected_tensors()
        .into_iter()
        .map(|(name, shape)| TensorSpec::new(name, options.dtype.dtype(), shape))
        .collect();
    let writer = SafetensorsWriter::new(specs)?.max_shard_bytes(options.max_shard_bytes);
    let bytes = writer.total_bytes();

    let written = write_model_folder(out.as_ref(), options.overwrite, |dir| {
        let (bos, eos, pad) = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id);
        write_json(&dir.join("config.json"), &config.to_json(options.dtype, bos, eos, pad))?;
        write_tokenizer(dir, &tokenizer)?;
        let (mut tensors_done, mut bytes_done) = (0, 0);
        writer.write(dir, |spec, sink| {
            write_tensor(&file, &plans[&spec.name], options.dtype, sink)?;
            tensors_done += 1;
            bytes_done += spec.num_bytes();
            progress(Progress { tensor: &spec.name, tensors_done, tensors: plans.len(), bytes_done, bytes });
            Ok(())
        })
    })?;

    let mut types = BTreeMap::new();
    for tensor in file.tensors() {
        *types.entry(tensor.ty.to_string()).or_insert(0) += 1;
    }
    Ok(ImportReport {
        model_type: config.family.hf_names().0.to_string(),
        tensors: plans.len(),
        parameters: written.total_elements,
        bytes,
        source_types: types.into_iter().collect(),
        notes: tokenizer.notes,
    })
}

/// Finds the source of every tensor that the model has, and checks that nothing is missing or left over.
fn plan<'a>(file: &'a GgufFile, config: &ModelConfig) -> Result<HashMap<String, Plan<'a>>> {
    let mut plans = HashMap::new();
    let mut found: BTreeMap<&str, &[usize]> = BTreeMap::new();
    let names: Vec<String> =
        file.tensors().iter().map(|t| hf_name(&t.name).unwrap_or_else(|| t.name.clone())).collect();
    for (source, name) in file.tensors().iter().zip(&names) {
        // Refuse unreadable types before anything is written.
        file.bytes(source)?;
        let is_qk = [".self_attn.q_proj.", ".self_attn.k_proj."].iter().any(|p| name.contains(p));
        let reorder = (is_qk && config.family.rows_interleaved()).then_some(config.head_dim);
        found.insert(name, &source.shape);
        plans.insert(name.clone(), Plan { source, reorder });
    }
    // Llama 3's frequency divisors have become `rope_scaling`; files from before have a copy a layer of plain ones.
    let consumed = ["rope_freqs.weight", "blk.*.attn_rot_embd.weight"];
    compare(file.path().to_path_buf(), &found, &config.expected_tensors(), &consumed)?;
    plans.retain(|name, _| !consumed.iter().any(|p| crate::names::matches_pattern(p, name)));
    Ok(plans)
}

fn write_tensor(file: &GgufFile, plan: &Plan<'_>, to: FloatType, sink: &mut TensorSink<'_>) -> Result<()> {
    let source = plan.source;
    let bytes = file.bytes(source)?;
    // A vector that is to be reordered is a column of rows of one element.
    let row_len = match (source.shape.as_slice(), plan.reorder) {
        ([_], Some(_)) => 1,
        (shape, _) => shape.last().copied().unwrap_or(1),
    };
    let rows = source.num_elements() / row_len.max(1);
    let row_bytes = bytes.len() / rows.max(1);
    write_rows(sink, rows, row_len, plan.reorder, |range, wide| {
        dequantize(source.ty, &bytes[range.start * row_bytes..range.end * row_bytes], wide);
        check_values(file, source, to, wide)
    })
}

/// A damaged block shows as NaN or infinity; a value that the target type cannot hold would become one.
fn check_values(file: &GgufFile, source: &GgufTensor, to: FloatType, values: &[f32]) -> Result<()> {
    let largest = values.iter().fold(0f32, |max, v| max.max(if v.is_nan() { f32::INFINITY } else { v.abs() }));
    if largest == f32::INFINITY {
        return Err(FormatError::malformed(
            file.path(),
            format!("tensor `{}` holds NaN or infinity", source.name),
            "copy or download the file again",
        ));
    }
    if to == FloatType::F16 && largest > half::f16::MAX.to_f32() {
        return Err(FormatError::unsupported(
            file.path(),
            format!("tensor `{}` holds {largest:e}, which F16 cannot", source.name),
            "import as BF16 or F32",
        ));
    }
    Ok(())
}

fn write_tokenizer(dir: &Path, tokenizer: &Tokenizer) -> Result<()> {
    // Not indented: a vocabulary is long.
    atomic::write_bytes(dir.join("tokenizer.json"), tokenizer.tokenizer.to_string().as_bytes())?;
    write_json(&dir.join("tokenizer_config.json"), &tokenizer.tokenizer_config)?;
    write_json(&dir.join("generation_config.json"), &tokenizer.generation_config)?;
    if let Some(template) = &tokenizer.chat_template {
        atomic::write_bytes(dir.join("chat_template.jinja"), template.as_bytes())?;
    }
    if !tokenizer.named_templates.is_empty() {
        let named = dir.join("additional_chat_templates");
        std::fs::create_dir(&named).map_err(|e| FormatError::io(&named, "create the folder", e))?;
        for (name, template) in &tokenizer.named_templates {
            atomic::write_bytes(named.join(format!("{name}.jinja")), template.as_bytes())?;
        }
    }
    Ok(())
}
