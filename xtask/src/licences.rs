//! What comes in with the packages of others: licences, reasons, C code, number.

use std::collections::BTreeSet;
use std::path::Path;

use crate::metadata::Package;
use crate::{Faults, Result};

/// Permissive licences: they ask for their notice, and no more.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Packages that build C code (or find C libraries).
const C_BUILDERS: &[&str] = &["cc", "cmake", "bindgen", "pkg-config", "nasm-rs", "vcpkg"];

/// Packages that name a C builder and do not use it as they are built here.
const C_UNUSED: &[(&str, &str)] =
    &[("blake3", "its feature `pure` builds no C"), ("iana-time-zone-haiku", "only for the system Haiku")];

/// The most packages the lock file may hold.
const MOST_PACKAGES: usize = 230;

/// Checks all locked packages.
pub fn check(packages: &[Package], root: &Path) -> Result<Faults> {
    let mut faults = vec![];
    let others = || packages.iter().filter(|p| !p.ours);
    for p in others() {
        if !allowed(&p.licence) {
            let licence = if p.licence.is_empty() { "none named" } else { &p.licence };
            faults.push(format!("{} {}: licence not allowed: {licence}; use another package", p.name, p.version));
        }
        let c = packages.iter().filter(|b| C_BUILDERS.contains(&b.name.as_str()) && p.built_with.contains(&b.id));
        for builder in c.filter(|_| !C_UNUSED.iter().any(|(name, _)| *name == p.name)) {
            let mend = "turn its feature off, or use another package";
            faults.push(format!("{} {}: builds C code with `{}`; {mend}", p.name, p.version, builder.name));
        }
    }
    let count = others().count();
    if count > MOST_PACKAGES {
        faults.push(format!("{count} packages in Cargo.lock, {MOST_PACKAGES} is the limit; take one out"));
    }
    let path = root.join("docs/dependencies.md");
    let page = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    faults.extend(reasons(packages, &page));
    println!("licences: {count} packages of others");
    Ok(faults)
}

/// Every package that one of ours names has a line `- name: why this one`, and every line has its package.
fn reasons(packages: &[Package], page: &str) -> Faults {
    let named: BTreeSet<&str> = packages
        .iter()
        .filter(|p| p.ours)
        .flat_map(|p| &p.dependencies)
        .filter(|d| !d.ours)
        .map(|d| d.name.as_str())
        .collect();
    let explained: BTreeSet<&str> =
        page.lines().filter_map(|l| l.strip_prefix("- ")?.split_once(':')).map(|(name, _)| name.trim()).collect();
    let missing = named.difference(&explained);
    let extra = explained.difference(&named);
    missing
        .map(|n| format!("docs/dependencies.md does not say why `{n}`; add a line `- {n}: why this one`"))
        .chain(extra.map(|n| format!("docs/dependencies.md explains `{n}`, which nothing uses; remove the line")))
        .collect()
}

/// Whether an SPDX expression leaves an allowed choice: `OR` (or the old `/`) needs one side, `AND` both. `AND` binds
/// tighter than `OR`; brackets as usual.
fn allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &tokens[..];
    let outcome = any(&mut rest);
    outcome && rest.is_empty()
}

fn any(tokens: &mut &[&str]) -> bool {
    let mut outcome = all(tokens);
    while let ["OR", rest @ ..] = tokens {
        *tokens = rest;
        outcome |= all(tokens);
    }
    outcome
}

fn all(tokens: &mut &[&str]) -> bool {
    let mut outcome = one(tokens);
    while let ["AND", rest @ ..] = tokens {
        *tokens = rest;
        outcome &= one(tokens);
    }
    outcome
}

fn one(tokens: &mut &[&str]) -> bool {
    match tokens {
        ["(", rest @ ..] => {
            *tokens = rest;
            let outcome = any(tokens);
            if let [")", rest @ ..] = tokens {
                *tokens = rest;
                return outcome;
            }
            false
        }
        [id, "WITH", exception, rest @ ..] => {
            let full = format!("{id} WITH {exception}");
            *tokens = rest;
            ALLOWED.contains(&full.as_str())
        }
        [id, rest @ ..] => {
            let outcome = ALLOWED.contains(id);
            *tokens = rest;
            outcome
        }
        [] => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Dependency;

    #[test]
    fn spdx_expressions() {
        for ok in [
            "MIT",
            "MIT/Apache-2.0",
            "MIT OR GPL-3.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
            "MIT OR GPL-2.0 AND GPL-3.0",
        ] {
            assert!(allowed(ok), "{ok}");
        }
        for no in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND MPL-2.0", "MIT MIT", "(MIT"] {
            assert!(!allowed(no), "{no}");
        }
    }

    #[test]
    fn every_direct_dependency_has_a_reason() {
        let dependency = |name: &str, ours| Dependency { name: name.into(), ours, dev: false };
        let ours = Package {
            ours: true,
            dependencies: vec![dependency("half", false), dependency("png", false), dependency("phalanx-nn", true)],
            ..Package::default()
        };
        let faults = reasons(&[ours], "# Why\n- half: bits\n- gone: nothing\n");
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].contains("`png`") && faults[1].contains("`gone`"), "{faults:?}");
    }
}
