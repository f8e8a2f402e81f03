//! `metrics.jsonl`: one JSON object a logged step, on disk before the next step begins.
//!
//! A run that is killed leaves at worst half a line. A run that goes on from an earlier checkpoint first takes out what
//! it is about to do again, so that every step stands in the file once, in order.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::entry::Entry;
use crate::error::{ReportError, Result};

/// Appends entries to `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
}

impl MetricsWriter {
    /// Begins an empty file, in place of one that is there.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = File::create(&path).map_err(|e| ReportError::io(&path, "create the file", e))?;
        Ok(MetricsWriter { file, path })
    }

    /// Goes on after step `last_step`: what the file says about later steps, and half a line at its end, is taken out
    /// (the file is replaced as a whole, so a kill in between loses nothing). Returns the entries that stay, for the
    /// loss curve. A file that does not exist is begun.
    ///
    /// # Errors
    /// The file cannot be read or written, or a complete line in it is no entry.
    pub fn resume(path: impl Into<PathBuf>, last_step: u64) -> Result<(Self, Vec<Entry>)> {
        let path = path.into();
        let mut entries = read(&path)?;
        entries.retain(|e| e.step <= last_step);
        let text: String = entries.iter().map(|e| format!("{}\n", e.to_json())).collect();
        phalanx_formats::atomic::write_bytes(&path, text.as_bytes())?;
        let file =
            OpenOptions::new().append(true).open(&path).map_err(|e| ReportError::io(&path, "open the file", e))?;
        Ok((MetricsWriter { file, path }, entries))
    }

    /// Appends one line, in one write.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn write(&mut self, entry: &Entry) -> Result<()> {
        let line = format!("{}\n", entry.to_json());
        self.file.write_all(line.as_bytes()).map_err(|e| ReportError::io(&self.path, "write a line", e))
    }
}

/// All entries of a `metrics.jsonl`, without half a line at the end; none where there is no file.
///
/// # Errors
/// The file cannot be read, or a complete line is no entry.
pub fn read(path: &Path) -> Result<Vec<Entry>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(ReportError::io(path, "read the file", e)),
    };
    let text = String::from_utf8_lossy(&bytes);
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut entries = Vec::new();
    for (i, line) in complete.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let entry = serde_json::from_str(line).ok().as_ref().and_then(Entry::from_json);
        entries.push(entry.ok_or_else(|| ReportError::Malformed {
            path: path.into(),
            line: i + 1,
            what: "not an object with a `step`".into(),
            mend: "mend or remove the line, or move the file away",
        })?);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn a_resumed_file_holds_every_step_once() {
        let scratch = Scratch::new("metrics");
        let path = scratch.path("metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        for step in 1..=5 {
            writer.write(&Entry::new(step, 0.1).with("loss", 1.0 / step as f64)).unwrap();
        }
        drop(writer);
        // Killed in the middle of a line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"loss\":0.1,\"ep").unwrap();

        // Twice: a second resume from an earlier step takes out more.
        for last in [4u64, 2] {
            let (mut writer, kept) = MetricsWriter::resume(&path, last).unwrap();
            assert_eq!(kept.len() as u64, last);
            writer.write(&Entry::new(last + 1, 0.2).with("loss", 9.0)).unwrap();
            let steps: Vec<_> = read(&path).unwrap().iter().map(|e| e.step).collect();
            assert_eq!(steps, (1..=last + 1).collect::<Vec<_>>());
        }
        assert_eq!(read(&path).unwrap()[2].number("loss"), Some(9.0));
    }

    #[test]
    fn a_broken_line_is_named() {
        let scratch = Scratch::new("metrics-broken");
        let path = scratch.path("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\nnonsense\n").unwrap();
        let message = MetricsWriter::resume(&path, 9).unwrap_err().to_string();
        assert!(message.contains("metrics.jsonl:2: not an object with a `step`"), "{message}");
        // Nothing was changed.
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":1}\nnonsense\n");
        assert!(read(&scratch.path("none.jsonl")).unwrap().is_empty());
    }
}
