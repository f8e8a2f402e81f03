//! What the importers of foreign formats share: options, progress, and how the folder is put in place.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::atomic;
use crate::convert::FloatType;
use crate::error::{FormatError, Result};
use crate::safetensors_writer::TensorSink;

/// Elements widened at a time: bounds the memory an import takes, whatever the model.
const ELEMENTS_AT_A_TIME: usize = 1 << 18;

/// How to import.
#[derive(Debug, Clone, Copy)]
pub struct ImportOptions {
    /// Element type of the weights written. BF16 halves the folder; it rounds the widened values once more.
    pub dtype: FloatType,
    /// Replace an existing model folder.
    pub overwrite: bool,
    /// Largest weight file, in bytes.
    pub max_shard_bytes: u64,
}

impl Default for ImportOptions {
    /// F32 (nothing is lost), not overwriting, files of at most 5 GB.
    fn default() -> Self {
        Self { dtype: FloatType::F32, overwrite: false, max_shard_bytes: 5_000_000_000 }
    }
}

/// How far an import is; given after each tensor.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The tensor that was written.
    pub tensor: &'a str,
    /// How many are done.
    pub tensors_done: usize,
    /// How many there are.
    pub tensors: usize,
    /// Bytes of weights written.
    pub bytes_done: u64,
    /// Bytes of weights in all.
    pub bytes: u64,
}

/// What an import did.
#[derive(Debug, Clone)]
pub struct ImportReport {
    /// `model_type` of the folder.
    pub model_type: String,
    /// Tensors written.
    pub tensors: usize,
    /// Parameters written.
    pub parameters: u64,
    /// Bytes of weights written.
    pub bytes: u64,
    /// Types of the file's tensors, with how many there are of each.
    pub source_types: Vec<(String, usize)>,
    /// What a person should know.
    pub notes: Vec<String>,
}

/// What a folder that may be overwritten can hold: the files of a model and nothing else.
const MODEL_FILES: [&str; 6] = ["json", "safetensors", "jinja", "txt", "md", "model"];

/// Runs `fill` on a temporary folder that then becomes `out`.
///
/// With `overwrite`, an existing folder is replaced as a whole if it holds nothing but a model's files: a mistyped path
/// must not cost a home folder.
///
/// # Errors
/// `out` is taken; what `fill` says; the disk's errors. `out` is then as it was.
pub(crate) fn write_model_folder<T>(out: &Path, overwrite: bool, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    if !overwrite {
        return atomic::write_folder(out, fill);
    }
    if let Ok(entries) = std::fs::read_dir(out) {
        for entry in entries.flatten() {
            let path = entry.path();
            let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
            let known = match path.is_dir() {
                true => entry.file_name() == "additional_chat_templates",
                false => MODEL_FILES.contains(&extension.as_str()),
            };
            if !known {
                return Err(FormatError::BadOutputPath {
                    path,
                    what: "is not a model's file, and the folder that holds it would be overwritten",
                    mend: "choose another output folder, or remove it yourself",
                });
            }
        }
    }
    atomic::replace_folder(out, fill)
}

/// Writes `value` as indented JSON.
pub(crate) fn write_json(path: &Path, value: &Value) -> Result<()> {
    atomic::write_bytes(path, format!("{value:#}\n").as_bytes())
}

/// Writes a matrix piece by piece, reading rows with `read` (a range of the source's rows, and where they go).
///
/// `head_dim` is given if the source's rows are for rotating neighbouring pairs; see [`interleaved_row`].
pub(crate) fn write_rows(
    sink: &mut TensorSink<'_>,
    rows: usize,
    row_len: usize,
    head_dim: Option<usize>,
    mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<()>,
) -> Result<()> {
    if rows == 0 || row_len == 0 {
        return Ok(());
    }
    let rows_at_a_time = (ELEMENTS_AT_A_TIME / row_len).clamp(1, rows);
    let mut values = vec![0f32; rows_at_a_time * row_len];
    for first in (0..rows).step_by(rows_at_a_time) {
        let n = rows_at_a_time.min(rows - first);
        let values = &mut values[..n * row_len];
        match head_dim {
            None => read(first..first + n, values)?,
            Some(head_dim) => {
                for (i, values) in values.chunks_exact_mut(row_len).enumerate() {
                    let row = interleaved_row(first + i, head_dim);
                    read(row..row + 1, values)?;
                }
            }
        }
        sink.write_f32(values)?;
    }
    Ok(())
}

/// Which row of a projection that rotates neighbouring pairs (Meta's and llama.cpp's order: x0 y0 x1 y1 ...) is row `row`
/// of the same projection for rotating halves (Hugging Face's order: x0 x1 ... y0 y1 ...).
///
/// `head_dim` must be even.
pub(crate) fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    let half = head_dim / 2;
    head * head_dim + 2 * (within % half) + within / half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_two_heads() {
        let rows: Vec<usize> = (0..12).map(|r| interleaved_row(r, 6)).collect();
        assert_eq!(rows, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
