//! The configuration of the demo, `demo.yaml`: an ordinary file, with the folder and the wishes of this run written into it.

use std::path::Path;

use phalanx_config::Config;
use serde_json::{Value, json};

use crate::error::Result;

/// The configuration as text, for the folder `phalanx-demo`.
pub const DEMO_YAML: &str = include_str!("../demo.yaml");

/// Keys to write into the configuration in place of what stands there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes {
    entries: Vec<(String, Value)>,
}

impl Changes {
    /// The paths of a demo that lies in `dir`.
    pub fn for_folder(dir: &Path) -> Changes {
        if dir == Path::new("phalanx-demo") || dir == Path::new("./phalanx-demo") {
            return Changes::default();
        }
        let path = |name: &str| json!(dir.join(name).display().to_string());
        let mut changes = Changes::default();
        changes.set("tokenizer_name_or_path", path("tokenizer"));
        changes.set("dataset_dir", json!(dir.display().to_string()));
        changes.set("output_dir", path("model"));
        changes
    }

    /// Sets one key.
    pub fn set(&mut self, key: impl Into<String>, value: Value) {
        self.entries.push((key.into(), value));
    }

    /// `text` with the changes: a top-level `key: value`, with the indented lines below it, is replaced; a key that is not there is
    /// added at the end. JSON is YAML.
    pub fn apply(&self, text: &str) -> String {
        let mut lines: Vec<String> = text.lines().map(String::from).collect();
        for (key, value) in &self.entries {
            let new = format!("{key}: {value}");
            let found =
                lines.iter().position(|l| l.strip_prefix(key.as_str()).is_some_and(|rest| rest.starts_with(':')));
            let Some(at) = found else {
                lines.push(new);
                continue;
            };
            let below = lines[at + 1..].iter().take_while(|l| l.starts_with(' ')).count();
            lines.splice(at..=at + below, [new]);
        }
        lines.join("\n") + "\n"
    }
}

/// Reads a configuration text of the demo; `path` is where it stands or will stand.
///
/// # Errors
/// What the configuration crate finds.
pub fn parse(text: &str, path: &Path) -> Result<Config> {
    Ok(Config::parse(text, &path.display().to_string(), &[])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_and_its_copy_for_users_are_the_same_and_sound() {
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/demo.yaml");
        assert_eq!(std::fs::read_to_string(example).unwrap(), DEMO_YAML, "cp crates/demo/demo.yaml examples/demo.yaml");
        let config = parse(DEMO_YAML, Path::new("demo.yaml")).unwrap();
        assert!(config.notes().is_empty(), "{:?}", config.notes());
        assert_eq!(Changes::for_folder(Path::new("phalanx-demo")).apply(DEMO_YAML), DEMO_YAML);
    }

    #[test]
    fn any_folder_name_comes_back_as_it_was() {
        for dir in ["out", "a b/c, d: e", "o'\"\\\t#", "ü/{x}"] {
            let mut changes = Changes::for_folder(Path::new(dir));
            changes.set("max_steps", json!(7));
            changes.set("threads", json!(3));
            let config = parse(&changes.apply(DEMO_YAML), Path::new("demo.yaml")).unwrap();
            assert_eq!(config.train.output_dir.as_deref(), Some(&*Path::new(dir).join("model")));
            assert_eq!(config.data.dataset_dir, Path::new(dir));
            assert_eq!((config.train.max_steps(), config.run.threads), (Some(7), Some(3)));
        }
    }
}
