//! The workspace as `cargo metadata` tells it.

use std::path::PathBuf;

use serde_json::Value;

use crate::{Result, run};

/// A package of the workspace or of the lock file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Package {
    /// Its id, unique in the lock file.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its licence, an SPDX expression; empty where it names none.
    pub licence: String,
    /// Whether it belongs to this workspace.
    pub ours: bool,
    /// Whether its manifest lies in `crates/`.
    pub in_crates: bool,
    /// What its manifest asks for.
    pub dependencies: Vec<Dependency>,
    /// Ids of the packages it is really built with, for any platform, its tests left out.
    pub built_with: Vec<String>,
}

/// A line of a manifest's dependency table.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dependency {
    /// The package's name.
    pub name: String,
    /// Only for tests, examples and benchmarks.
    pub dev: bool,
    /// Lies in this workspace.
    pub ours: bool,
}

/// The packages of this workspace, as their manifests stand (the lock file and the network are not needed).
pub fn workspace() -> Result<Vec<Package>> {
    parse(&run::output(&["metadata", "--format-version", "1", "--no-deps", "--offline"])?)
}

/// All packages of the lock file.
pub fn locked() -> Result<Vec<Package>> {
    parse(&run::output(&["metadata", "--format-version", "1", "--locked"])?)
}

/// The workspace's folder.
pub fn root() -> Result<PathBuf> {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(PathBuf::from)
        .ok_or_else(|| "xtask has no parent folder".into())
}

fn parse(text: &str) -> Result<Vec<Package>> {
    let json: Value = serde_json::from_str(text).map_err(|e| format!("cargo metadata: {e}"))?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let ours: Vec<Value> = list(&json["workspace_members"]);
    let nodes = list(&json["resolve"]["nodes"]);
    let package = |p: &Value| {
        let node = nodes.iter().find(|n| n["id"] == p["id"]).unwrap_or(&Value::Null);
        let built =
            list(&node["deps"]).into_iter().filter(|d| list(&d["dep_kinds"]).iter().any(|k| k["kind"] != "dev"));
        Package {
            id: text(&p["id"]),
            name: text(&p["name"]),
            version: text(&p["version"]),
            licence: text(&p["license"]),
            ours: ours.contains(&p["id"]),
            in_crates: text(&p["manifest_path"]).replace('\\', "/").contains("/crates/") && ours.contains(&p["id"]),
            dependencies: list(&p["dependencies"])
                .iter()
                .map(|d| Dependency { name: text(&d["name"]), dev: d["kind"] == "dev", ours: d["source"].is_null() })
                .collect(),
            built_with: built.map(|d| text(&d["pkg"])).collect(),
        }
    };
    Ok(list(&json["packages"]).iter().map(package).collect())
}
