//! Comparing the tensors that a model needs with those that a file holds, and saying all that differs at once.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// At most this many names of each kind are printed; the rest is counted.
const SHOWN: usize = 10;

/// All differences between the tensors that were expected and those found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamesDiffer {
    /// Folder or file.
    pub place: PathBuf,
    /// Expected, not found.
    pub missing: Vec<String>,
    /// Found, not expected (and not ignorable).
    pub unexpected: Vec<String>,
    /// Found with another shape.
    pub mis_shaped: Vec<MisShaped>,
}

/// A tensor whose shape is not the expected one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MisShaped {
    /// The tensor.
    pub name: String,
    /// Shape that the model needs.
    pub expected: Vec<usize>,
    /// Shape in the file.
    pub found: Vec<usize>,
}

impl fmt::Display for NamesDiffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the weights do not fit the model", self.place.display())?;
        if !self.missing.is_empty() {
            write!(f, "\n  {} missing:", self.missing.len())?;
            for name in self.missing.iter().take(SHOWN) {
                let near = nearest(name, self.unexpected.iter().map(String::as_str), 1);
                match near.first() {
                    Some(near) => write!(f, "\n    {name} (the file has `{near}`)")?,
                    None => write!(f, "\n    {name}")?,
                }
            }
            and_more(f, self.missing.len())?;
        }
        if !self.unexpected.is_empty() {
            write!(f, "\n  {} unexpected:", self.unexpected.len())?;
            for name in self.unexpected.iter().take(SHOWN) {
                write!(f, "\n    {name}")?;
            }
            and_more(f, self.unexpected.len())?;
        }
        if !self.mis_shaped.is_empty() {
            write!(f, "\n  {} with another shape:", self.mis_shaped.len())?;
            for m in self.mis_shaped.iter().take(SHOWN) {
                write!(f, "\n    {}: the model needs {:?}, the file has {:?}", m.name, m.expected, m.found)?;
            }
            and_more(f, self.mis_shaped.len())?;
        }
        write!(f, "\n  check that weights and configuration are of the same model")
    }
}

impl std::error::Error for NamesDiffer {}

fn and_more(f: &mut fmt::Formatter<'_>, total: usize) -> fmt::Result {
    if total > SHOWN { write!(f, "\n    ... and {} more", total - SHOWN) } else { Ok(()) }
}

/// Compares `found` with `expected`; names matching one of the patterns `ignorable` may be there, unexpected.
pub(crate) fn compare(
    place: PathBuf,
    found: &BTreeMap<&str, &[usize]>,
    expected: &[(String, Vec<usize>)],
    ignorable: &[&str],
) -> Result<(), Box<NamesDiffer>> {
    let mut report = NamesDiffer { place, missing: vec![], unexpected: vec![], mis_shaped: vec![] };
    let mut wanted = BTreeMap::new();
    for (name, shape) in expected {
        wanted.insert(name.as_str(), ());
        match found.get(name.as_str()) {
            None => report.missing.push(name.clone()),
            Some(&s) if s != shape.as_slice() => {
                report.mis_shaped.push(MisShaped { name: name.clone(), expected: shape.clone(), found: s.to_vec() });
            }
            Some(_) => {}
        }
    }
    report.unexpected.extend(
        found
            .keys()
            .filter(|n| !wanted.contains_key(*n) && !ignorable.iter().any(|p| matches_pattern(p, n)))
            .map(|n| n.to_string()),
    );
    if report.missing.is_empty() && report.unexpected.is_empty() && report.mis_shaped.is_empty() {
        Ok(())
    } else {
        Err(Box::new(report))
    }
}

/// Whether `name` matches `pattern`, in which each `*` stands for any run of characters (dots too).
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// The up to `n` candidates most like `name`, best first; those that differ in more than a third are left out.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>, n: usize) -> Vec<String> {
    let limit = name.chars().count().div_ceil(3);
    let mut scored: Vec<(usize, &str)> = candidates
        .into_iter()
        .map(|c| (strsim::levenshtein(name, c), c))
        // A prefix more or less (`model.`, `base_model.`) is the commonest difference, however long it is.
        .map(
            |(d, c)| if !c.is_empty() && (c.ends_with(name) || name.ends_with(c)) { (d.min(limit), c) } else { (d, c) },
        )
        .filter(|&(d, _)| d <= limit)
        .collect();
    scored.sort();
    scored.into_iter().take(n).map(|(_, c)| c.to_string()).collect()
}

/// " (did you mean `a`, `b`?)", or nothing.
pub(crate) fn did_you_mean(nearest: &[String]) -> String {
    if nearest.is_empty() {
        return String::new();
    }
    let quoted: Vec<String> = nearest.iter().map(|n| format!("`{n}`")).collect();
    format!(" (did you mean {}?)", quoted.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert!(matches_pattern("*.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"));
        assert!(matches_pattern("model.*.a.*", "model.x.a.b"));
        assert!(matches_pattern("lm_head.weight", "lm_head.weight"));
        assert!(matches_pattern("*", ""));
        assert!(matches_pattern("a*a", "aa"));
        assert!(!matches_pattern("a*a", "a"));
        assert!(!matches_pattern("lm_head", "lm_head.weight"));
        assert!(!matches_pattern("*.b*.c", "x.b.d"));
    }

    #[test]
    fn nearest_names() {
        let have = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"];
        assert_eq!(nearest("model.norms.weight", have, 1), ["model.norm.weight"]);
        assert_eq!(nearest("embed_tokens.weight", have, 1), ["model.embed_tokens.weight"]);
        assert!(nearest("quite.another", have, 3).is_empty());
        assert_eq!(strsim::levenshtein("kitten", "sitting"), 3);
    }

    #[test]
    fn a_report_names_everything() {
        let found: BTreeMap<&str, &[usize]> =
            BTreeMap::from([("a", &[2usize, 3] as &[usize]), ("model.b", &[4]), ("x.inv_freq", &[1])]);
        let expected = vec![("a".to_string(), vec![3, 2]), ("b".to_string(), vec![4])];
        let e = compare("dir".into(), &found, &expected, &["*.inv_freq"]).unwrap_err();
        assert_eq!(
            e.to_string(),
            "dir: the weights do not fit the model\n  1 missing:\n    b (the file has `model.b`)\n  1 unexpected:\n    \
             model.b\n  1 with another shape:\n    a: the model needs [3, 2], the file has [2, 3]\n  check that \
             weights and configuration are of the same model"
        );
        assert!(compare("dir".into(), &found, &[("a".into(), vec![2, 3])], &["*"]).is_ok());
    }
}
