//! Writing safetensors: the header first, from the list of tensors, then the values as a callback delivers them.
//!
//! No tensor need be in memory but the one being written, and of that only the part the callback holds. Large models go
//! into several files with the index that `transformers` writes.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::atomic;
use crate::convert::{self, FloatType};
use crate::error::{FormatError, Result};
use crate::safetensors_folder::MODEL_STEM;

/// Name, element type and shape of a tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Element type in the file.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor to be written.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// Number of elements (checked by [`SafetensorsWriter::new`] not to overflow).
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes in the file.
    pub fn num_bytes(&self) -> u64 {
        self.num_elements() as u64 * self.dtype.bitsize() as u64 / 8
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenWeights {
    /// The safetensors files, in order.
    pub files: Vec<PathBuf>,
    /// The index, if there are several files.
    pub index: Option<PathBuf>,
    /// Bytes of all tensors (headers not counted).
    pub total_bytes: u64,
    /// Elements of all tensors.
    pub total_elements: u64,
}

/// Plans and writes a set of tensors.
///
/// Within a file, tensors stand in order of falling element size and otherwise in the given order, so that each begins
/// at a multiple of its element size: PyTorch's reader reinterprets the mapped bytes and needs that.
#[derive(Debug, Clone)]
pub struct SafetensorsWriter {
    specs: Vec<TensorSpec>,
    stem: String,
    max_shard_bytes: u64,
    metadata: Vec<(String, String)>,
}

impl SafetensorsWriter {
    /// A writer for `specs`, into `model.safetensors`, in shards of at most 5 GB, with the metadata `format: pt` that
    /// `transformers` asks for.
    ///
    /// # Errors
    /// A name twice, an empty or reserved name, a size that overflows or is not whole bytes.
    pub fn new(specs: Vec<TensorSpec>) -> Result<Self> {
        check_specs(&specs)?;
        Ok(Self {
            specs,
            stem: MODEL_STEM.to_string(),
            max_shard_bytes: 5_000_000_000,
            metadata: vec![("format".into(), "pt".into())],
        })
    }

    /// File stem instead of `model`, e.g. [`ADAPTER_STEM`](crate::safetensors_folder::ADAPTER_STEM).
    pub fn stem(mut self, stem: impl Into<String>) -> Self {
        self.stem = stem.into();
        self
    }

    /// Begins a new file where the next tensor would pass this many bytes. (A tensor is never split.)
    pub fn max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = bytes;
        self
    }

    /// Adds or replaces a metadata string.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        let key = key.into();
        self.metadata.retain(|(k, _)| *k != key);
        self.metadata.push((key, value.into()));
        self
    }

    /// Declares that tensor `alias` shares the storage of `of` (a tied head): it is not written, and must not be, since
    /// readers tie it by `tie_word_embeddings`. No effect if `alias` is not in the list.
    ///
    /// # Errors
    /// `of` is not in the list, or has another type or shape than `alias`.
    pub fn tied(mut self, alias: &str, of: &str) -> Result<Self> {
        let Some(at) = self.specs.iter().position(|s| s.name == alias) else { return Ok(self) };
        let bad = |what: String| Err(FormatError::BadTensorList(format!("`{alias}` cannot be tied to `{of}`: {what}")));
        match self.specs.iter().find(|s| s.name == of) {
            None => return bad("there is no such tensor".into()),
            Some(s) if alias == of || s.shape != self.specs[at].shape || s.dtype != self.specs[at].dtype => {
                return bad(format!(
                    "{:?} {} against {:?} {}",
                    self.specs[at].shape, self.specs[at].dtype, s.shape, s.dtype
                ));
            }
            Some(_) => {}
        }
        self.specs.remove(at);
        Ok(self)
    }

    /// Bytes that all tensors take.
    pub fn total_bytes(&self) -> u64 {
        self.specs.iter().map(TensorSpec::num_bytes).sum()
    }

    /// Writes `{stem}.safetensors`, or shards and their index, into `dir`. `fill` is called once a tensor, in file order.
    ///
    /// Each file is written atomically; for the set as a whole to be so, call this within
    /// [`atomic::write_folder`], which also keeps shards of an earlier save from lingering.
    ///
    /// # Errors
    /// What `fill` or the disk says (free space is checked before the first byte), or a tensor that `fill` left short.
    pub fn write(
        &self,
        dir: impl AsRef<Path>,
        mut fill: impl FnMut(&TensorSpec, &mut TensorSink<'_>) -> Result<()>,
    ) -> Result<WrittenWeights> {
        let dir = dir.as_ref();
        let shards = self.shards();
        atomic::ensure_space(dir, self.total_bytes())?;
        let name = |i: usize| match shards.len() {
            1 => format!("{}.safetensors", self.stem),
            n => format!("{}-{:05}-of-{n:05}.safetensors", self.stem, i + 1),
        };
        let mut files = Vec::new();
        for (i, shard) in shards.iter().enumerate() {
            let path = dir.join(name(i));
            self.write_one(&path, shard, &mut fill)?;
            files.push(path);
        }
        let total_elements = self.specs.iter().map(|s| s.num_elements() as u64).sum();
        let mut index = None;
        if shards.len() > 1 {
            let mut pairs: Vec<(&str, String)> = Vec::new();
            for (i, shard) in shards.iter().enumerate() {
                pairs.extend(shard.iter().map(|s| (s.name.as_str(), name(i))));
            }
            pairs.sort();
            let weight_map: Map<String, Value> = pairs.into_iter().map(|(k, v)| (k.to_string(), v.into())).collect();
            let json = json!({
                "metadata": { "total_parameters": total_elements, "total_size": self.total_bytes() },
                "weight_map": weight_map,
            });
            let path = dir.join(format!("{}.safetensors.index.json", self.stem));
            atomic::write_bytes(&path, format!("{json:#}\n").as_bytes())?;
            index = Some(path);
        }
        Ok(WrittenWeights { files, index, total_bytes: self.total_bytes(), total_elements })
    }

    /// Writes all tensors into the one file `path`, whatever their size.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_file(
        &self,
        path: impl AsRef<Path>,
        mut fill: impl FnMut(&TensorSpec, &mut TensorSink<'_>) -> Result<()>,
    ) -> Result<()> {
        atomic::ensure_space(&path, self.total_bytes())?;
        let mut specs: Vec<&TensorSpec> = self.specs.iter().collect();
        sort_by_size(&mut specs);
        self.write_one(path.as_ref(), &specs, &mut fill)
    }

    /// Tensors by file: in the given order, a new file where the limit would be passed (as `transformers` splits).
    fn shards(&self) -> Vec<Vec<&TensorSpec>> {
        let mut shards: Vec<Vec<&TensorSpec>> = vec![vec![]];
        let mut size = 0;
        for spec in &self.specs {
            let last = shards.len() - 1;
            if !shards[last].is_empty() && size + spec.num_bytes() > self.max_shard_bytes {
                shards.push(vec![]);
                size = 0;
            }
            let last = shards.len() - 1;
            shards[last].push(spec);
            size += spec.num_bytes();
        }
        shards.iter_mut().for_each(|s| sort_by_size(s));
        shards
    }

    fn write_one(
        &self,
        path: &Path,
        specs: &[&TensorSpec],
        fill: &mut impl FnMut(&TensorSpec, &mut TensorSink<'_>) -> Result<()>,
    ) -> Result<()> {
        let header = header(specs, &self.metadata);
        atomic::write_file(path, |out| {
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            for spec in specs {
                let mut sink = TensorSink { spec, path, out, left: spec.num_bytes(), scratch: Vec::new() };
                fill(spec, &mut sink)?;
                if sink.left > 0 {
                    return Err(sink.wrong_length(spec.num_bytes() - sink.left).into());
                }
            }
            Ok(())
        })
    }
}

/// Stable: equal sizes keep their order.
fn sort_by_size(specs: &mut [&TensorSpec]) {
    specs.sort_by_key(|s| std::cmp::Reverse(s.dtype.bitsize()));
}

/// The JSON header, padded with spaces so that the data begin at a multiple of 8.
fn header(specs: &[&TensorSpec], metadata: &[(String, String)]) -> Vec<u8> {
    let mut json = Map::new();
    let metadata: Map<String, Value> = metadata.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
    if !metadata.is_empty() {
        json.insert("__metadata__".into(), metadata.into());
    }
    let mut offset = 0;
    for spec in specs {
        let end = offset + spec.num_bytes();
        let entry = json!({ "dtype": spec.dtype.to_string(), "shape": spec.shape, "data_offsets": [offset, end] });
        json.insert(spec.name.clone(), entry);
        offset = end;
    }
    let mut header = Value::Object(json).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

fn check_specs(specs: &[TensorSpec]) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    let mut total = 0usize;
    for spec in specs {
        let bad = |what: &str| Err(FormatError::BadTensorList(format!("tensor `{}` {what}", spec.name)));
        if spec.name.is_empty() || spec.name == "__metadata__" {
            return bad("has a name that the format does not allow");
        }
        if !seen.insert(spec.name.as_str()) {
            return bad("is in the list twice");
        }
        let elements = spec.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let bits = elements.and_then(|n| n.checked_mul(spec.dtype.bitsize()));
        let Some(sum) = bits.and_then(|b| total.checked_add(b / 8)) else { return bad("is too large") };
        if bits.is_some_and(|b| b % 8 != 0) {
            return bad("does not fill whole bytes");
        }
        total = sum;
    }
    Ok(())
}

/// Where the callback puts one tensor's elements, in row-major order, in as many calls as it likes.
pub struct TensorSink<'a> {
    spec: &'a TensorSpec,
    path: &'a Path,
    out: &'a mut dyn Write,
    left: u64,
    scratch: Vec<u8>,
}

impl TensorSink<'_> {
    /// The tensor being written.
    pub fn spec(&self) -> &TensorSpec {
        self.spec
    }

    /// Appends elements that are already in the file's type, as little-endian bytes.
    ///
    /// # Errors
    /// More bytes than the tensor has, or the disk's error.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(left) = self.left.checked_sub(bytes.len() as u64) else {
            return Err(self.wrong_length(self.spec.num_bytes() - self.left + bytes.len() as u64));
        };
        self.out.write_all(bytes).map_err(|e| FormatError::io(self.path, "write the weights", e))?;
        self.left = left;
        Ok(())
    }

    /// Appends elements, converted to the tensor's type (F32, BF16 or F16; rounded to nearest even).
    ///
    /// # Errors
    /// As [`write_bytes`](Self::write_bytes), or the tensor's type is none of the three.
    pub fn write_f32(&mut self, values: &[f32]) -> Result<()> {
        let ty = self.float_type()?;
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = values.chunks(1 << 16).try_for_each(|part| {
            scratch.clear();
            convert::from_f32(ty, part, &mut scratch);
            self.write_bytes(&scratch)
        });
        self.scratch = scratch;
        done
    }

    /// As [`write_f32`](Self::write_f32), from bf16 (exact where the file's type is BF16 or F32).
    ///
    /// # Errors
    /// As [`write_f32`](Self::write_f32).
    pub fn write_bf16(&mut self, values: &[bf16]) -> Result<()> {
        if self.float_type()? != FloatType::Bf16 {
            let mut wide = [0f32; 1024];
            return values.chunks(wide.len()).try_for_each(|part| {
                let wide = &mut wide[..part.len()];
                wide.iter_mut().zip(part).for_each(|(w, v)| *w = v.to_f32());
                self.write_f32(wide)
            });
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        let done = values.chunks(1 << 16).try_for_each(|part| {
            scratch.clear();
            convert::from_bf16(part, &mut scratch);
            self.write_bytes(&scratch)
        });
        self.scratch = scratch;
        done
    }

    fn float_type(&self) -> Result<FloatType> {
        FloatType::from_dtype(self.spec.dtype).ok_or_else(|| FormatError::UnsupportedDtype {
            file: self.path.to_path_buf(),
            tensor: self.spec.name.clone(),
            dtype: self.spec.dtype.to_string(),
            mend: "numbers can be written as F32, BF16 or F16 only; hand over bytes for other types",
        })
    }

    fn wrong_length(&self, got: u64) -> FormatError {
        FormatError::WrongLength {
            file: self.path.to_path_buf(),
            tensor: self.spec.name.clone(),
            unit: "bytes",
            expected: self.spec.num_bytes() as usize,
            got: got as usize,
        }
    }
}

impl Write for TensorSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_bytes(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
