//! From a YAML scalar, list or map to the Rust type a key declares: [`FromNode`].

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::error::Result;
use crate::node::{Node, Value, is_null_text};
use crate::yaml::Document;

/// A value that does not fit its key; the loader adds file and key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueError {
    /// Line from 1 (0: from the command line).
    pub line: usize,
    /// Column from 1.
    pub col: usize,
    /// The key below the top-level key it is about (`min_lr` of `lr_scheduler_kwargs`), or empty.
    pub sub_key: String,
    /// What is wrong.
    pub what: String,
    /// What to write instead; may be empty.
    pub mend: String,
}

impl ValueError {
    /// A value of the wrong kind: says what was found and what is expected.
    pub fn wrong(node: &Node, expected: &str) -> Self {
        Self::new(node, format!("expected {expected}, found {}", node.brief()), "")
    }

    /// Any other fault of `node`.
    pub fn new(node: &Node, what: impl Into<String>, mend: impl Into<String>) -> Self {
        ValueError { line: node.line, col: node.col, sub_key: String::new(), what: what.into(), mend: mend.into() }
    }
}

/// A type that a key may have.
pub trait FromNode: Sized {
    /// What to write, in words: "a whole number", "one of: cosine, linear".
    fn expects() -> String;
    /// Reads the value.
    ///
    /// # Errors
    /// A [`ValueError`] with the place and what is expected.
    fn from_node(node: &Node) -> Result<Self, ValueError>;
    /// The value as JSON, in a form that [`FromNode::from_node`] reads back.
    fn to_json(&self) -> Json;
}

impl FromNode for bool {
    fn expects() -> String {
        "true or false".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        // The words of YAML 1.1, which LlamaFactory's reader (PyYAML) also takes.
        match node.text().map(str::to_lowercase).as_deref() {
            Some("true" | "yes" | "on") => Ok(true),
            Some("false" | "no" | "off") => Ok(false),
            _ => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        json!(self)
    }
}

impl FromNode for f64 {
    fn expects() -> String {
        "a number".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        let number = node.text().and_then(|t| t.replace('_', "").parse::<f64>().ok());
        number.filter(|x| x.is_finite()).ok_or_else(|| ValueError::wrong(node, "a number (such as 1.0e-4)"))
    }
    fn to_json(&self) -> Json {
        json!(self)
    }
}

impl FromNode for i64 {
    fn expects() -> String {
        "a whole number".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        let text = node.text().map(|t| t.replace('_', "")).unwrap_or_default();
        if let Ok(i) = text.parse::<i64>() {
            return Ok(i);
        }
        // `1e4` and `3.0` are whole numbers too; 2^53 is where f64 stops counting.
        match text.parse::<f64>() {
            Ok(x) if x.fract() == 0.0 && x.abs() < 9e15 => Ok(x as i64),
            _ => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        json!(self)
    }
}

impl FromNode for u64 {
    fn expects() -> String {
        "a whole number, 0 or more".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        i64::from_node(node)
            .ok()
            .and_then(|i| u64::try_from(i).ok())
            .ok_or_else(|| ValueError::wrong(node, &Self::expects()))
    }
    fn to_json(&self) -> Json {
        json!(self)
    }
}

impl FromNode for usize {
    fn expects() -> String {
        u64::expects()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        u64::from_node(node)?.try_into().map_err(|_| ValueError::wrong(node, &Self::expects()))
    }
    fn to_json(&self) -> Json {
        json!(self)
    }
}

impl FromNode for String {
    fn expects() -> String {
        "a word or a text".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match &node.value {
            Value::Scalar { text, plain } if !(*plain && is_null_text(text)) => Ok(text.clone()),
            _ => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        json!(self)
    }
}

impl FromNode for PathBuf {
    fn expects() -> String {
        "a path".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match String::from_node(node) {
            Ok(text) if !text.is_empty() => Ok(text.into()),
            _ => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        json!(self.to_string_lossy())
    }
}

impl<T: FromNode> FromNode for Option<T> {
    fn expects() -> String {
        format!("{}, or null", T::expects())
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        if node.is_null() { Ok(None) } else { T::from_node(node).map(Some) }
    }
    fn to_json(&self) -> Json {
        self.as_ref().map_or(Json::Null, T::to_json)
    }
}

/// LlamaFactory writes lists as `a,b`; YAML lists are taken as well, and null is the empty list.
impl<T: FromNode> FromNode for Vec<T> {
    fn expects() -> String {
        format!("a list, or values between commas, each {}", T::expects())
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match &node.value {
            _ if node.is_null() => Ok(vec![]),
            Value::List(items) => items.iter().map(T::from_node).collect(),
            Value::Scalar { text, plain } => split_list(text)
                .map(|part| {
                    let value = Value::Scalar { text: part.into(), plain: *plain };
                    T::from_node(&Node { value, line: node.line, col: node.col })
                })
                .collect(),
            Value::Map(_) => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        Json::Array(self.iter().map(T::to_json).collect())
    }
}

/// The parts of `a, b,c`; a comma within braces belongs to a pattern (`layers.{0,7}`).
fn split_list(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0usize;
    text.split(move |c| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|part| !part.is_empty())
}

/// One text or a list of texts, taken as they are: nothing is split at commas or trimmed (`stop: ", "`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Texts(pub Vec<String>);

impl FromNode for Texts {
    fn expects() -> String {
        "a text, or a list of texts".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match &node.value {
            _ if node.is_null() => Ok(Texts(vec![])),
            Value::List(items) => items.iter().map(String::from_node).collect::<Result<_, _>>().map(Texts),
            _ => String::from_node(node)
                .map(|text| Texts(vec![text]))
                .map_err(|_| ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        self.0.to_json()
    }
}

/// A number of steps, or a share of all steps (`logging_steps`, `save_steps`, `eval_steps`, `warmup_steps`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Steps {
    /// That many optimizer steps.
    Count(u64),
    /// A share of the run's steps, between 0 and 1 (both excluded).
    Share(f64),
}

impl Steps {
    /// The number of steps in a run of `total` steps; a share is rounded up, as transformers does.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Steps::Count(n) => n,
            Steps::Share(share) => (share * total as f64).ceil() as u64,
        }
    }

    /// Whether it is 0 steps.
    pub fn is_zero(self) -> bool {
        self == Steps::Count(0)
    }
}

impl FromNode for Steps {
    fn expects() -> String {
        "a whole number of steps, or a share of all steps between 0 and 1".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        if let Ok(n) = u64::from_node(node) {
            return Ok(Steps::Count(n));
        }
        match f64::from_node(node) {
            Ok(x) if x > 0.0 && x < 1.0 => Ok(Steps::Share(x)),
            _ => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        match self {
            Steps::Count(n) => json!(n),
            Steps::Share(x) => json!(x),
        }
    }
}

/// A map kept as it was written, for the crate that understands it (`model:`, `mesh:`).
#[derive(Debug, Clone, PartialEq)]
pub struct RawMap(pub Node);

impl FromNode for RawMap {
    fn expects() -> String {
        "a map".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match node.value {
            Value::Map(_) => Ok(RawMap(node.clone())),
            _ => Err(ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        self.0.to_json()
    }
}

/// A map in place, or the path of a YAML file that holds it (`plan:`).
#[derive(Debug, Clone, PartialEq)]
pub enum MapOrPath {
    /// The map as it was written.
    Map(Node),
    /// A file, relative to the working directory.
    Path(PathBuf),
}

impl MapOrPath {
    /// The map, read from its file if need be. `name` is the file of the configuration, for the messages about a map
    /// that stands in it.
    ///
    /// # Errors
    /// The file cannot be read or is not YAML.
    pub fn load(&self, name: &str) -> Result<Document> {
        match self {
            MapOrPath::Map(node) => Ok(Document { name: name.into(), root: node.clone() }),
            MapOrPath::Path(path) => Document::read(path),
        }
    }
}

impl FromNode for MapOrPath {
    fn expects() -> String {
        "a map, or the path of a YAML file".into()
    }
    fn from_node(node: &Node) -> Result<Self, ValueError> {
        match &node.value {
            Value::Map(_) => Ok(MapOrPath::Map(node.clone())),
            _ => PathBuf::from_node(node).map(MapOrPath::Path).map_err(|_| ValueError::wrong(node, &Self::expects())),
        }
    }
    fn to_json(&self) -> Json {
        match self {
            MapOrPath::Map(node) => node.to_json(),
            MapOrPath::Path(path) => path.to_json(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: FromNode>(text: &str) -> Result<T, String> {
        let document = Document::parse(&format!("key: {text}"), "t").unwrap();
        T::from_node(document.root.get("key").unwrap()).map_err(|e| e.what)
    }

    #[test]
    fn numbers_in_every_spelling() {
        for text in ["1e-4", "1.0e-4", "1E-4", ".0001", "0.000_1", "'1e-4'"] {
            assert_eq!(read::<f64>(text), Ok(1e-4), "{text}");
        }
        for text in ["10000", "10_000", "1e4", "1.0e+4", "10000.0"] {
            assert_eq!(read::<usize>(text), Ok(10_000), "{text}");
        }
        assert_eq!(read::<i64>("-1"), Ok(-1));
        assert_eq!(read::<f64>("fast").unwrap_err(), "expected a number (such as 1.0e-4), found `fast`");
        assert_eq!(read::<u64>("-3").unwrap_err(), "expected a whole number, 0 or more, found `-3`");
        for text in ["nan", ".nan", "inf", "[1]", "1.5.0"] {
            assert!(read::<f64>(text).is_err(), "{text}");
        }
        assert!(read::<usize>("2.5").is_err());
    }

    #[test]
    fn lists_and_null() {
        let list = |v: &[&str]| Ok(v.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        assert_eq!(read("identity, alpaca_en_demo,"), list(&["identity", "alpaca_en_demo"]));
        assert_eq!(read("[q_proj, v_proj]"), list(&["q_proj", "v_proj"]));
        assert_eq!(read("layers.{0,7}.mlp,lm_head"), list(&["layers.{0,7}.mlp", "lm_head"]));
        assert_eq!(read("null"), list(&[]));
        assert_eq!(read("0.3, 0.7"), Ok(vec![0.3, 0.7]));
        assert_eq!(read("~"), Ok(None::<String>));
        assert!(read::<String>("null").is_err());
        assert_eq!(read("'null'"), Ok("null".to_owned()));
    }

    #[test]
    fn steps_are_counts_or_shares() {
        assert_eq!(read("500"), Ok(Steps::Count(500)));
        assert_eq!(read("0.1"), Ok(Steps::Share(0.1)));
        assert_eq!(Steps::Share(0.1).of(25), 3);
        assert!(read::<Steps>("1.5").is_err());
        assert!(read::<Steps>("-0.5").is_err());
    }
}
