//! Parquet tables as JSON-like records, through the `parquet` crate's row interface (no Arrow needed).
//!
//! Codecs: none, snappy, gzip, lz4. Zstandard exists in C only, and the default build holds none.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::basic::Compression;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use super::files::{Place, Raw, RawIter};
use crate::error::{DataError, Result};

pub(super) fn open(path: &Path, file: File) -> Result<RawIter> {
    let broken = |e: &dyn std::fmt::Display| DataError::file(path, format!("not a readable Parquet file: {e}"));
    let len = file.metadata().map_err(|e| DataError::io("read", path, e))?.len();
    let reader = shielded(|| SerializedFileReader::new(file)).map_err(|e| broken(&e))?;
    for group in reader.metadata().row_groups() {
        for column in group.columns() {
            let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
            let inside = |start: u64, size: u64| start.checked_add(size).is_some_and(|end| end <= len);
            match (u64::try_from(start), u64::try_from(column.compressed_size())) {
                (Ok(start), Ok(size)) if inside(start, size) => {}
                _ => return Err(broken(&"a column lies outside the file")),
            }
            let codec = column.compression();
            if !matches!(
                codec,
                Compression::UNCOMPRESSED
                    | Compression::SNAPPY
                    | Compression::GZIP(_)
                    | Compression::LZ4
                    | Compression::LZ4_RAW
            ) {
                return Err(DataError::file(
                    path,
                    format!(
                        "column \"{}\" is compressed with {codec}, which this build cannot read; write the file anew \
                         with snappy, e.g. pandas' to_parquet(..., compression=\"snappy\")",
                        column.column_path().string()
                    ),
                ));
            }
        }
    }
    let path = path.to_path_buf();
    let mut rows = Some(shielded(|| Ok(reader.into_iter())).map_err(|e| DataError::file(&path, e))?);
    let mut index = 0u64;
    Ok(Box::new(std::iter::from_fn(move || {
        index += 1;
        let place = Place::Record(index);
        let next = shielded(|| rows.as_mut().map_or(Ok(None), |rows| rows.next().transpose()));
        if !matches!(next, Ok(Some(_))) {
            rows = None;
        }
        match next.transpose()? {
            Ok(row) => Some(Ok(Raw { value: row_value(&row), place })),
            Err(e) => Some(Err(DataError::record(
                &path,
                place.to_string(),
                format!("cannot read the Parquet row: {e}; the file may be damaged"),
            ))),
        }
    })))
}

/// Runs a call into the `parquet` crate, which panics on some damaged files. What it was working on is dropped.
fn shielded<T>(work: impl FnOnce() -> parquet::errors::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(_) => Err("its structure is inconsistent".into()),
    }
}

fn row_value(row: &Row) -> Value {
    Value::Object(row.get_column_iter().map(|(name, field)| (name.clone(), field_value(field))).collect::<Map<_, _>>())
}

fn float(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

fn field_value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(b) => Value::Bool(*b),
        Field::Byte(n) => (*n).into(),
        Field::Short(n) => (*n).into(),
        Field::Int(n) => (*n).into(),
        Field::Long(n) => (*n).into(),
        Field::UByte(n) => (*n).into(),
        Field::UShort(n) => (*n).into(),
        Field::UInt(n) => (*n).into(),
        Field::ULong(n) => (*n).into(),
        Field::Float(x) => float(f64::from(*x)),
        Field::Double(x) => float(*x),
        Field::Str(s) => Value::String(s.clone()),
        Field::Group(row) => row_value(row),
        Field::ListInternal(list) => list.elements().iter().map(field_value).collect(),
        Field::MapInternal(map) => Value::Object(
            map.entries()
                .iter()
                .map(|(k, v)| {
                    let key = match field_value(k) {
                        Value::String(s) => s,
                        other => other.to_string(),
                    };
                    (key, field_value(v))
                })
                .collect(),
        ),
        // Older writers leave the UTF-8 annotation out; dates and decimals keep their written form.
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into_owned().into(),
        other => other.to_string().into(),
    }
}
