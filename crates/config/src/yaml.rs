//! YAML text to [`Node`]s, with `saphyr-parser` for the grammar (JSON is read by the same door: it is YAML).
//!
//! The loader is stricter than YAML where leniency hides mistakes: a key twice in one map is an error that names both
//! lines, a second document is an error, and so are tags of other languages (`!!python/object`). Anchors, aliases and
//! the merge key `<<` work, within a limit on the size of the result.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use saphyr_parser::{Event, Parser, Span, Tag};

use crate::error::{ConfigError, Origin, Result};
use crate::node::{Entry, Node, Value};

/// Nodes a document may hold once its aliases are expanded: far above any configuration, far below any harm.
const MAX_NODES: usize = 100_000;
/// Levels a document may nest: recursion stays far from the end of the stack.
const MAX_DEPTH: usize = 64;

/// A parsed file or text: its name, for messages, and its tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// The path as the user gave it, or another name for messages.
    pub name: Arc<str>,
    /// The whole content; an empty file is an empty map.
    pub root: Node,
}

impl Document {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// [`ConfigError::Read`] and [`ConfigError::Syntax`].
    pub fn read(path: &Path) -> Result<Document> {
        let bytes = std::fs::read(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let text = String::from_utf8(bytes).map_err(|e| ConfigError::Read {
            path: path.into(),
            source: std::io::Error::new(std::io::ErrorKind::InvalidData, e.utf8_error()),
        })?;
        Document::parse(&text, &path.display().to_string())
    }

    /// Parses `text`; `name` stands in messages where a path would.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`], with the line.
    pub fn parse(text: &str, name: &str) -> Result<Document> {
        let name: Arc<str> = name.into();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut loader =
            Loader { events: Parser::new_from_str(text), name: name.clone(), anchors: HashMap::new(), nodes: 0 };
        Ok(Document { root: loader.document()?, name })
    }

    /// The origin of a place in this document.
    pub fn origin(&self, line: usize, col: usize) -> Origin {
        Origin::File { path: self.name.clone(), line, col }
    }
}

struct Loader<'a> {
    events: Parser<'a, saphyr_parser::StrInput<'a>>,
    name: Arc<str>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
}

impl<'a> Loader<'a> {
    fn document(&mut self) -> Result<Node> {
        let mut root = None;
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamStart | Event::DocumentEnd | Event::Nothing => {}
                Event::StreamEnd => break,
                Event::DocumentStart(_) if root.is_some() => {
                    return Err(self.fail(&span, "a second document (`---`) begins here; keep one document a file"));
                }
                Event::DocumentStart(_) => {
                    let (event, span) = self.next()?;
                    root = Some(self.node(event, span, 0)?);
                }
                _ => return Err(self.fail(&span, "content outside a document")),
            }
        }
        let empty = Node { value: Value::Map(vec![]), line: 1, col: 1 };
        Ok(root.filter(|n| !n.is_null()).unwrap_or(empty))
    }

    fn next(&mut self) -> Result<(Event<'a>, Span)> {
        match self.events.next_event() {
            Some(Ok(pair)) => Ok(pair),
            Some(Err(e)) => Err(ConfigError::Syntax {
                origin: self.at(e.marker().line(), e.marker().col() + 1),
                message: e.info().to_owned(),
            }),
            None => Err(ConfigError::Syntax { origin: self.at(1, 1), message: "the text ends too early".into() }),
        }
    }

    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node> {
        self.count(1, &span)?;
        if depth > MAX_DEPTH {
            return Err(self.fail(&span, &format!("nested deeper than {MAX_DEPTH} levels")));
        }
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.check_tag(tag.as_deref(), &span)?;
                let string_tag = tag.is_some_and(|t| t.suffix == "str");
                let plain = matches!(style, saphyr_parser::ScalarStyle::Plain) && !string_tag;
                (anchor, Value::Scalar { text: text.into_owned(), plain })
            }
            Event::SequenceStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), &span)?;
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        (Event::SequenceEnd, _) => break (anchor, Value::List(items)),
                        (event, span) => items.push(self.node(event, span, depth + 1)?),
                    }
                }
            }
            Event::MappingStart(anchor, tag) => {
                self.check_tag(tag.as_deref(), &span)?;
                (anchor, Value::Map(self.map(depth)?))
            }
            Event::Alias(anchor) => {
                let Some(target) = self.anchors.get(&anchor).cloned() else {
                    return Err(self.fail(&span, "an alias to an anchor that is not complete yet"));
                };
                self.count(size(&target), &span)?;
                return Ok(target);
            }
            _ => return Err(self.fail(&span, "a value is missing here")),
        };
        let node = Node { value, line: span.start.line(), col: span.start.col() + 1 };
        if anchor != 0 {
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn map(&mut self, depth: usize) -> Result<Vec<Entry>> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut merged: Vec<Entry> = Vec::new();
        loop {
            let (event, span) = self.next()?;
            if matches!(event, Event::MappingEnd) {
                break;
            }
            let key = self.node(event, span, depth + 1)?;
            let (event, value_span) = self.next()?;
            let value = self.node(event, value_span, depth + 1)?;
            let Value::Scalar { text, plain } = key.value else {
                return Err(self.fail(&span, "a key must be a word, not a list or a map"));
            };
            if text == "<<" && plain {
                let sources = match value.value {
                    Value::List(items) => items,
                    _ => vec![value],
                };
                for source in sources {
                    let Value::Map(entries) = source.value else {
                        return Err(self.fail(&value_span, "`<<` merges maps only"));
                    };
                    merged.extend(entries);
                }
                continue;
            }
            if let Some(first) = entries.iter().find(|e| e.key == text) {
                let message = format!("the key `{text}` stands twice (first on line {}); remove one", first.line);
                return Err(self.fail(&span, &message));
            }
            entries.push(Entry { key: text, line: key.line, col: key.col, value });
        }
        // A key of the map itself wins over a merged one, an earlier source over a later.
        for entry in merged {
            if !entries.iter().any(|e| e.key == entry.key) {
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    fn count(&mut self, nodes: usize, span: &Span) -> Result<()> {
        self.nodes += nodes;
        if self.nodes > MAX_NODES {
            return Err(self.fail(span, &format!("more than {MAX_NODES} values once aliases are expanded")));
        }
        Ok(())
    }

    fn check_tag(&self, tag: Option<&Tag>, span: &Span) -> Result<()> {
        match tag {
            Some(t) if !t.is_yaml_core_schema() => {
                Err(self.fail(span, &format!("the tag `{}{}` means nothing here; remove it", t.handle, t.suffix)))
            }
            Some(t) if t.suffix.contains('/') => {
                Err(self.fail(span, &format!("the tag `!!{}` belongs to another language; remove it", t.suffix)))
            }
            _ => Ok(()),
        }
    }

    fn at(&self, line: usize, col: usize) -> Origin {
        Origin::File { path: self.name.clone(), line, col }
    }

    fn fail(&self, span: &Span, message: &str) -> ConfigError {
        ConfigError::Syntax { origin: self.at(span.start.line(), span.start.col() + 1), message: message.into() }
    }
}

fn size(node: &Node) -> usize {
    match &node.value {
        Value::Scalar { .. } => 1,
        Value::List(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|e| size(&e.value)).sum::<usize>(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(text: &str) -> Result<Document> {
        Document::parse(text, "t.yaml")
    }

    fn message(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn yaml_and_json_give_the_same_tree() {
        let yaml = parse("a: 1e-4\nb: [x, 'y']\nc:\n  d: null\n  e: yes\n").unwrap();
        let json_text = "{\n\t\"a\": 1e-4,\n\t\"b\": [\"x\", \"y\"],\n\t\"c\": {\"d\": null, \"e\": \"yes\"}\n}\n";
        let expected = json!({"a": 1e-4, "b": ["x", "y"], "c": {"d": null, "e": "yes"}});
        assert_eq!(yaml.root.to_json(), expected);
        assert_eq!(parse(json_text).unwrap().root.to_json(), expected);
    }

    #[test]
    fn places_count_from_one() {
        let doc = parse("# note\na: 1\nb:\n  c: 2\n").unwrap();
        let b = &doc.root.entries().unwrap()[1];
        assert_eq!((b.line, b.col), (3, 1));
        let c = &b.value.entries().unwrap()[0];
        assert_eq!((c.line, c.col, c.value.line, c.value.col), (4, 3, 4, 6));
    }

    #[test]
    fn anchors_and_merge_keys() {
        let doc = parse("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\n").unwrap();
        assert_eq!(doc.root.get("use").unwrap().to_json(), json!({"y": 3, "x": 1}));
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        assert!(
            message("a: 1\nb: 2\na: 3\n")
                .contains("t.yaml:3: not valid YAML: the key `a` stands twice (first on line 1)")
        );
        assert!(message("a: 1\n---\nb: 2\n").contains("second document"));
        assert!(message("a: !!python/object:os.system x\n").contains("another language"));
        assert!(message("a: [1, 2\nb: 3\n").starts_with("t.yaml:"));
        assert!(message("? [a]\n: b\n").contains("must be a word"));
    }

    #[test]
    fn a_document_that_explodes_is_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for i in 1..9 {
            let inner = vec![format!("*a{}", i - 1); 10].join(", ");
            text += &format!("a{i}: &a{i} [{inner}]\n");
        }
        assert!(message(&text).contains("aliases"));
        assert!(message(&("[".repeat(100) + &"]".repeat(100))).contains("nested deeper"));
        // Far deeper, the parser itself gives up first; neither recursion may overflow the stack.
        assert!(parse(&"[".repeat(100_000)).is_err());
    }

    #[test]
    fn an_empty_file_is_an_empty_map() {
        for text in ["", "# only a note\n", "---\n", "\u{feff}"] {
            assert_eq!(parse(text).unwrap().root.to_json(), json!({}), "{text:?}");
        }
    }
}
