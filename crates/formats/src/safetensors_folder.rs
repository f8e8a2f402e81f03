//! The weights of a Hugging Face model folder: one safetensors file, or an index and its shards.
//!
//! Files stay mapped for the life of a [`WeightFolder`]; nothing is copied until a caller asks for values. All that can
//! be checked without reading the values is checked on opening.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::Dtype;
use serde_json::Value;

use crate::convert::{self, FloatType};
use crate::error::{FormatError, Result};
use crate::names::{compare, nearest};
use crate::safetensors_file::SafetensorsFile;

/// File stem of a model's weights: `model.safetensors`, `model.safetensors.index.json`.
pub const MODEL_STEM: &str = "model";
/// File stem of a PEFT adapter's weights: `adapter_model.safetensors`.
pub const ADAPTER_STEM: &str = "adapter_model";

const FLOATS_ONLY: &str = "only F32, BF16 and F16 can be read as numbers here; save the model in one of these, e.g. in \
                           Python: model.to(torch.bfloat16).save_pretrained(...)";

/// Named tensors in one or several mapped safetensors files.
#[derive(Debug)]
pub struct WeightFolder {
    place: PathBuf,
    files: Vec<SafetensorsFile>,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    offsets: (usize, usize),
}

/// One tensor's bytes as they lie in the file.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first; empty for a scalar.
    pub shape: &'a [usize],
    /// Little-endian elements in row-major order, at any alignment.
    pub bytes: &'a [u8],
    /// The file that holds it.
    pub file: &'a Path,
}

impl WeightFolder {
    /// Opens `model.safetensors`, or else the shards of `model.safetensors.index.json`, in `dir`.
    ///
    /// # Errors
    /// No such files (the message says what is there instead), a file that is malformed or truncated, an index that does
    /// not fit its shards.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_stem(dir, MODEL_STEM)
    }

    /// Like [`open`](Self::open) for `{stem}.safetensors` or `{stem}.safetensors.index.json`, e.g. [`ADAPTER_STEM`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_stem(dir: impl AsRef<Path>, stem: &str) -> Result<Self> {
        let dir = dir.as_ref();
        let single = dir.join(format!("{stem}.safetensors"));
        if single.is_file() {
            return Self::open_file(single);
        }
        let index = dir.join(format!("{stem}.safetensors.index.json"));
        if index.is_file() {
            return Self::open_index(dir, &index);
        }
        Err(no_weights(dir, stem))
    }

    /// Opens a single safetensors file of any name.
    ///
    /// # Errors
    /// A file that is missing, malformed or truncated.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut folder = Self { place: path.to_path_buf(), files: vec![], tensors: BTreeMap::new() };
        folder.add(SafetensorsFile::open(path)?)?;
        Ok(folder)
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Self> {
        let weight_map = read_index(index)?;
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            shards.entry(shard).or_default().push(tensor);
        }
        let mut folder = Self { place: dir.to_path_buf(), files: vec![], tensors: BTreeMap::new() };
        for (shard, tensors) in &shards {
            let path = dir.join(shard);
            if !path.is_file() {
                return Err(FormatError::MissingShard {
                    index: index.to_path_buf(),
                    shard: shard.to_string(),
                    tensors: tensors.len(),
                    example: tensors[0].to_string(),
                });
            }
            folder.add(SafetensorsFile::open(&path)?)?;
        }
        for (tensor, shard) in &weight_map {
            let found = folder.tensors.get(tensor).map(|e| folder.files[e.file].file_name());
            if found.as_deref() != Some(shard) {
                return Err(FormatError::ShardLacksTensor {
                    index: index.to_path_buf(),
                    tensor: tensor.clone(),
                    shard: shard.clone(),
                    elsewhere: found,
                });
            }
        }
        Ok(folder)
    }

    fn add(&mut self, file: SafetensorsFile) -> Result<()> {
        let index = self.files.len();
        for name in file.names() {
            let Some(info) = file.info(&name) else { continue };
            let entry = Entry { file: index, dtype: info.dtype, shape: info.shape.clone(), offsets: info.data_offsets };
            if let Some(other) = self.tensors.get(&name) {
                return Err(FormatError::TensorInTwoFiles {
                    tensor: name,
                    first: self.files[other.file].path.clone(),
                    second: file.path.clone(),
                });
            }
            self.tensors.insert(name, entry);
        }
        self.files.push(file);
        Ok(())
    }

    /// The folder or file that was opened.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// The mapped files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|f| f.path.as_path())
    }

    /// The `__metadata__` entry `key` of the first file that has it.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.files.iter().find_map(|f| f.metadata()?.get(key)).map(String::as_str)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Whether a tensor of that name is there.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Bytes of all tensors together (headers not counted).
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|e| (e.offsets.1 - e.offsets.0) as u64).sum()
    }

    /// Elements of all tensors together.
    pub fn total_elements(&self) -> u64 {
        self.tensors.values().map(|e| e.shape.iter().product::<usize>() as u64).sum()
    }

    /// The tensor `name`, not copied.
    ///
    /// # Errors
    /// No such tensor (the nearest names are given).
    pub fn get(&self, name: &str) -> Result<TensorView<'_>> {
        let Some((name, entry)) = self.tensors.get_key_value(name) else {
            return Err(FormatError::NoSuchTensor {
                place: self.place.clone(),
                tensor: name.to_string(),
                nearest: nearest(name, self.names(), 3),
            });
        };
        let file = &self.files[entry.file];
        let bytes = file.bytes(entry.offsets);
        Ok(TensorView { name, dtype: entry.dtype, shape: &entry.shape, bytes, file: &file.path })
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| {
            let file = &self.files[entry.file];
            let bytes = file.bytes(entry.offsets);
            TensorView { name, dtype: entry.dtype, shape: &entry.shape, bytes, file: &file.path }
        })
    }

    /// Reads the whole tensor `name`, widened to f32.
    ///
    /// # Errors
    /// No such tensor, not a float tensor, or `out` is not its number of elements.
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let view = self.get(name)?;
        view.check_len(out.len())?;
        view.read_f32_at(0, out)
    }

    /// Reads the whole tensor `name` as bf16, rounding to nearest even where it is stored wider.
    ///
    /// # Errors
    /// No such tensor, not a float tensor, or `out` is not its number of elements.
    pub fn read_bf16(&self, name: &str, out: &mut [bf16]) -> Result<()> {
        let view = self.get(name)?;
        view.check_len(out.len())?;
        view.read_bf16_at(0, out)
    }

    /// Index of the first NaN or infinity in tensor `name`; `None` if all of it is finite.
    ///
    /// # Errors
    /// No such tensor, or not a float tensor.
    pub fn first_non_finite(&self, name: &str) -> Result<Option<usize>> {
        self.get(name)?.first_non_finite()
    }

    /// Checks names and shapes against those that a model needs.
    ///
    /// `ignorable` are patterns (`*` = any run of characters) of tensors that may be there without being expected, e.g.
    /// `*.rotary_emb.inv_freq`.
    ///
    /// # Errors
    /// [`FormatError::NamesDiffer`] with everything that is missing, unexpected or of another shape.
    pub fn check_names(&self, expected: &[(String, Vec<usize>)], ignorable: &[&str]) -> Result<()> {
        let found = self.tensors.iter().map(|(n, e)| (n.as_str(), e.shape.as_slice())).collect();
        Ok(compare(self.place.clone(), &found, expected, ignorable)?)
    }
}

impl TensorView<'_> {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The float type, or an error that says which types can be read as numbers.
    ///
    /// # Errors
    /// The tensor is not F32, BF16 or F16.
    pub fn float_type(&self) -> Result<FloatType> {
        FloatType::from_dtype(self.dtype).ok_or_else(|| FormatError::UnsupportedDtype {
            file: self.file.to_path_buf(),
            tensor: self.name.to_string(),
            dtype: self.dtype.to_string(),
            mend: FLOATS_ONLY,
        })
    }

    /// Reads `out.len()` elements from element `start` (row-major) on, widened to f32: a shard of a large tensor need
    /// not read the rest of it.
    ///
    /// # Errors
    /// Not a float tensor, or the range goes beyond its end.
    pub fn read_f32_at(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let ty = self.float_type()?;
        convert::to_f32(ty, self.range(ty, start, out.len())?, out);
        Ok(())
    }

    /// As [`read_f32_at`](Self::read_f32_at), to bf16.
    ///
    /// # Errors
    /// Not a float tensor, or the range goes beyond its end.
    pub fn read_bf16_at(&self, start: usize, out: &mut [bf16]) -> Result<()> {
        let ty = self.float_type()?;
        convert::to_bf16(ty, self.range(ty, start, out.len())?, out);
        Ok(())
    }

    /// All values as f32.
    ///
    /// # Errors
    /// Not a float tensor.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.num_elements()];
        self.read_f32_at(0, &mut out)?;
        Ok(out)
    }

    /// Index of the first NaN or infinity.
    ///
    /// # Errors
    /// Not a float tensor.
    pub fn first_non_finite(&self) -> Result<Option<usize>> {
        Ok(convert::first_non_finite(self.float_type()?, self.bytes))
    }

    fn check_len(&self, got: usize) -> Result<()> {
        if got == self.num_elements() {
            return Ok(());
        }
        Err(self.wrong_length(got))
    }

    fn range(&self, ty: FloatType, start: usize, len: usize) -> Result<&[u8]> {
        let end = start.checked_add(len).filter(|&e| e <= self.num_elements());
        let end = end.ok_or_else(|| self.wrong_length(start.saturating_add(len)))?;
        Ok(&self.bytes[start * ty.size()..end * ty.size()])
    }

    fn wrong_length(&self, got: usize) -> FormatError {
        FormatError::WrongLength {
            file: self.file.to_path_buf(),
            tensor: self.name.to_string(),
            unit: "elements",
            expected: self.num_elements(),
            got,
        }
    }
}

/// The `weight_map` of an index file: tensor name -> file name.
fn read_index(index: &Path) -> Result<BTreeMap<String, String>> {
    let bad = |what: String| FormatError::malformed(index, what, "copy or download the index again");
    let text = std::fs::read(index).map_err(|e| FormatError::io(index, "read the index", e))?;
    let json: Value = serde_json::from_slice(&text).map_err(|e| bad(format!("not valid JSON ({e})")))?;
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(bad("has no `weight_map` object".into()));
    };
    let mut out = BTreeMap::new();
    for (tensor, shard) in map {
        let Some(shard) = shard.as_str() else {
            return Err(bad(format!("`weight_map.{tensor}` is not a file name")));
        };
        // An index comes from outside: it must not reach files outside its folder.
        if shard.is_empty() || Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(bad(format!("`weight_map.{tensor}`: `{shard}` is not a plain file name")));
        }
        out.insert(tensor.clone(), shard.to_string());
    }
    if out.is_empty() {
        return Err(bad("`weight_map` is empty".into()));
    }
    Ok(out)
}

/// The error for a folder without weights, with the mend that fits what lies there instead.
fn no_weights(dir: &Path, stem: &str) -> FormatError {
    let names: Vec<String> = match std::fs::read_dir(dir) {
        Ok(entries) => entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect(),
        Err(e) => return FormatError::io(dir, "list the model folder", e),
    };
    let first = |test: &dyn Fn(&str) -> bool| names.iter().filter(|n| test(n)).min();
    let hint = if let Some(bin) = first(&|n| {
        (n.starts_with("pytorch_model") || n.starts_with("adapter_model"))
            && (n.ends_with(".bin") || n.contains(".bin."))
    }) {
        format!(
            "only `{bin}` is there, a Python pickle, which is not read for safety; convert it in Python: \
             AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)"
        )
    } else if let Some(gguf) = first(&|n| n.to_lowercase().ends_with(".gguf")) {
        format!("`{gguf}` is a GGUF file: import it first (phalanx import gguf {gguf} OUT_DIR)")
    } else if let Some(other) = first(&|n| n.ends_with(".safetensors")) {
        format!("`{other}` is there under another name; rename it or copy the index file that belongs to it")
    } else if names.is_empty() {
        "the folder is empty; check the path, or download the model again".into()
    } else {
        "check that the path is the model folder itself, and that the download is complete".into()
    };
    let looked_for = format!("{stem}.safetensors, {stem}.safetensors.index.json");
    FormatError::NoWeights { dir: dir.to_path_buf(), looked_for, hint }
}
