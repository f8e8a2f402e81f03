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
//! All numbers are little-endian. The file is written by [`phalanx_formats::atomic`], so a
//! reader sees a whole file or none; length, magic, key and checksum are checked on opening, and whatever fails them
//! is written anew.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use memmap2::Mmap;
use phalanx_formats::atomic;

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
        // SAFETY: the mapping is read-only and private to this store. This program creates files of this name only by
        // renaming a finished file onto it and never writes or cuts one in place; that nothing else does so while a
        // run reads it cannot be enforced, only asked of whoever owns the folder.
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

/// Writes the examples that `fill` pushes, in order, to memory or to the file `path`, whose folder is made.
pub(crate) fn write_store(
    path: Option<&Path>,
    key: blake3::Hash,
    fill: impl FnOnce(&mut StoreWriter<'_>) -> Result<EncodeStats>,
) -> Result<TokenStore> {
    let Some(path) = path else {
        let mut bytes = Vec::new();
        StoreWriter::new(&mut bytes, Path::new("(memory)"), key)?.fill(fill)?;
        return TokenStore::parse(Bytes::Memory(bytes), &key).map_err(|e| DataError::Empty(format!("store {e}")));
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| DataError::io("create the cache folder", folder, e))?;
        // What a killed run left here takes space and nothing else: not being able to remove it stops nobody.
        let _ = atomic::clean_stale(folder);
    }
    // `write_file` knows errors of the file only; one of the data waits here meanwhile.
    let mut failed = None;
    let written = atomic::write_file(path, |file| {
        StoreWriter::new(file, path, key).and_then(|writer| writer.fill(fill)).map_err(|e| {
            failed = Some(e);
            io::Error::other("the token cache was not finished")
        })
    });
    if let Some(e) = failed {
        return Err(e);
    }
    written?;
    TokenStore::open(path, &key)
        .and_then(|store| store.ok_or_else(|| "has vanished".into()))
        .map_err(|e| DataError::file(path, format!("the token cache just written {e}")))
}

/// Writes examples in order.
pub(crate) struct StoreWriter<'a> {
    sink: &'a mut dyn Write,
    path: &'a Path,
    /// Of what has been written, the examples left out.
    whole: blake3::Hasher,
    /// Of the examples.
    examples: blake3::Hasher,
    index: Vec<u64>,
    at: u64,
    buffer: Vec<u8>,
}

impl<'a> StoreWriter<'a> {
    fn new(sink: &'a mut dyn Write, path: &'a Path, key: blake3::Hash) -> Result<Self> {
        let (whole, examples) = (blake3::Hasher::new(), blake3::Hasher::new());
        let mut writer = Self { sink, path, whole, examples, index: Vec::new(), at: 0, buffer: Vec::new() };
        writer.buffer.extend_from_slice(MAGIC);
        writer.buffer.extend_from_slice(key.as_bytes());
        writer.whole.update(&writer.buffer);
        writer.write_buffer()?;
        Ok(writer)
    }

    fn fill(mut self, fill: impl FnOnce(&mut StoreWriter<'_>) -> Result<EncodeStats>) -> Result<()> {
        let stats = fill(&mut self)?;
        self.finish(&stats)
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
        self.sink.write_all(&self.buffer).map_err(|e| DataError::io("write the token cache", self.path, e))?;
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self, stats: &EncodeStats) -> Result<()> {
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
        self.write_buffer()
    }
}
