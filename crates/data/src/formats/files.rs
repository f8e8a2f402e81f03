//! Reading records out of files: JSON, JSON lines, Parquet, plain text. What a record means is decided elsewhere.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{DataError, Result};
use crate::options::TextUnit;

/// Where in its file a record stands, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A line of a line format.
    Line(u64),
    /// A record of an array or a table.
    Record(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(n) => write!(f, "{n}"),
            Place::Record(n) => write!(f, "record {n}"),
        }
    }
}

/// A record as its file has it.
#[derive(Debug, Clone)]
pub struct Raw {
    /// The record's fields (always an object but for odd JSON files).
    pub value: Value,
    /// Where it stands.
    pub place: Place,
}

/// Records in file order; the first error ends the reading.
pub(crate) type RawIter = Box<dyn Iterator<Item = Result<Raw>>>;

/// Endings that are understood, for messages.
pub(crate) const KNOWN_ENDINGS: &[&str] = &["json", "jsonl", "ndjson", "parquet", "txt"];

/// Opens a data file by its ending.
pub(crate) fn open(path: &Path, text_unit: TextUnit) -> Result<RawIter> {
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("").to_ascii_lowercase();
    match ending.as_str() {
        "json" => open_json(path),
        "jsonl" | "ndjson" => open_lines(path),
        "txt" | "text" | "md" => open_text(path, text_unit),
        "parquet" => open_parquet(path),
        other => Err(DataError::file(
            path,
            format!("files ending in \".{other}\" are not understood; known are {}", KNOWN_ENDINGS.join(", ")),
        )),
    }
}

fn open_file(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| DataError::io("read", path, e))
}

/// A `.json` file is an array of records; many that are called so hold JSON lines, which is understood too.
fn open_json(path: &Path) -> Result<RawIter> {
    let mut bytes = std::fs::read(path).map_err(|e| DataError::io("read", path, e))?;
    if bytes.starts_with(b"\xEF\xBB\xBF") {
        bytes.drain(..3);
    }
    match bytes.iter().find(|b| !b.is_ascii_whitespace()) {
        Some(b'{') => return open_lines(path),
        Some(_) => {}
        None => return Ok(Box::new(std::iter::empty())),
    }
    let records: Vec<Value> = serde_json::from_slice(&bytes)
        .map_err(|e| DataError::record(path, e.line().to_string(), format!("not a JSON array of records: {e}")))?;
    Ok(Box::new(
        records.into_iter().enumerate().map(|(i, value)| Ok(Raw { value, place: Place::Record(i as u64 + 1) })),
    ))
}

/// One JSON value a line; blank lines are passed over.
fn open_lines(path: &Path) -> Result<RawIter> {
    let mut reader = BufReader::new(open_file(path)?);
    let path = path.to_path_buf();
    let (mut line, mut buffer, mut failed) = (0u64, Vec::new(), false);
    Ok(Box::new(std::iter::from_fn(move || {
        while !failed {
            buffer.clear();
            match reader.read_until(b'\n', &mut buffer) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(e) => {
                    failed = true;
                    return Some(Err(DataError::io("read", &path, e)));
                }
            }
            line += 1;
            let mut text = &buffer[..];
            if line == 1 {
                text = text.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(text);
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            return Some(match serde_json::from_slice(text) {
                Ok(value) => Ok(Raw { value, place: Place::Line(line) }),
                Err(e) => {
                    failed = true;
                    // The parser saw one line only, so its own line number says nothing.
                    let what = e.to_string();
                    let what = what.split(" at line ").next().unwrap_or(&what);
                    Err(DataError::record(
                        &path,
                        line.to_string(),
                        format!(
                            "broken JSON at column {}: {what}; each line must be one whole JSON object",
                            e.column()
                        ),
                    ))
                }
            });
        }
        None
    })))
}

fn text_record(text: &str, place: Place) -> Raw {
    let mut map = Map::new();
    map.insert("text".into(), text.into());
    Raw { value: Value::Object(map), place }
}

/// Plain text becomes records with the single field `text`.
fn open_text(path: &Path, unit: TextUnit) -> Result<RawIter> {
    let bytes = std::fs::read(path).map_err(|e| DataError::io("read", path, e))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let line = e.as_bytes()[..at].iter().filter(|b| **b == b'\n').count() + 1;
        DataError::record(path, line.to_string(), "not valid UTF-8; convert the file, for example with iconv")
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let mut records = Vec::new();
    match unit {
        TextUnit::File if text.trim().is_empty() => {}
        TextUnit::File => records.push(text_record(text, Place::Line(1))),
        TextUnit::Line => {
            for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                records.push(text_record(line, Place::Line(i as u64 + 1)));
            }
        }
        TextUnit::Paragraph => {
            let (mut start, mut paragraph) = (0, String::new());
            for (i, line) in text.lines().chain([""]).enumerate() {
                if !line.trim().is_empty() {
                    if paragraph.is_empty() {
                        start = i;
                    } else {
                        paragraph.push('\n');
                    }
                    paragraph.push_str(line);
                } else if !paragraph.is_empty() {
                    records.push(text_record(&paragraph, Place::Line(start as u64 + 1)));
                    paragraph.clear();
                }
            }
        }
    }
    Ok(Box::new(records.into_iter().map(Ok)))
}

#[cfg(feature = "parquet")]
fn open_parquet(path: &Path) -> Result<RawIter> {
    super::parquet::open(path, open_file(path)?)
}

#[cfg(not(feature = "parquet"))]
fn open_parquet(path: &Path) -> Result<RawIter> {
    Err(DataError::file(path, "this build does not read Parquet; build phalanx-data with its feature \"parquet\""))
}
