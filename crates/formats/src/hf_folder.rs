//! What every importer does at the end: put the files of a Hugging Face folder in place, all or none.

use std::path::Path;

use serde_json::Value;

use crate::atomic;
use crate::error::{FormatError, Result};

/// What a folder that may be overwritten can hold: the files of a model and nothing else.
const MODEL_FILES: [&str; 6] = ["json", "safetensors", "jinja", "txt", "md", "model"];

/// Runs `fill` on a temporary folder that then becomes `out`.
///
/// With `overwrite`, an existing folder is replaced as a whole if it holds nothing but a model's files: a mistyped path
/// must not cost a home folder.
///
/// # Errors
/// `out` is taken; what `fill` says; the disk's errors. `out` is then as it was.
pub(crate) fn write<T>(out: &Path, overwrite: bool, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
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
