//! Tokenised examples in one file that is mapped into memory, or in memory in the same layout.
//!
//! ```text
//! "PHXTOK02" | key (32 bytes) | examples | index: u64 for each example | counts as JSON | footer
//! example: tokens n (u32), record (u32), n ids (u32 each), mask (1 bit each, padded to 4 bytes)
//! footer:  index at, examples, JSON at, JSON bytes (u64 each) | checksum | "PHXTOKND"
//! checksum: BLAKE3 of all before it, where the BLAKE3 of the examples stands for the examples
//! ```
//!
//! So one pass over the file gives both: the checksum, and the hash of the examples alone, which says whether data is
//! the same whatever key or counts it was written with.
//!
//! All numbers are little-endian. The file is written under a temporary name and renamed when it is complete, so a
//! reader sees a whole file or none; length, magic, key and checksum are checked on opening, and whatever fails them
//! is written anew.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::Mmap;

use crate::encode::{EncodeStats, Example};
use crate::error::{DataError, Result};

const MAGIC: &[u8; 8] = b"PHXTOK02";
const END: &[u8; 8] = b"PHXTOKND";
const HEADER: usize = 8 + 32;
const FOOTER: usize = 4 * 8 + 32 + 8;

enum Bytes {
    Mapped(Mmap),
    Memory(Vec<u8>),
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Memory(bytes) => bytes,
        }
    }
}

/// The examples of one data set.
pub struct TokenStore {
    bytes: Bytes,
    index_at: usize,
    len: usize,
    stats: EncodeStats,
    examples_hash: blake3::Hash,
}

impl std::fmt::Debug for TokenStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenStore").field("len", &self.len).field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl TokenStore {
    /// The number of examples.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What was counted while encoding.
    pub fn stats(&self) -> &EncodeStats {
        &self.stats
    }

    /// Hash of the examples, and of nothing else: not of the key, nor of what was counted.
    pub(crate) fn examples_hash(&self) -> &blake3::Hash {
        &self.examples_hash
    }

    /// Tokens of example `i`.
    ///
    /// # Panics
    /// As indexing does, if `i` is not below [`Self::len`].
    pub fn tokens(&self, i: usize) -> usize {
        self.u32_at(self.at(i)) as usize
    }

    /// The record (counted from 0 over the whole data set) that example `i` was made of.
    ///
    /// # Panics
    /// As [`Self::tokens`].
    pub fn record(&self, i: usize) -> u32 {
        self.u32_at(self.at(i) + 4)
    }

    /// Appends the ids of example `i`.
    ///
    /// # Panics
    /// As [`Self::tokens`].
    pub fn extend_ids(&self, i: usize, out: &mut Vec<u32>) {
        let at = self.at(i);
        let n = self.u32_at(at) as usize;
        let raw = self.bytes[at + 8..at + 8 + 4 * n].as_chunks::<4>().0;
        out.extend(raw.iter().map(|b| u32::from_le_bytes(*b)));
    }

    /// Whether token `t` of example `i` is trained, as a function of `t`.
    pub(crate) fn mask(&self, i: usize) -> impl Fn(usize) -> bool + '_ {
        let at = self.at(i);
        let n = self.u32_at(at) as usize;
        let mask = &self.bytes[at + 8 + 4 * n..][..n.div_ceil(8)];
        move |t| mask[t / 8] >> (t % 8) & 1 == 1
    }

    /// Example `i` as a value of its own.
    ///
    /// # Panics
    /// As [`Self::tokens`].
    pub fn example(&self, i: usize) -> Example {
        let mut ids = Vec::new();
        self.extend_ids(i, &mut ids);
        let mask = self.mask(i);
        let trained = (0..ids.len()).map(mask).collect();
        Example { ids, trained }
    }

    fn at(&self, i: usize) -> usize {
        assert!(i < self.len, "example {i} of {}", self.len);
        self.u64_at(self.index_at + 8 * i) as usize
    }

    fn u32_at(&self, at: usize) -> u32 {
        self.bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes)
    }

    fn u64_at(&self, at: usize) -> u64 {
        self.bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
    }

    /// Opens a file, or says why it cannot be used. A missing file is `Ok(None)`.
    pub(crate) fn open(path: &Path, key: &blake3::Hash) -> std::result::Result<Option<Self>, String> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e.to_string()),
        };
        if file.metadata().map_err(|e| e.to_string())?.len() < (HEADER + FOOTER) as u64 {
            return Err("is too short".into());
        }
        // SAFETY: the mapping is read-only and private to this store. Files of this name are only ever created by
        // renaming a finished file onto it, never written or cut in place, so the bytes do not change under us.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| e.to_string())?;
        Self::parse(Bytes::Mapped(map), key).map(Some)
    }

    fn parse(bytes: Bytes, key: &blake3::Hash) -> std::result::Result<Self, String> {
        let len = bytes.len();
        if len < HEADER + FOOTER || !bytes.starts_with(MAGIC) || !bytes.ends_with(END) {
            return Err("is no complete token cache".into());
        }
        if &bytes[8..HEADER] != key.as_bytes() {
            return Err("belongs to other data or options".into());
        }
        let number = |i: usize| {
            let at = len - FOOTER + 8 * i;
            bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes) as usize
        };
        let (index_at, examples, json_at, json_len) = (number(0), number(1), number(2), number(3));
        let index_end = examples.checked_mul(8).and_then(|n| n.checked_add(index_at));
        let json_end = json_at.checked_add(json_len);
        if index_at < HEADER || index_end != Some(json_at) || json_end != Some(len - FOOTER) {
            return Err("has a broken footer".into());
        }
        let hashed = len - 40;
        let examples_hash = blake3::hash(&bytes[HEADER..index_at]);
        let mut whole = blake3::Hasher::new();
        whole.update(&bytes[..HEADER]).update(examples_hash.as_bytes()).update(&bytes[index_at..hashed]);
        if whole.finalize().as_bytes()[..] != bytes[hashed..hashed + 32] {
            return Err("fails its checksum".into());
        }
        let stats = serde_json::from_slice(&bytes[json_at..len - FOOTER]).map_err(|e| e.to_string())?;
        Ok(Self { bytes, index_at, len: examples, stats, examples_hash })
    }
}

/// Writes examples in order, to memory or towards a file.
pub(crate) struct StoreWriter {
    sink: Sink,
    /// Of what has been written, the examples left out.
    whole: blake3::Hasher,
    /// Of the examples.
    examples: blake3::Hasher,
    index: Vec<u64>,
    at: u64,
    buffer: Vec<u8>,
    key: blake3::Hash,
}

enum Sink {
    Memory(Vec<u8>),
    File { writer: BufWriter<File>, temporary: Temporary, path: PathBuf },
}

/// Removes an unfinished file.
struct Temporary(Option<PathBuf>);

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            // Nothing more can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl StoreWriter {
    /// With a path, the finished store is a file; its folder is made.
    pub(crate) fn new(path: Option<&Path>, key: blake3::Hash) -> Result<Self> {
        let sink = match path {
            None => Sink::Memory(Vec::new()),
            Some(path) => {
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(|e| DataError::io("create the cache folder", folder, e))?;
                }
                // Unique in this process and among processes, so that two runs cannot write one file.
                static COUNT: AtomicU64 = AtomicU64::new(0);
                let n = COUNT.fetch_add(1, Ordering::Relaxed);
                let temporary = path.with_extension(format!("tmp-{}-{n}", std::process::id()));
                let file = File::create(&temporary).map_err(|e| DataError::io("write", &temporary, e))?;
                let guard = Temporary(Some(temporary));
                Sink::File { writer: BufWriter::new(file), temporary: guard, path: path.to_path_buf() }
            }
        };
        let (whole, examples) = (blake3::Hasher::new(), blake3::Hasher::new());
        let mut writer = Self { sink, whole, examples, index: Vec::new(), at: 0, buffer: Vec::new(), key };
        writer.buffer.extend_from_slice(MAGIC);
        writer.buffer.extend_from_slice(key.as_bytes());
        writer.whole.update(&writer.buffer);
        writer.write_buffer()?;
        Ok(writer)
    }

    pub(crate) fn push(&mut self, record: u32, example: &Example) -> Result<()> {
        self.index.push(self.at);
        self.buffer.extend_from_slice(&(example.ids.len() as u32).to_le_bytes());
        self.buffer.extend_from_slice(&record.to_le_bytes());
        self.buffer.extend(example.ids.iter().flat_map(|id| id.to_le_bytes()));
        let mask_at = self.buffer.len();
        self.buffer.resize(mask_at + example.ids.len().div_ceil(32) * 4, 0);
        for (t, _) in example.trained.iter().enumerate().filter(|(_, trained)| **trained) {
            self.buffer[mask_at + t / 8] |= 1 << (t % 8);
        }
        self.examples.update(&self.buffer);
        self.write_buffer()
    }

    fn write_buffer(&mut self) -> Result<()> {
        self.at += self.buffer.len() as u64;
        match &mut self.sink {
            Sink::Memory(bytes) => bytes.extend_from_slice(&self.buffer),
            Sink::File { writer, path, .. } => {
                writer.write_all(&self.buffer).map_err(|e| DataError::io("write the token cache", path, e))?;
            }
        }
        self.buffer.clear();
        Ok(())
    }

    pub(crate) fn finish(mut self, stats: &EncodeStats) -> Result<TokenStore> {
        let index_at = self.at;
        self.buffer.extend(self.index.iter().flat_map(|at| at.to_le_bytes()));
        let json_at = index_at + self.buffer.len() as u64;
        // Counts are plain numbers and strings; writing them as JSON cannot fail.
        let json = serde_json::to_vec(stats).unwrap_or_default();
        self.buffer.extend_from_slice(&json);
        for number in [index_at, self.index.len() as u64, json_at, json.len() as u64] {
            self.buffer.extend_from_slice(&number.to_le_bytes());
        }
        self.whole.update(self.examples.finalize().as_bytes()).update(&self.buffer);
        self.buffer.extend_from_slice(self.whole.finalize().as_bytes());
        self.buffer.extend_from_slice(END);
        self.write_buffer()?;
        match self.sink {
            Sink::Memory(bytes) => {
                TokenStore::parse(Bytes::Memory(bytes), &self.key).map_err(|e| DataError::Empty(format!("store {e}")))
            }
            Sink::File { writer, mut temporary, path } => {
                let wrong = |e| DataError::io("write the token cache", &path, e);
                let file = writer.into_inner().map_err(|e| wrong(e.into_error()))?;
                file.sync_all().map_err(wrong)?;
                if let Some(name) = &temporary.0 {
                    std::fs::rename(name, &path).map_err(wrong)?;
                    temporary.0 = None;
                }
                TokenStore::open(&path, &self.key)
                    .and_then(|store| store.ok_or_else(|| "has vanished".into()))
                    .map_err(|e| DataError::file(&path, format!("the token cache just written {e}")))
            }
        }
    }
}
