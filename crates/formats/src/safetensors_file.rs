//! One safetensors file, memory-mapped and fully checked when opened.
//!
//! Layout (<https://github.com/huggingface/safetensors>): u64 header length, JSON header, data. The `safetensors` crate
//! parses and validates; this file turns its verdicts into messages that name the file and the mend.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{SafeTensorError, SafeTensors, tensor::Metadata};

use crate::error::{FormatError, Result};

const COPY_AGAIN: &str = "copy or download the file again";

/// A mapped file and its checked header.
#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    pub path: PathBuf,
    map: Mmap,
    data_start: usize,
    header: Metadata,
}

impl SafetensorsFile {
    pub fn open(path: &Path) -> Result<Self> {
        let map = map_file(path)?;
        let (header_len, header) = SafeTensors::read_metadata(&map).map_err(|e| explain(path, &map, e))?;
        Ok(Self { path: path.to_path_buf(), data_start: 8 + header_len, map, header })
    }

    /// The `__metadata__` strings.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.header.metadata().as_ref()
    }

    /// Names in the order of their data.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    pub fn info(&self, name: &str) -> Option<&safetensors::tensor::TensorInfo> {
        self.header.info(name)
    }

    /// The bytes between a header entry's two offsets.
    pub fn bytes(&self, offsets: (usize, usize)) -> &[u8] {
        // In range: opening compared every offset with the file's length.
        &self.map[self.data_start + offsets.0..self.data_start + offsets.1]
    }

    pub fn file_name(&self) -> String {
        self.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// Maps a file that must not be empty.
pub(crate) fn map_file(path: &Path) -> Result<Mmap> {
    let io = |action| move |e| FormatError::io(path, action, e);
    let file = File::open(path).map_err(io("open the file"))?;
    let meta = file.metadata().map_err(io("read the file's size"))?;
    if meta.is_dir() {
        return Err(FormatError::malformed(path, "is a folder, not a file", "name the file itself"));
    }
    if meta.len() == 0 {
        return Err(FormatError::malformed(path, "the file is empty", COPY_AGAIN));
    }
    // SAFETY: the mapping is private and read-only. Another process that truncates the file while it is mapped can
    // still end this one with SIGBUS, as with any memory-mapped file; our own writers never modify a file in place
    // (see `atomic`), so a mapped file keeps its bytes even while a new one takes over its name.
    unsafe { Mmap::map(&file) }.map_err(io("map the file into memory"))
}

/// The message for what the parser refused.
fn explain(path: &Path, bytes: &[u8], e: SafeTensorError) -> FormatError {
    use SafeTensorError as E;
    let header_len = bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)).unwrap_or(0);
    let malformed = |what: String| FormatError::malformed(path, what, COPY_AGAIN);
    match e {
        E::HeaderTooSmall => {
            malformed(format!("{} bytes are too few for a safetensors file (8 for the header's length)", bytes.len()))
        }
        E::HeaderTooLarge | E::InvalidHeaderLength => malformed(format!(
            "the header's length ({header_len} bytes) goes beyond the file ({} bytes) or the 100 MB limit: not a \
             safetensors file, or truncated",
            bytes.len()
        )),
        E::InvalidHeader(e) => malformed(format!("the header is not UTF-8 ({e})")),
        E::InvalidHeaderDeserialization(e) | E::JsonError(e) => {
            malformed(format!("the header is not the JSON of a safetensors file ({e})"))
        }
        E::InvalidOffset(name) => malformed(format!(
            "the data of tensor `{name}` do not begin where those before it end (tensors overlap, or there is a hole)"
        )),
        E::TensorInvalidInfo => malformed("a tensor's shape and type do not fit its number of bytes".into()),
        E::ValidationOverflow => malformed("a tensor's shape is too large to be true".into()),
        E::MetadataIncompleteBuffer => match implied_size(bytes, header_len) {
            Some(expected) => {
                FormatError::WrongFileSize { path: path.to_path_buf(), expected, actual: bytes.len() as u64 }
            }
            None => malformed("the header's offsets do not cover the file: truncated, or bytes were appended".into()),
        },
        other => malformed(other.to_string()),
    }
}

/// File size that a (valid) header asks for.
fn implied_size(bytes: &[u8], header_len: u64) -> Option<u64> {
    let end = usize::try_from(header_len).ok()?.checked_add(8)?;
    let header: Metadata = serde_json::from_slice(bytes.get(8..end)?).ok()?;
    header_len.checked_add(8)?.checked_add(header.data_len() as u64)
}
