//! Module patterns: `model.layers.{*}.mlp`, `model.layers.{0-3,7}.*_proj`.

use std::fmt;

/// A pattern over scope paths, compared part by part between dots.
///
/// `{*}` stands for any number, `{0-3,7}` for the numbers listed; `*` inside a part stands for any run of characters in it; a part
/// `**` stands for any parts, also none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// Literal pieces between stars.
    Glob(Vec<String>),
    Numbers(Option<Vec<(u64, u64)>>),
    Any,
}

/// A pattern that cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("pattern \"{pattern}\": {why}")]
pub struct PatternError {
    /// As written.
    pub pattern: String,
    /// What is wrong and what would be right.
    pub why: String,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// If a brace is not closed or holds something else than `*`, numbers and ranges.
    pub fn parse(text: &str) -> Result<Pattern, PatternError> {
        let bad = |why: &str| PatternError { pattern: text.into(), why: why.into() };
        if text.is_empty() || text.split('.').any(str::is_empty) {
            return Err(bad("an empty part; write names between single dots, as in model.layers.{*}.mlp"));
        }
        let mut parts = Vec::new();
        for part in text.split('.') {
            parts.push(if part == "**" {
                Part::Any
            } else if let Some(inner) = part.strip_prefix('{') {
                let inner = inner.strip_suffix('}').ok_or_else(|| bad("a { without its } at the end of the part"))?;
                if inner == "*" {
                    Part::Numbers(None)
                } else {
                    let ranges = inner.split(',').map(|r| {
                        let (a, b) = r.split_once('-').unwrap_or((r, r));
                        match (a.trim().parse::<u64>(), b.trim().parse::<u64>()) {
                            (Ok(a), Ok(b)) if a <= b => Ok((a, b)),
                            _ => Err(bad("braces hold *, numbers and rising ranges, as in {0-3,7}")),
                        }
                    });
                    Part::Numbers(Some(ranges.collect::<Result<_, _>>()?))
                }
            } else if part.contains(['{', '}']) {
                return Err(bad("braces must be a whole part, as in layers.{0-3}"));
            } else {
                Part::Glob(part.split('*').map(str::to_owned).collect())
            });
        }
        Ok(Pattern { text: text.into(), parts })
    }

    /// Whether it matches a path from end to end.
    pub fn matches(&self, path: &str) -> bool {
        let parts: Vec<&str> = path.split('.').collect();
        matches_parts(&self.parts, &parts)
    }
}

fn matches_parts(pattern: &[Part], path: &[&str]) -> bool {
    match (pattern.split_first(), path.split_first()) {
        (None, None) => true,
        (Some((Part::Any, rest)), _) => (0..=path.len()).any(|n| matches_parts(rest, &path[n..])),
        (Some((p, rest)), Some((name, others))) => p.matches(name) && matches_parts(rest, others),
        _ => false,
    }
}

impl Part {
    fn matches(&self, name: &str) -> bool {
        match self {
            Part::Any => true,
            Part::Numbers(ranges) => name
                .parse::<u64>()
                .is_ok_and(|n| ranges.as_ref().is_none_or(|r| r.iter().any(|&(a, b)| (a..=b).contains(&n)))),
            Part::Glob(pieces) => glob(pieces, name),
        }
    }
}

/// First piece at the start, last at the end, the others in order between.
fn glob(pieces: &[String], name: &str) -> bool {
    let [first, middle @ .., last] = pieces else { return pieces[0] == name };
    let Some(mut rest) = name.strip_prefix(first.as_str()) else { return false };
    for piece in middle {
        match rest.find(piece.as_str()) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last.as_str())
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_globs_and_deep_stars() {
        let yes = [
            ("model.layers.{*}.mlp", "model.layers.12.mlp"),
            ("model.layers.{0-3,7}", "model.layers.7"),
            ("model.layers.{*}.self_attn.*_proj", "model.layers.0.self_attn.q_proj"),
            ("**.*_proj", "model.layers.0.self_attn.q_proj"),
            ("**", "lm_head"),
            ("model.**.mlp", "model.mlp"),
            ("*a*b*", "xaybz"),
        ];
        let no = [
            ("model.layers.{*}.mlp", "model.layers.x.mlp"),
            ("model.layers.{0-3,7}", "model.layers.4"),
            ("model.layers.{*}", "model.layers.1.mlp"),
            ("a*b", "a"),
            ("ab*ba", "aba"),
        ];
        for (p, s) in yes {
            assert!(Pattern::parse(p).unwrap().matches(s), "{p} should match {s}");
        }
        for (p, s) in no {
            assert!(!Pattern::parse(p).unwrap().matches(s), "{p} should not match {s}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        for p in ["", "a..b", "layers.{1", "layers.{3-1}", "layers.{a}", "la{1}yers", "a.}b"] {
            assert!(Pattern::parse(p).is_err(), "{p}");
        }
    }

    proptest! {
        #[test]
        fn never_panics_and_a_literal_matches_itself(text in "[a-z.{}*0-9,_-]{0,24}", path in "[a-z0-9_.]{0,24}") {
            if let Ok(p) = Pattern::parse(&text) {
                let _ = p.matches(&path);
            }
            if let Ok(p) = Pattern::parse(&path) {
                prop_assert!(p.matches(&path));
            }
        }
    }
}
