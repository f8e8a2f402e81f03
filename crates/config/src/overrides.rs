//! `key=value` and `--key value` on the command line.
//!
//! The value is YAML, so `plan={recompute: [...]}`, `stop=["\n"]` and `learning_rate=1e-4` all work; it goes through
//! the same checks as the file. A key with nothing after the `=` goes back to its default, which is how a key of the
//! file is taken out. A dot reaches into a map: `model.hidden_size=64`, `lr_scheduler_kwargs.min_lr=1e-5`.

use crate::error::{ConfigError, Origin, Problem, Problems, Result};
use crate::node::{Entry, Node, Value};
use crate::yaml::Document;

/// One override.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// The key, perhaps with dots.
    pub key: String,
    /// Its value; `None` goes back to the default.
    pub value: Option<Node>,
}

/// Reads the arguments that follow the configuration file: `key=value`, `--key=value`, `--key value`, and `--key`
/// alone for `true`. `-` in keys is `_`.
///
/// # Errors
/// [`ConfigError::Invalid`] for a stray word, [`ConfigError::Syntax`] for a value that is not YAML.
pub fn parse_overrides<S: AsRef<str>>(args: &[S]) -> Result<Vec<Override>> {
    let mut overrides = Vec::new();
    let mut args = args.iter().map(AsRef::as_ref).peekable();
    while let Some(arg) = args.next() {
        let dashed = arg.strip_prefix("--");
        let (key, text) = match (dashed.unwrap_or(arg).split_once('='), dashed) {
            (Some((key, text)), _) => (key, text.to_owned()),
            (None, Some(key)) => {
                let takes_next = args.peek().is_some_and(|next| !next.starts_with("--") && !next.contains('='));
                (key, if takes_next { args.next().unwrap_or_default().to_owned() } else { "true".into() })
            }
            (None, None) => return Err(stray(arg)),
        };
        if key.is_empty() || !key.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) {
            return Err(stray(arg));
        }
        let value = if text.trim().is_empty() { None } else { Some(value(&text)?) };
        overrides.push(Override { key: key.replace('-', "_"), value });
    }
    Ok(overrides)
}

fn stray(arg: &str) -> ConfigError {
    ConfigError::Invalid(Problems(vec![Problem {
        origin: Origin::Override,
        key: arg.into(),
        what: "not an override".into(),
        mend: "write key=value or --key value".into(),
    }]))
}

/// Parses the value and takes its places out: it has none in a file.
fn value(text: &str) -> Result<Node> {
    let wrapped = format!("value: {text}");
    let node = match Document::parse(&wrapped, "command line") {
        Ok(document) => document.root.get("value").cloned(),
        // A text such as `a: b` is no YAML after a key; it is a text.
        Err(_) if !text.starts_with(['{', '[', '"', '\'']) => None,
        Err(ConfigError::Syntax { message, .. }) => {
            return Err(ConfigError::Syntax { origin: Origin::Override, message: format!("{message} (in `{text}`)") });
        }
        Err(other) => return Err(other),
    };
    let plain_text = || Node { value: Value::Scalar { text: text.into(), plain: false }, line: 0, col: 0 };
    Ok(node.map(without_places).unwrap_or_else(plain_text))
}

fn without_places(node: Node) -> Node {
    let value = match node.value {
        Value::List(items) => Value::List(items.into_iter().map(without_places).collect()),
        Value::Map(entries) => Value::Map(
            entries
                .into_iter()
                .map(|e| Entry { key: e.key, line: 0, col: 0, value: without_places(e.value) })
                .collect(),
        ),
        scalar => scalar,
    };
    Node { value, line: 0, col: 0 }
}

/// Puts an override into the entries of a file. Returns the top-level key it changed.
pub(crate) fn apply(entries: &mut Vec<Entry>, change: &Override) -> Result<String, Problem> {
    let (top, path) = match change.key.split_once('.') {
        Some((top, path)) => (top, Some(path)),
        None => (change.key.as_str(), None),
    };
    let target = match (path, &change.value) {
        (None, value) => {
            entries.retain(|e| e.key != top);
            value.clone()
        }
        (Some(path), value) => {
            let mut node = match entries.iter().position(|e| e.key == top) {
                Some(i) => entries.remove(i).value,
                // Nothing to take out of a map that is not there.
                None if value.is_none() => return Ok(top.into()),
                None => Node { value: Value::Map(vec![]), line: 0, col: 0 },
            };
            set_path(&mut node, path, value.as_ref(), &change.key)?;
            Some(node)
        }
    };
    if let Some(value) = target {
        entries.push(Entry { key: top.into(), line: 0, col: 0, value });
    }
    Ok(top.into())
}

fn set_path(node: &mut Node, path: &str, value: Option<&Node>, full_key: &str) -> Result<(), Problem> {
    let (head, rest) = match path.split_once('.') {
        Some((head, rest)) => (head, Some(rest)),
        None => (path, None),
    };
    if node.is_null() {
        node.value = Value::Map(vec![]);
    }
    let Value::Map(entries) = &mut node.value else {
        return Err(Problem {
            origin: Origin::Override,
            key: full_key.into(),
            what: format!("cannot reach into {}: it is not a map", node.brief()),
            mend: "set the whole key instead".into(),
        });
    };
    let at = entries.iter().position(|e| e.key == head);
    match (rest, value) {
        (None, None) => entries.retain(|e| e.key != head),
        (None, Some(value)) => match at {
            Some(i) => entries[i].value = value.clone(),
            None => entries.push(Entry { key: head.into(), line: 0, col: 0, value: value.clone() }),
        },
        (Some(rest), _) => {
            let i = at.unwrap_or_else(|| {
                let value = Node { value: Value::Map(vec![]), line: 0, col: 0 };
                entries.push(Entry { key: head.into(), line: 0, col: 0, value });
                entries.len() - 1
            });
            set_path(&mut entries[i].value, rest, value, full_key)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overridden(file: &str, args: &[&str]) -> serde_json::Value {
        let mut root = Document::parse(file, "t").unwrap().root;
        let Value::Map(entries) = &mut root.value else { panic!("not a map") };
        for change in parse_overrides(args).unwrap() {
            apply(entries, &change).unwrap();
        }
        root.to_json()
    }

    #[test]
    fn dots_reach_into_maps() {
        let file = "model: {hidden_size: 8, rope: {theta: 1e4}}\n";
        let args = ["model.hidden_size=64", "--model.rope.type", "yarn", "model.rope.theta=", "plan.a.b=1", "mesh.tp="];
        let expected =
            serde_json::json!({"model": {"hidden_size": 64, "rope": {"type": "yarn"}}, "plan": {"a": {"b": 1}}});
        assert_eq!(overridden(file, &args), expected);
    }

    #[test]
    fn values_are_yaml_where_they_can_be() {
        let args = ["a=[1, x]", "--b", "-1", "c=say: this", "d='1'", "--e", "f=https://x/y#z", "g-h=null"];
        let expected = serde_json::json!({
            "a": [1, "x"], "b": -1, "c": "say: this", "d": "1", "e": true, "f": "https://x/y#z", "g_h": null
        });
        assert_eq!(overridden("", &args), expected);
    }
}
