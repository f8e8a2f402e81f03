//! TensorBoard event files with scalars.
//!
//! An event file is a row of records, each `length (u64) · masked CRC of the length · bytes · masked CRC of the bytes`
//! (TFRecord; CRC-32C, RFC 3720, rotated and shifted so that a CRC of data that holds CRCs is no special case). The bytes are
//! the protocol buffer `Event` of `tensorboard/compat/proto/event.proto`; five fields of it are enough here and are
//! written by hand. Tags are those of transformers (`train/loss`, `eval/loss`), so curves of both lie in one chart.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::entry::Entry;
use crate::error::{ReportError, Result};

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

impl EventWriter {
    /// Begins a new event file in `dir` (created if need be). `wall_time` is in seconds since 1970, `process` tells
    /// files of the same second apart. `resume_step` says after which step this run goes on: TensorBoard then drops
    /// what an earlier file says about later steps.
    ///
    /// # Errors
    /// The folder or file cannot be created or written.
    pub fn create(dir: &Path, wall_time: f64, process: u32, resume_step: Option<u64>) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| ReportError::io(dir, "create the folder", e))?;
        // TensorBoard reads a folder's files in the order of their names. A run of the same second and process (tests,
        // quick restarts) gets the next number.
        let name = |n: usize| format!("events.out.tfevents.{:.0}.phalanx.{process}.{n}", wall_time.max(0.0).floor());
        let mut number = 0;
        let (file, path) = loop {
            let path = dir.join(name(number));
            match File::create_new(&path) {
                Ok(file) => break (file, path),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(ReportError::io(&path, "create the file", e)),
            }
        };
        let mut writer = EventWriter { file, path };
        writer.event(wall_time, 0, &bytes_field(3, b"brain.Event:2"))?;
        if let Some(step) = resume_step {
            // SessionLog { status: START } at the first step that is done again.
            writer.event(wall_time, step + 1, &bytes_field(7, &varint_field(1, 1)))?;
        }
        Ok(writer)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one number under `tag`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64, wall_time: f64) -> Result<()> {
        self.event(wall_time, step, &bytes_field(5, &summary_value(tag, value)))
    }

    /// Writes the numbers of an entry, each under [`tag`], and its epoch.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn entry(&mut self, entry: &Entry, wall_time: f64) -> Result<()> {
        let numbers = entry.values.iter().filter_map(|(name, value)| Some((tag(name), value.as_f64()?)));
        let summary: Vec<u8> = numbers
            .chain([("train/epoch".to_owned(), entry.epoch)])
            .flat_map(|(tag, value)| summary_value(&tag, value))
            .collect();
        self.event(wall_time, entry.step, &bytes_field(5, &summary))
    }

    /// Appends `Event { wall_time, step, what }` as one record, in one write.
    fn event(&mut self, wall_time: f64, step: u64, what: &[u8]) -> Result<()> {
        let mut event = vec![1 << 3 | 1];
        event.extend(wall_time.to_le_bytes());
        event.extend(varint_field(2, step));
        event.extend(what);
        self.file.write_all(&record(&event)).map_err(|e| ReportError::io(&self.path, "write an event", e))
    }
}

/// The tag of a logged name, as transformers' TensorBoard callback chooses it: `eval_loss` is `eval/loss`, `loss` is
/// `train/loss`.
pub fn tag(name: &str) -> String {
    match name.split_once('_') {
        Some((part @ ("eval" | "test"), rest)) => format!("{part}/{rest}"),
        _ => format!("train/{name}"),
    }
}

/// `Summary.value` (field 1) with `tag` (1) and `simple_value` (2, f32).
fn summary_value(tag: &str, value: f64) -> Vec<u8> {
    let mut inner = bytes_field(1, tag.as_bytes());
    inner.push(2 << 3 | 5);
    inner.extend((value as f32).to_le_bytes());
    bytes_field(1, &inner)
}

/// A length-delimited field of a protocol buffer.
fn bytes_field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    varint(&mut out, bytes.len() as u64);
    out.extend(bytes);
    out
}

/// An integer field of a protocol buffer.
fn varint_field(number: u8, value: u64) -> Vec<u8> {
    let mut out = vec![number << 3];
    varint(&mut out, value);
    out
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A TFRecord.
fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(bytes);
    out.extend(masked_crc(bytes).to_le_bytes());
    out
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli, reflected), a byte at a time.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| (crc >> 8) ^ CRC_TABLE[((crc ^ u32::from(*byte)) & 0xff) as usize])
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn crc_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn tags_of_transformers() {
        assert_eq!(tag("loss"), "train/loss");
        assert_eq!(tag("learning_rate"), "train/learning_rate");
        assert_eq!(tag("eval_loss"), "eval/loss");
        assert_eq!(tag("eval_runtime_s"), "eval/runtime_s");
    }

    #[test]
    fn varints() {
        let mut out = vec![];
        varint(&mut out, 300);
        assert_eq!(out, [0xac, 0x02]);
    }

    #[test]
    fn a_file_is_a_row_of_whole_records() {
        let scratch = Scratch::new("events");
        let mut writer = EventWriter::create(&scratch.path("runs"), 1.7e9, 7, Some(3)).unwrap();
        writer.entry(&Entry::new(4, 0.5).with("loss", 2.5).with("eval_loss", 2.0), 1.7e9 + 1.0).unwrap();
        let second = EventWriter::create(&scratch.path("runs"), 1.7e9, 7, None).unwrap();
        assert_ne!(writer.path(), second.path());

        let bytes = std::fs::read(writer.path()).unwrap();
        let mut rest = &bytes[..];
        let mut records = 0;
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked_crc(&rest[..8]).to_le_bytes());
            assert_eq!(rest[12 + length..16 + length], masked_crc(&rest[12..12 + length]).to_le_bytes());
            rest = &rest[16 + length..];
            records += 1;
        }
        assert_eq!(records, 3);
        let text = String::from_utf8_lossy(&bytes);
        for tag in ["brain.Event:2", "train/loss", "eval/loss", "train/epoch"] {
            assert!(text.contains(tag), "{tag}");
        }
    }
}
