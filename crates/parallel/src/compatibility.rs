//! Which features go together: the one table.

use std::fmt;

/// A feature that a plan can turn on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Feature {
    /// `freeze` and `train`.
    Freeze,
    /// `adapters`.
    Adapters,
    /// `precision: bf16`.
    Bf16,
    /// `arithmetic`.
    Arithmetic,
    /// `recompute`.
    Recompute,
}

impl Feature {
    /// All features in the order in which their transforms apply.
    pub const ALL: [Feature; 5] =
        [Feature::Freeze, Feature::Adapters, Feature::Bf16, Feature::Arithmetic, Feature::Recompute];
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feature::Freeze => "freeze",
            Feature::Adapters => "adapters",
            Feature::Bf16 => "precision: bf16",
            Feature::Arithmetic => "arithmetic",
            Feature::Recompute => "recompute",
        })
    }
}

/// Whether two features may meet in one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They may, on the same module too.
    Allowed,
    /// They may, but not on the same module.
    NotOnOneModule {
        /// Why.
        why: &'static str,
        /// What to do.
        mend: &'static str,
    },
}

/// A line of the table; the order of the two does not matter. A feature beside itself is about modules nested in one another.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// One feature.
    pub a: Feature,
    /// The other.
    pub b: Feature,
    /// What holds.
    pub verdict: Verdict,
}

/// The table: every pair once.
pub fn compatibility() -> &'static [Rule] {
    use Feature::{Adapters, Arithmetic, Bf16, Freeze, Recompute};
    use Verdict::{Allowed, NotOnOneModule};
    const fn rule(a: Feature, b: Feature, verdict: Verdict) -> Rule {
        Rule { a, b, verdict }
    }
    const TABLE: &[Rule] = &[
        rule(Freeze, Freeze, Allowed),
        rule(
            Freeze,
            Adapters,
            NotOnOneModule {
                why: "a weight that `train` names and an adapter on the same layer would learn the same thing twice",
                mend: "take the layer out of `train`, or out of `adapters`",
            },
        ),
        rule(Freeze, Bf16, Allowed),
        rule(Freeze, Arithmetic, Allowed),
        rule(Freeze, Recompute, Allowed),
        rule(Adapters, Adapters, Allowed),
        rule(Adapters, Bf16, Allowed),
        rule(Adapters, Arithmetic, Allowed),
        rule(Adapters, Recompute, Allowed),
        rule(Bf16, Bf16, Allowed),
        rule(Bf16, Arithmetic, Allowed),
        rule(Bf16, Recompute, Allowed),
        rule(Arithmetic, Arithmetic, Allowed),
        rule(Arithmetic, Recompute, Allowed),
        rule(
            Recompute,
            Recompute,
            NotOnOneModule {
                why: "a module inside a recomputed one would run three times",
                mend: "name either the outer or the inner module",
            },
        ),
    ];
    TABLE
}

/// The verdict on a pair.
pub(crate) fn verdict(a: Feature, b: Feature) -> Verdict {
    compatibility()
        .iter()
        .find(|r| (r.a, r.b) == (a, b) || (r.b, r.a) == (a, b))
        .map_or(Verdict::Allowed, |r| r.verdict)
}

/// `docs/compatibility.md`, made from the table.
pub fn compatibility_markdown() -> String {
    let mut out = String::from(
        "# Which features of a plan go together\n\nMade from the table in `crates/parallel/src/compatibility.rs`; a test keeps the two equal.\n\n| feature | with | verdict |\n|---|---|---|\n",
    );
    for r in compatibility() {
        let v = match r.verdict {
            Verdict::Allowed => "allowed".to_owned(),
            Verdict::NotOnOneModule { why, mend } => format!("not on one module: {why}; {mend}"),
        };
        out.push_str(&format!("| `{}` | `{}` | {v} |\n", r.a, r.b));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_stands_in_the_table_once() {
        for (i, &a) in Feature::ALL.iter().enumerate() {
            for &b in &Feature::ALL[i..] {
                let n = compatibility().iter().filter(|r| (r.a, r.b) == (a, b) || (r.b, r.a) == (a, b)).count();
                assert_eq!(n, 1, "{a} with {b}");
            }
        }
    }

    #[test]
    fn the_documentation_is_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/compatibility.md");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        assert_eq!(text, compatibility_markdown(), "write compatibility_markdown() to docs/compatibility.md");
    }
}
