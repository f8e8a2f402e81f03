//! What several test files share.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};

use phalanx_data::formats::{self, DatasetSpec};
use phalanx_data::{ChatTemplate, Conversation, DataOptions, Sample, Tokenizer};
use serde_json::Value;

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_dir(fixtures().join(name)).unwrap()
}

/// Options that read the fixtures' data folder, with a fixed day.
pub fn options(dataset: &[&str]) -> DataOptions {
    DataOptions {
        dataset: dataset.iter().map(|s| s.to_string()).collect(),
        dataset_dir: fixtures().join("data"),
        template_date: Some("2024-07-26".into()),
        cutoff_len: 4096,
        ..DataOptions::default()
    }
}

pub fn json_lines(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(fixtures().join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The conversations that the golden files speak of, read as OpenAI messages.
pub fn conversation(name: &str) -> Conversation {
    let text = std::fs::read_to_string(fixtures().join("conversations.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    chat(&all[name])
}

pub fn openai_spec() -> DatasetSpec {
    formats::resolve("openai_tiny", &options(&["openai_tiny"])).unwrap()
}

pub fn chat(record: &Value) -> Conversation {
    match formats::convert(&openai_spec(), record).unwrap() {
        Sample::Chat(conversation) => conversation,
        Sample::Text(_) => panic!("a text"),
    }
}

/// A template by the name that the golden files give it.
pub fn template(name: &str, tokenizer: &Tokenizer, options: &DataOptions) -> ChatTemplate {
    match name.strip_prefix("builtin:") {
        Some(builtin) => {
            let options = DataOptions { template: Some(builtin.into()), ..options.clone() };
            ChatTemplate::choose(tokenizer, &options).unwrap().0
        }
        None => {
            let path = fixtures().join(format!("templates/{name}.jinja"));
            let source = std::fs::read_to_string(path).unwrap();
            ChatTemplate::from_source(name, &source, tokenizer, options).unwrap()
        }
    }
}

/// A folder for one test, removed at its end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("phalanx-data-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
