//! Which crate may use which: only those below it.

use crate::Faults;
use crate::metadata::Package;

/// The crates of `crates/`, bottom to top (docs: "The workspace"). A new crate takes its place here.
const ORDER: &[&str] = &[
    "kernels",
    "formats",
    "report",
    "config",
    "tensor",
    "autograd",
    "comm",
    "nn",
    "models",
    "parallel",
    "data",
    "train",
    "generate",
    "rl",
    "sim",
    "serve",
    "embedding",
    "demo",
    "cli",
];

/// Crates for tests only: anything may use them in tests, nothing may use them otherwise.
const TESTS_ONLY: &[&str] = &["testkit", "xtask"];

/// Checks every arrow between our crates.
pub fn check(packages: &[Package]) -> Faults {
    let mut faults = vec![];
    for package in packages.iter().filter(|p| p.ours) {
        let name = short(&package.name);
        let place = ORDER.iter().position(|o| *o == name);
        if place.is_none() && package.in_crates {
            faults.push(format!("`{name}` has no place in the order; add it to ORDER in xtask/src/deps.rs"));
            continue;
        }
        for dependency in package.dependencies.iter().filter(|d| d.ours) {
            let target = short(&dependency.name);
            if TESTS_ONLY.contains(&target) {
                if !dependency.dev {
                    faults.push(format!("`{name}` uses `{target}` outside its tests; make it a dev-dependency"));
                }
                continue;
            }
            // What serves tests only may use anything.
            let Some(place) = place else { continue };
            match ORDER.iter().position(|o| *o == target) {
                Some(other) if other < place => {}
                _ => faults.push(format!(
                    "`{name}` uses `{target}`, which is not below it; move the shared part down, or turn the arrow"
                )),
            }
        }
    }
    faults
}

fn short(name: &str) -> &str {
    name.strip_prefix("phalanx-").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Dependency;

    fn package(name: &str, uses: &[(&str, bool)]) -> Package {
        let dependencies = uses
            .iter()
            .map(|(name, dev)| Dependency { name: format!("phalanx-{name}"), dev: *dev, ours: true })
            .collect();
        Package { name: format!("phalanx-{name}"), ours: true, in_crates: true, dependencies, ..Package::default() }
    }

    #[test]
    fn arrows_point_down() {
        assert!(check(&[package("train", &[("data", false), ("kernels", false), ("testkit", true)])]).is_empty());
        let up = check(&[package("kernels", &[("tensor", false)])]);
        assert!(up.len() == 1 && up[0].contains("`kernels` uses `tensor`, which is not below it"), "{up:?}");
        // Not in tests either.
        assert_eq!(check(&[package("data", &[("train", true)])]).len(), 1);
        assert_eq!(check(&[package("nn", &[("testkit", false)])]).len(), 1);
        assert_eq!(check(&[package("novelty", &[])]).len(), 1);
    }

    #[test]
    fn this_workspace_is_in_order() {
        let faults = check(&crate::metadata::workspace().unwrap());
        assert!(faults.is_empty(), "{faults:#?}");
    }
}
