//! Everything that can go wrong while reading or writing a model's files.
//!
//! Each message says what was wrong, in which file (and tensor or key), and how to mend it.

use std::io;
use std::path::{Path, PathBuf};

use crate::names::NamesDiffer;

/// Result with [`FormatError`].
pub type Result<T, E = FormatError> = std::result::Result<T, E>;

/// What went wrong, where, and the mend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system refused.
    #[error("{path}: cannot {action}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb phrase ("open the file").
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The disk cannot hold what is to be written. What stood at `path` before is untouched.
    #[error("{path}: the disk is full: {needed}, {free}; \
             free some space or choose another output folder (nothing that was there before has been changed)",
            path = path.display(),
            needed = match needed { Some(n) => format!("{n} bytes are needed"), None => "writing stopped".into() },
            free = match free { Some(n) => format!("{n} bytes are free"), None => "free space unknown".into() })]
    DiskFull {
        /// The file or folder that was being written.
        path: PathBuf,
        /// Bytes wanted, where known.
        needed: Option<u64>,
        /// Bytes free on that disk, where known.
        free: Option<u64>,
    },
    /// A folder holds no weights that can be read.
    #[error("{dir}: no weights here: looked for {looked_for}; {hint}", dir = dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// The file names that were looked for.
        looked_for: String,
        /// What is there instead, and the mend.
        hint: String,
    },
    /// A file's bytes contradict its format.
    #[error("{path}: {what}; {mend}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The contradiction, with tensor, key or position.
        what: String,
        /// The way out.
        mend: &'static str,
    },
    /// A file is shorter or longer than its own header says.
    #[error("{path}: the file is {}: its header asks for {expected} bytes, it has {actual}; copy or download it again",
            if actual < expected { "truncated" } else { "too long" }, path = path.display())]
    WrongFileSize {
        /// The file.
        path: PathBuf,
        /// Bytes that the header implies.
        expected: u64,
        /// Bytes on disk.
        actual: u64,
    },
    /// The index names a shard that is not in the folder.
    #[error("{index}: names the shard `{shard}` (for {tensors} tensors, e.g. `{example}`), but that file is missing; \
             copy or download it into the same folder", index = index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The missing file's name.
        shard: String,
        /// How many tensors it should hold.
        tensors: usize,
        /// One of them.
        example: String,
    },
    /// A shard does not hold a tensor that the index says it holds.
    #[error("{index}: says that tensor `{tensor}` is in `{shard}`, but it is not{}; \
             the shards and the index come from different saves: copy the folder again",
            match elsewhere { Some(f) => format!(" (it is in `{f}`)"), None => String::new() }, index = index.display())]
    ShardLacksTensor {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard that should hold it.
        shard: String,
        /// The shard that does hold it, if any.
        elsewhere: Option<String>,
    },
    /// Two shards hold the same tensor.
    #[error("tensor `{tensor}` is both in {first} and in {second}; remove the file that is left over from another save",
            first = first.display(), second = second.display())]
    TensorInTwoFiles {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// A tensor was asked for that no file holds.
    #[error("{place}: no tensor `{tensor}`{}", crate::names::did_you_mean(nearest), place = place.display())]
    NoSuchTensor {
        /// Folder or file that was searched.
        place: PathBuf,
        /// The name asked for.
        tensor: String,
        /// The most similar names that are there.
        nearest: Vec<String>,
    },
    /// A tensor's element type cannot be converted as asked.
    #[error("{file}: tensor `{tensor}` is {dtype}; {mend}", file = file.display())]
    UnsupportedDtype {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type as the file names it.
        dtype: String,
        /// What can be done.
        mend: &'static str,
    },
    /// A buffer does not have the size of the tensor (a mistake of the calling code, told rather than a panic).
    #[error("{file}: tensor `{tensor}` has {expected} {unit}, the caller offered {got}", file = file.display())]
    WrongLength {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// "elements" or "bytes".
        unit: &'static str,
        /// What the tensor has.
        expected: usize,
        /// What was offered.
        got: usize,
    },
    /// Names or shapes are not those that the model needs.
    #[error(transparent)]
    NamesDiffer(#[from] Box<NamesDiffer>),
    /// The list of tensors to be written contradicts itself.
    #[error("cannot write weights: {0}")]
    BadTensorList(String),
    /// The place to write to is taken.
    #[error("{path}: the folder exists and is not empty; choose another folder, or ask to overwrite it",
            path = path.display())]
    OutputExists {
        /// The folder.
        path: PathBuf,
    },
    /// A path that cannot be written to as asked.
    #[error("{path}: {what}; {mend}", path = path.display())]
    BadOutputPath {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
        /// The way out.
        mend: &'static str,
    },
    /// The file is sound, but asks for something that is not supported.
    #[error("{path}: {what}; {mend}", path = path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What is not supported.
        what: String,
        /// What is, or what to do.
        mend: String,
    },
    /// A metadata key that is needed is absent or of the wrong kind.
    #[error("{path}: metadata key `{key}` {what}; {mend}", path = path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// "is missing", "is not a number" ...
        what: String,
        /// The way out.
        mend: &'static str,
    },
}

impl FormatError {
    /// Wraps an I/O error; a full disk or exceeded quota becomes [`FormatError::DiskFull`] with the bytes still free.
    ///
    /// `action` is a verb phrase: "open the file", "write".
    pub fn io(path: impl AsRef<Path>, action: &'static str, source: io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            let free = crate::atomic::free_space(&path);
            return Self::DiskFull { path: crate::atomic::final_name(&path), needed: None, free };
        }
        Self::Io { path, action, source }
    }

    pub(crate) fn malformed(path: &Path, what: impl Into<String>, mend: &'static str) -> Self {
        Self::Malformed { path: path.to_path_buf(), what: what.into(), mend }
    }

    pub(crate) fn unsupported(path: &Path, what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_path_buf(), what: what.into(), mend: mend.into() }
    }
}

impl From<FormatError> for io::Error {
    fn from(e: FormatError) -> Self {
        Self::other(e)
    }
}
