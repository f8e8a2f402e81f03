//! A Jinja environment that behaves like the one `transformers` renders chat templates with.
//!
//! Source of the rules: `transformers/utils/chat_template_utils.py` (`_compile_jinja_template`): `trim_blocks`,
//! `lstrip_blocks`, loop controls, no HTML escaping, its own `tojson`, `raise_exception` and `strftime_now`.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::python::{Day, JsonStyle, json_dumps, python_str};

/// Marks errors that the template raised on purpose.
pub(super) const RAISED: &str = "raise_exception: ";

pub(super) const TEMPLATE: &str = "chat_template";

/// An environment with the one template in it.
pub(super) fn environment(source: &str, today: Day) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python_method);
    env.set_formatter(|out, _, value| out.write_str(&python_str(value)).map_err(Error::from));
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_function("strftime_now", move |format: &str| today.strftime(format));
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| python_str(value));
    // In Python a string and a dictionary are sequences and iterables too.
    env.add_test("sequence", |v: &Value| matches!(v.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String));
    env.add_test("iterable", |v: &Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable)
    });
    env.add_template_owned(TEMPLATE, strip_generation(source))?;
    Ok(env)
}

/// `{% generation %}` marks the assistant's words for transformers' own mask. It prints its body in a scope of its
/// own, which `{% with %}` does too; whitespace control at the tags is kept.
fn strip_generation(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        out.push_str(&rest[..at]);
        let tag = &rest[at..];
        let Some(end) = tag.find("%}").map(|e| e + 2) else {
            rest = tag;
            break;
        };
        let word = tag[2..end - 2].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => Some("with"),
            "endgeneration" => Some("endwith"),
            _ => None,
        };
        match replacement {
            Some(new) => out.push_str(&tag[..end].replacen(word, new, 1)),
            None => out.push_str(&tag[..end]),
        }
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let bad = |what: &str| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    let pick = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let given = kwargs.get::<Option<Value>>(name)?;
        Ok(given.or_else(|| positional.get(index).cloned()).filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = pick(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match pick(1, "indent")? {
        None => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(v).map_err(|_| bad("indent must be a number of spaces"))?),
        }),
    };
    let mut style = JsonStyle::new(indent);
    style.ensure_ascii = ensure_ascii;
    if let Some(pair) = pick(2, "separators")? {
        let pair: Vec<Value> = pair.try_iter()?.collect();
        let [item, key] = pair.as_slice() else {
            return Err(bad("separators must be a pair"));
        };
        style.item_separator = python_str(item);
        style.key_separator = python_str(key);
    }
    style.sort_keys = pick(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    json_dumps(value, &style).map(Value::from).map_err(|e| bad(&e))
}

/// Python's methods of strings, lists and dictionaries: those of `minijinja-contrib`, and a few it lacks.
fn python_method(state: &mut minijinja::State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        let arg = |i: usize| args.get(i).and_then(Value::as_str);
        match (method, args.len()) {
            ("title", 0) => return Ok(title(text).into()),
            ("removeprefix", 1) => return Ok(arg(0).and_then(|p| text.strip_prefix(p)).unwrap_or(text).into()),
            ("removesuffix", 1) => return Ok(arg(0).and_then(|p| text.strip_suffix(p)).unwrap_or(text).into()),
            ("rsplit", 1 | 2) => {
                if let Some(separator) = arg(0).filter(|s| !s.is_empty()) {
                    let limit = args.get(1).and_then(Value::as_i64).filter(|n| *n >= 0);
                    let mut parts: Vec<Value> = match limit {
                        Some(n) => text.rsplitn(n as usize + 1, separator).map(Value::from).collect(),
                        None => text.rsplit(separator).map(Value::from).collect(),
                    };
                    parts.reverse();
                    return Ok(parts.into());
                }
            }
            ("partition" | "rpartition", 1) => {
                if let Some(separator) = arg(0).filter(|s| !s.is_empty()) {
                    let found = if method == "partition" { text.find(separator) } else { text.rfind(separator) };
                    let parts = match found {
                        Some(at) => [&text[..at], separator, &text[at + separator.len()..]],
                        None if method == "partition" => [text, "", ""],
                        None => ["", "", text],
                    };
                    return Ok(parts.map(Value::from).to_vec().into());
                }
            }
            ("index", 1) => {
                let at = arg(0).and_then(|p| text.find(p));
                let at = at.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
                return Ok(text[..at].chars().count().into());
            }
            _ => {}
        }
    }
    if method == "index" && value.kind() == ValueKind::Seq && args.len() == 1 {
        for (i, item) in value.try_iter()?.enumerate() {
            if item == args[0] {
                return Ok(i.into());
            }
        }
        return Err(Error::new(ErrorKind::InvalidOperation, format!("{} is not in list", python_str(&args[0]))));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `str.title()`: a capital after everything that is no letter.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}

/// The error's own words, with the line, without the engine's wrapping.
pub(super) fn explain(error: &Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some((_, raised)) = detail.split_once(RAISED) {
        return format!("the template refuses it: {raised}");
    }
    let mut cause = String::new();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some((_, raised)) = inner.to_string().split_once(RAISED) {
            return format!("the template refuses it: {raised}");
        }
        cause = format!(": {inner}");
        source = inner.source();
    }
    let line = error.line().map_or(String::new(), |n| format!(" (line {n} of the template)"));
    format!("{detail}{cause}{line}")
}

/// A template shared between threads; cloning is cheap.
pub(super) type SharedEnvironment = Arc<Environment<'static>>;

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, context: serde_json::Value) -> Result<String, String> {
        let env = environment(source, Day::parse("2024-07-26").unwrap()).map_err(|e| explain(&e))?;
        let template = env.get_template(TEMPLATE).unwrap();
        template.render(Value::from(minijinja::value::Serde(&context))).map_err(|e| explain(&e))
    }

    #[test]
    fn prints_like_python() {
        let context = serde_json::json!({
            "t": true, "n": null, "f": 1.0, "l": [1, "a'b", null, false], "d": {"z": 1, "a": [0.5]}, "s": "é<&>\n"});
        for (source, want) in [
            (
                "{{ t }} {{ n }} {{ f }} {{ l }} {{ d }} {{ missing }}|",
                "True None 1.0 [1, \"a'b\", None, False] {'z': 1, 'a': [0.5]} |",
            ),
            ("{{ s | tojson }}", "\"é<&>\\n\""),
            ("{{ s | tojson(ensure_ascii=true) }}", "\"\\u00e9<&>\\n\""),
            ("{{ d | tojson }}", "{\"z\": 1, \"a\": [0.5]}"),
            ("{{ d | tojson(sort_keys=true, separators=(',', ':')) }}", "{\"a\":[0.5],\"z\":1}"),
            ("{{ d | tojson(indent=2) }}", "{\n  \"z\": 1,\n  \"a\": [\n    0.5\n  ]\n}"),
            ("{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}", "[]{}"),
            ("{{ 'a,b,c'.rsplit(',', 1) }}{{ ' x\n'.strip() }}{{ '##x#'.lstrip('#') }}", "['a,b', 'c']xx#"),
            ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
            (
                "{{ l[::-1] }}{{ l[-1] }}{{ 's' is sequence }}{{ d is iterable }}",
                "[False, None, \"a'b\", 1]FalseTrueTrue",
            ),
            ("{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.get('q', 7) }}", "z=1;a=[0.5];7"),
            (
                "{% set ns = namespace(x=0) %}{% for i in l %}{% if loop.index0 == 2 %}{% break %}{% endif %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
                "2",
            ),
            ("a\n  {% if t %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
            ("a{%- generation -%} b {%- endgeneration %}\nc", "abc"),
            ("  {% generation %}\nx\n  {% endgeneration %}\ny", "x\ny"),
        ] {
            assert_eq!(render(source, context.clone()).as_deref(), Ok(want), "{source}");
        }
    }

    #[test]
    fn errors_carry_the_templates_words() {
        let error = render("{{ raise_exception('Roles must alternate') }}", serde_json::json!({})).unwrap_err();
        assert_eq!(error, "the template refuses it: Roles must alternate");
        assert!(render("a\n{{ m.x.y }}", serde_json::json!({"m": {}})).unwrap_err().contains("line 2"));
    }
}
