//! Reading a GGUF file: header, metadata, tensor table. Every length in it is checked against the file before use.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::dequant::GgmlType;
use super::value::{Array, Value};
use crate::error::{FormatError, Result};
use crate::safetensors_file::map_file;

const COPY_AGAIN: &str = "copy or download the file again";
/// Arrays of arrays exist in the format, but nothing uses more than one level of them.
const MAX_NESTING: usize = 4;
/// As ggml: `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;

/// An open GGUF file, memory-mapped.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    version: u32,
    metadata: BTreeMap<String, Value>,
    tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

/// An entry of the tensor table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Shape as everywhere here: outermost dimension first (the file stores the reverse).
    pub shape: Vec<usize>,
    /// Element or block type.
    pub ty: GgmlType,
    /// Where in the file its data begin; in range.
    start: usize,
    /// Bytes of data; 0 for types that cannot be read.
    num_bytes: usize,
}

impl GgufTensor {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl GgufFile {
    /// Maps the file and reads all but the tensors' data.
    ///
    /// # Errors
    /// Not a GGUF file of version 2 or 3, truncated, or malformed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let map = map_file(path)?;
        let mut r = Reader { bytes: &map, at: 0, path };
        let (version, num_tensors, num_keys) = r.header()?;
        let mut metadata = BTreeMap::new();
        for _ in 0..num_keys {
            let key = r.string("a metadata key")?;
            let kind = r.u32()?;
            let value = r.value(kind, &key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(FormatError::malformed(path, format!("metadata key `{key}` occurs twice"), COPY_AGAIN));
            }
        }
        let mut tensors = Vec::new();
        let mut offsets = Vec::new();
        let mut by_name = HashMap::new();
        for _ in 0..num_tensors {
            let (tensor, offset) = r.tensor()?;
            if by_name.insert(tensor.name.clone(), tensors.len()).is_some() {
                return Err(FormatError::malformed(path, format!("tensor `{}` occurs twice", tensor.name), COPY_AGAIN));
            }
            tensors.push(tensor);
            offsets.push(offset);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(v) => {
                v.as_u64().filter(|a| a.is_power_of_two() && *a <= 1 << 30).ok_or_else(|| bad_alignment(path))?
            }
        };
        // Without tensors there need be no padding after the table either.
        let data_start = (r.at as u64).next_multiple_of(alignment);
        for (tensor, offset) in tensors.iter_mut().zip(offsets) {
            place(path, tensor, offset, data_start, alignment, map.len() as u64)?;
        }
        Ok(Self { path: path.to_path_buf(), map, version, metadata, tensors, by_name })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// All metadata, by key.
    pub fn metadata(&self) -> &BTreeMap<String, Value> {
        &self.metadata
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// A tensor's data as they lie in the file.
    ///
    /// # Errors
    /// The tensor's type is not one that can be read (see [`GgmlType::block`]).
    pub fn bytes(&self, tensor: &GgufTensor) -> Result<&[u8]> {
        if tensor.ty.block().is_none() {
            return Err(FormatError::unsupported(
                &self.path,
                format!("tensor `{}` is of type {}", tensor.name, tensor.ty),
                format!("types that can be read: {}; look for a file in one of these, e.g. Q8_0", GgmlType::READABLE),
            ));
        }
        Ok(&self.map[tensor.start..tensor.start + tensor.num_bytes])
    }

    /// The whole number at `key`, if the key is there.
    ///
    /// # Errors
    /// It is not a whole number that is ≥ 0.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.opt(key, "is not a whole number (or not one per model)", |v| v.as_u64().and_then(|v| v.try_into().ok()))
    }

    /// The fraction at `key`, if the key is there.
    ///
    /// # Errors
    /// It is not a floating-point number.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.opt(key, "is not a floating-point number", Value::as_f64)
    }

    /// The truth value at `key`, if the key is there.
    ///
    /// # Errors
    /// It is not true or false.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.opt(key, "is not true or false", Value::as_bool)
    }

    /// The text at `key`, if the key is there.
    ///
    /// # Errors
    /// It is not text.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        self.opt(key, "is not text", Value::as_str)
    }

    /// The texts at `key`, if the key is there.
    ///
    /// # Errors
    /// It is not an array of texts.
    pub fn opt_strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.opt(key, "is not a list of texts", Value::as_strings)
    }

    /// `value`, or the error that `key` is missing.
    pub(crate) fn require<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.bad_key(key, "is missing"))
    }

    pub(crate) fn bad_key(&self, key: &str, what: impl Into<String>) -> FormatError {
        FormatError::BadKey {
            path: self.path.clone(),
            key: key.to_string(),
            what: what.into(),
            mend: "take a file that a current llama.cpp has written",
        }
    }

    fn opt<'a, T>(&'a self, key: &str, what: &str, get: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(value) => get(value).map(Some).ok_or_else(|| self.bad_key(key, what)),
        }
    }
}

fn bad_alignment(path: &Path) -> FormatError {
    FormatError::malformed(path, "`general.alignment` is not a power of two", COPY_AGAIN)
}

/// Checks where a tensor's data lie and notes it.
fn place(path: &Path, t: &mut GgufTensor, offset: u64, data_start: u64, alignment: u64, file_len: u64) -> Result<()> {
    let malformed = |what: &str| {
        Err(FormatError::malformed(path, format!("tensor `{}` {:?} {}: {what}", t.name, t.shape, t.ty), COPY_AGAIN))
    };
    let Some(elements) = t.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) else {
        return malformed("the shape is too large to be true");
    };
    if !offset.is_multiple_of(alignment) {
        return malformed("its data are not aligned");
    }
    let bytes = match t.ty.block() {
        None => 0,
        Some(block) => {
            // Blocks run along the innermost dimension and do not cross rows.
            if !t.shape.last().unwrap_or(&1).is_multiple_of(block.elements) {
                return malformed("its rows are not whole blocks");
            }
            match (elements / block.elements).checked_mul(block.bytes) {
                Some(bytes) => bytes,
                None => return malformed("the shape is too large to be true"),
            }
        }
    };
    let end = data_start.checked_add(offset).and_then(|s| s.checked_add(bytes as u64));
    match end {
        Some(end) if end <= file_len => {
            t.start = (end - bytes as u64) as usize;
            t.num_bytes = bytes;
            Ok(())
        }
        Some(end) => Err(FormatError::WrongFileSize { path: path.to_path_buf(), expected: end, actual: file_len }),
        None => malformed("its offset is too large to be true"),
    }
}

/// A position in the file; every read checks the end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
}

impl<'a> Reader<'a> {
    /// Version, number of tensors, number of metadata keys.
    fn header(&mut self) -> Result<(u32, u64, u64)> {
        let magic = self.take(4, "the magic number")?;
        if magic != b"GGUF" {
            let what = if matches!(magic, b"lmgg" | b"fmgg" | b"tjgg" | b"GGML") {
                "is a GGML file from before GGUF"
            } else {
                "does not begin with `GGUF`: not a GGUF file"
            };
            return Err(FormatError::malformed(self.path, what, "look for the model's .gguf file"));
        }
        let version = self.u32()?;
        if version != 2 && version != 3 {
            let what = if version.swap_bytes() <= 3 {
                "GGUF file in big-endian byte order".to_string()
            } else {
                format!("GGUF version {version}")
            };
            return Err(FormatError::unsupported(
                self.path,
                what,
                "little-endian versions 2 and 3 can be read; convert the file with a current llama.cpp",
            ));
        }
        Ok((version, self.u64()?, self.u64()?))
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let Some(part) = self.bytes[self.at..].get(..n) else {
            return Err(FormatError::malformed(
                self.path,
                format!("truncated: {what} at byte {} wants {n} bytes, {} are left", self.at, self.left()),
                COPY_AGAIN,
            ));
        };
        self.at += n;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, "a number")?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self, what: &str) -> Result<String> {
        let len = self.u64()?;
        // On a 64-bit machine the conversion cannot fail; elsewhere such a length is beyond the file anyway.
        let bytes = self.take(usize::try_from(len).unwrap_or(usize::MAX), what)?;
        match std::str::from_utf8(bytes) {
            Ok(s) => Ok(s.to_string()),
            Err(e) => Err(FormatError::malformed(self.path, format!("{what} is not UTF-8 ({e})"), COPY_AGAIN)),
        }
    }

    fn bool(&mut self) -> Result<bool> {
        Ok(self.array::<1>()?[0] != 0)
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::U8(self.array::<1>()?[0]),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => Value::Bool(self.bool()?),
            8 => Value::String(self.string(&format!("the text of `{key}`"))?),
            9 => Value::Array(self.array_value(key, 0)?),
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            _ => return Err(self.unknown_kind(kind, key)),
        })
    }

    fn array_value(&mut self, key: &str, depth: usize) -> Result<Array> {
        let kind = self.u32()?;
        let n = self.u64()?;
        Ok(match kind {
            0 => Array::U8(self.numbers(n, key, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(n, key, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(n, key, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(n, key, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(n, key, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(n, key, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(n, key, f32::from_le_bytes)?),
            7 => Array::Bool(self.numbers(n, key, |b: [u8; 1]| b[0] != 0)?),
            8 => {
                let what = format!("a text of the list `{key}`");
                // Not reserved from `n`, which is not to be trusted: each text takes at least its 8 bytes of length.
                let mut out = Vec::with_capacity(self.at_most(n, 8));
                for _ in 0..n {
                    out.push(self.string(&what)?);
                }
                Array::String(out)
            }
            9 if depth < MAX_NESTING => {
                let mut out = Vec::new();
                for _ in 0..n {
                    out.push(self.array_value(key, depth + 1)?);
                }
                Array::Array(out)
            }
            10 => Array::U64(self.numbers(n, key, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(n, key, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(n, key, f64::from_le_bytes)?),
            _ => return Err(self.unknown_kind(kind, key)),
        })
    }

    /// `n`, or what the rest of the file can hold of elements of at least `size` bytes, if that is less.
    fn at_most(&self, n: u64, size: usize) -> usize {
        usize::try_from(n).unwrap_or(usize::MAX).min(self.left() / size)
    }

    fn numbers<T, const N: usize>(&mut self, n: u64, key: &str, get: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let bytes = usize::try_from(n).ok().and_then(|n| n.checked_mul(N)).unwrap_or(usize::MAX);
        let (chunks, _) = self.take(bytes, &format!("the list `{key}`"))?.as_chunks::<N>();
        Ok(chunks.iter().map(|&b| get(b)).collect())
    }

    fn unknown_kind(&self, kind: u32, key: &str) -> FormatError {
        FormatError::malformed(self.path, format!("metadata key `{key}` has the unknown type {kind}"), COPY_AGAIN)
    }

    /// A tensor's entry, and the offset that its data have from the start of all data.
    fn tensor(&mut self) -> Result<(GgufTensor, u64)> {
        let name = self.string("a tensor's name")?;
        let num_dims = self.u32()?;
        if num_dims > MAX_DIMS {
            let what = format!("tensor `{name}` has {num_dims} dimensions, more than {MAX_DIMS}");
            return Err(FormatError::malformed(self.path, what, COPY_AGAIN));
        }
        let mut shape = Vec::new();
        for _ in 0..num_dims {
            shape.push(usize::try_from(self.u64()?).unwrap_or(usize::MAX));
        }
        shape.reverse();
        let ty = GgmlType::from_id(self.u32()?);
        let offset = self.u64()?;
        Ok((GgufTensor { name, shape, ty, start: 0, num_bytes: 0 }, offset))
    }
}
