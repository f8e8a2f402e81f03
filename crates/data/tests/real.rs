//! Real tokenizers, templates and conversations against `transformers`.
//!
//! They are too big for the repository. `tests/real_oracle.py` says how to make the folder; the test runs when the
//! environment variable `PHALANX_DATA_DIR` names it.

mod common;

use std::io::BufRead;
use std::path::PathBuf;

use common::{chat, options};
use phalanx_data::{ChatTemplate, EncodeStats, Encoder, Sample, Tokenizer};
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test has no one who could pass the folder on")]
fn real_tokenizers_and_templates() {
    let Some(root) = std::env::var_os("PHALANX_DATA_DIR").map(PathBuf::from) else {
        eprintln!("skipped: PHALANX_DATA_DIR is not set; see tests/real_oracle.py");
        return;
    };
    let options = options(&["-"]);
    let mut loaded: Vec<(String, Tokenizer, ChatTemplate)> = Vec::new();
    let mut counts = std::collections::BTreeMap::<(String, &str), usize>::new();
    let file = std::fs::File::open(root.join("oracle.jsonl")).unwrap();
    for line in std::io::BufReader::new(file).lines() {
        let case: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let model = case["model"].as_str().unwrap();
        if loaded.last().is_none_or(|(name, ..)| name != model) {
            let tokenizer = Tokenizer::from_dir(root.join(model)).unwrap();
            let (template, notes) = ChatTemplate::choose(&tokenizer, &options).unwrap();
            assert!(notes.is_empty());
            loaded.push((model.into(), tokenizer, template));
        }
        let (_, tokenizer, template) = loaded.last().unwrap();
        let mut count = |what| *counts.entry((model.into(), what)).or_default() += 1;
        if let Some(text) = case["text"].as_str() {
            assert_eq!(tokenizer.encode(text).unwrap(), ids(&case["ids"]), "{model}: {text:?}");
            count("texts");
            continue;
        }
        let chat = chat(&case["chat"]);
        assert_eq!(template.render(&chat, false).unwrap(), case["whole"].as_str().unwrap());
        count("conversations");
        let encoder = Encoder::new(tokenizer, Some(template), &options).unwrap();
        let mut stats = EncodeStats::default();
        let examples = encoder.encode(&Sample::Chat(chat), &mut stats).unwrap();
        let mut earlier_merged = false;
        for answer in case["answers"].as_array().unwrap() {
            if answer.is_null() || answer["merged"] == true || earlier_merged {
                earlier_merged = true;
                count("answers whose border merges");
                continue;
            }
            let (want, start) = (ids(&answer["ids"]), answer["prompt_len"].as_u64().unwrap() as usize);
            let end = 1 + want.iter().rposition(|id| encoder.stop_ids().contains(id)).unwrap();
            if end > options.cutoff_len {
                continue;
            }
            let holding = examples.iter().filter(|e| {
                e.ids.starts_with(&want[..end])
                    && e.trained[start..end].iter().all(|t| *t)
                    && !e.trained[start - 1]
                    && e.trained.get(end) != Some(&true)
            });
            assert_eq!(holding.count(), 1, "{model}: {:?}", tokenizer.decode(&want, false));
            count("answers");
        }
    }
    eprintln!("{counts:?}");
    assert!(!counts.is_empty());
}
