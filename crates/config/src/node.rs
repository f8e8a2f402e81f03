//! A YAML tree that remembers where everything stood.
//!
//! A scalar stays text until a key's declared type reads it. That is what lets `1e-4` be a number for `learning_rate`
//! (YAML 1.1 calls it a string) and `no` a word for `eval_strategy` (YAML 1.1 calls it a boolean).

use serde_json::{Map, Number, Value as Json};

/// A value and its place. Two nodes are equal when their values are, wherever they stand.
#[derive(Debug, Clone)]
pub struct Node {
    /// What it is.
    pub value: Value,
    /// Line from 1; 0 when it came from the command line.
    pub line: usize,
    /// Column from 1.
    pub col: usize,
}

/// The three kinds of YAML value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Text, and whether it stood without quotes (only then can it be a number, a boolean or null).
    Scalar {
        /// The text, escapes and folding resolved.
        text: String,
        /// `true` when it was not quoted.
        plain: bool,
    },
    /// `[a, b]` or `- a`.
    List(Vec<Node>),
    /// `key: value`, in the order of the file.
    Map(Vec<Entry>),
}

/// One `key: value` of a map.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The key's text.
    pub key: String,
    /// Line of the key, from 1.
    pub line: usize,
    /// Column of the key, from 1.
    pub col: usize,
    /// Its value.
    pub value: Node,
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.value == other.value
    }
}

impl Node {
    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar { text, .. } => Some(text),
            _ => None,
        }
    }

    /// The entries of a map.
    pub fn entries(&self) -> Option<&[Entry]> {
        match &self.value {
            Value::Map(entries) => Some(entries),
            _ => None,
        }
    }

    /// The value under `key`, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entries()?.iter().find(|e| e.key == key).map(|e| &e.value)
    }

    /// `null`, `~` or nothing at all.
    pub fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true } if is_null_text(text))
    }

    /// The value as JSON: plain scalars become null, booleans and numbers where YAML 1.1 or 1.2 says so (and `1e-4`,
    /// where only YAML 1.2 does); `yes`, `no`, `on` and `off` stay words.
    pub fn to_json(&self) -> Json {
        match &self.value {
            Value::Scalar { text, plain: false } => Json::String(text.clone()),
            Value::Scalar { text, plain: true } => resolve_plain(text),
            Value::List(items) => Json::Array(items.iter().map(Node::to_json).collect()),
            Value::Map(entries) => {
                Json::Object(entries.iter().map(|e| (e.key.clone(), e.value.to_json())).collect::<Map<_, _>>())
            }
        }
    }

    /// How an error message quotes it: short, one line.
    pub fn brief(&self) -> String {
        match &self.value {
            Value::Scalar { .. } if self.is_null() => "nothing (null)".into(),
            Value::Scalar { text, .. } => {
                let shown: String = text.chars().take(60).collect();
                if shown.len() < text.len() { format!("`{shown}…`") } else { format!("`{shown}`") }
            }
            Value::List(items) => format!("a list of {}", items.len()),
            Value::Map(entries) => {
                let keys: Vec<_> = entries.iter().take(3).map(|e| e.key.as_str()).collect();
                format!("a map ({}{})", keys.join(", "), if entries.len() > 3 { ", …" } else { "" })
            }
        }
    }
}

/// Whether a plain scalar means null.
pub(crate) fn is_null_text(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

/// The meaning of a plain scalar for which no type is declared.
fn resolve_plain(text: &str) -> Json {
    if is_null_text(text) {
        return Json::Null;
    }
    match text {
        "true" | "True" | "TRUE" => return Json::Bool(true),
        "false" | "False" | "FALSE" => return Json::Bool(false),
        _ => {}
    }
    if let Ok(i) = text.parse::<i64>() {
        return Json::Number(i.into());
    }
    if let Ok(u) = text.parse::<u64>() {
        return Json::Number(u.into());
    }
    // `parse` also takes `inf`, `nan` and `infinity`, which are words here: JSON has no number for them.
    if text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.'))
        && let Ok(x) = text.parse::<f64>()
        && let Some(n) = Number::from_f64(x)
    {
        return Json::Number(n);
    }
    Json::String(text.to_owned())
}
