//! From files to [`Sample`]s: finding a data set, reading its records, bringing them into the common form.
//!
//! A record that cannot be understood is a [`Problem`] with a kind, so that training can stop at it, naming file and
//! line, while `phalanx data check` counts the kinds and goes on.

mod alpaca;
mod files;
mod info;
mod messages;
#[cfg(feature = "parquet")]
mod parquet;

use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;

pub use files::{Place, Raw};
pub use info::{Columns, DatasetSpec, Format, Tags, resolve};

use crate::error::{DataError, Result};
use crate::options::DataOptions;
use crate::record::Sample;

/// What is wrong with a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// For counting.
    pub kind: ProblemKind,
    /// For the person who mends it.
    pub detail: String,
}

/// Kinds of [`Problem`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    /// No answer, or an empty one. Such records are left out and counted, never an error.
    EmptyAnswer,
    /// No text.
    EmptyText,
    /// A message with a role that the tags do not name.
    UnknownRole,
    /// A field is missing.
    MissingField,
    /// A field has another type than it must.
    WrongType,
    /// A function call that is not `{"name": ..., "arguments": ...}`.
    BadToolCall,
    /// Pictures, films, sounds.
    NotText,
}

impl Problem {
    pub(crate) fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }

    /// Whether the record is merely left out.
    pub fn is_empty_record(&self) -> bool {
        matches!(self.kind, ProblemKind::EmptyAnswer | ProblemKind::EmptyText)
    }
}

/// One record, read or not.
#[derive(Debug)]
pub struct Record {
    /// The conversation or text, or why there is none.
    pub sample: std::result::Result<Sample, Problem>,
    /// The file it comes from.
    pub path: PathBuf,
    /// Where it stands in it.
    pub place: Place,
}

impl Record {
    /// The problem as an error that names file and line.
    pub fn error(&self, problem: &Problem) -> DataError {
        DataError::record(&self.path, self.place.to_string(), problem.detail.clone())
    }
}

/// The records of a data set in file order, at most `max_samples` of them.
///
/// # Errors
/// The iterator ends with an error where a file cannot be read or a line is not JSON.
pub fn records<'a>(spec: &'a DatasetSpec, options: &'a DataOptions) -> impl Iterator<Item = Result<Record>> + 'a {
    let mut files = spec.files.iter();
    let mut current: Option<(&PathBuf, files::RawIter)> = None;
    let mut failed = false;
    std::iter::from_fn(move || {
        loop {
            if failed {
                return None;
            }
            if let Some((path, iter)) = &mut current {
                match iter.next() {
                    Some(Ok(raw)) => {
                        let sample = convert(spec, &raw.value);
                        return Some(Ok(Record { sample, path: path.to_path_buf(), place: raw.place }));
                    }
                    Some(Err(e)) => {
                        failed = true;
                        return Some(Err(e));
                    }
                    None => current = None,
                }
            }
            let path = files.next()?;
            match files::open(path, options.text_unit) {
                Ok(iter) => current = Some((path, iter)),
                Err(e) => {
                    failed = true;
                    return Some(Err(e));
                }
            }
        }
    })
    .take(options.max_samples.unwrap_or(usize::MAX))
}

/// Brings one record into the common form.
///
/// # Errors
/// The [`Problem`] with it.
pub fn convert(spec: &DatasetSpec, value: &Value) -> std::result::Result<Sample, Problem> {
    let Some(record) = value.as_object() else {
        return Err(Problem::new(ProblemKind::WrongType, "a record must be a JSON object"));
    };
    match spec.format {
        Format::Alpaca => alpaca::convert(spec, record).map(Sample::Chat),
        Format::Sharegpt | Format::Openai => messages::convert(spec, record).map(Sample::Chat),
        Format::Text => {
            let key = spec.columns.prompt.as_deref().unwrap_or("text");
            let text = text_field(record, key)?.ok_or_else(|| missing(record, key))?;
            if text.trim().is_empty() {
                return Err(Problem::new(ProblemKind::EmptyText, format!("\"{key}\" is empty")));
            }
            Ok(Sample::Text(text.to_owned()))
        }
    }
}

pub(crate) type Fields = serde_json::Map<String, Value>;

fn missing(record: &Fields, key: &str) -> Problem {
    let keys = record.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    Problem::new(
        ProblemKind::MissingField,
        format!("no field \"{key}\" (there are: {keys}); name the right one under columns in dataset_info.json"),
    )
}

/// A string field; absent and null are `None`.
fn text_field<'a>(record: &'a Fields, key: &str) -> std::result::Result<Option<&'a str>, Problem> {
    match record.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s)),
        Some(other) => Err(wrong_type(key, "a string", other)),
    }
}

fn wrong_type(key: &str, wanted: &str, got: &Value) -> Problem {
    let got = match got {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Problem::new(ProblemKind::WrongType, format!("\"{key}\" must be {wanted}, not {got}"))
}
