//! For any input: nothing panics, and training shows what inference produces.

mod common;

use std::sync::OnceLock;

use common::{Folder, fixtures, options, template, tokenizer};
use phalanx_data::{
    ChatTemplate, Conversation, DataOptions, EncodeStats, Encoder, Message, Role, Sample, Stage, Tokenizer, formats,
};
use proptest::prelude::*;

/// Tokenizers whose templates mark the border of an answer, each with several templates.
fn pairs() -> &'static Vec<(Tokenizer, Vec<ChatTemplate>)> {
    static PAIRS: OnceLock<Vec<(Tokenizer, Vec<ChatTemplate>)>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let of = |name: &str, templates: &[&str]| {
            let tokenizer = tokenizer(name);
            let templates = templates.iter().map(|t| template(t, &tokenizer, &options(&["-"]))).collect();
            (tokenizer, templates)
        };
        vec![
            of(
                "tiny-chatml",
                &["chatml", "tools_like_qwen25", "thinking_like_qwen3", "generation_marks", "builtin:qwen3"],
            ),
            of("tiny-llama3", &["dated_like_llama31", "builtin:llama3"]),
        ]
    })
}

/// Words, spaces, line feeds, marks and special tokens in any order.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z0-9 .,'\n\t]{1,12}",
        "\\PC{1,4}",
        prop::sample::select(
            ["\n\n", "  ", "<|im_end|>", "<|eot_id|>", "</think>", "{{ x }}", "e\u{301}", "\u{301}", "👩‍👧", "\r\n"]
                .to_vec()
        )
        .prop_map(String::from),
    ];
    prop::collection::vec(piece, 1..6)
        .prop_map(|pieces| pieces.concat())
        .prop_filter("not blank", |t| !t.trim().is_empty())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn an_example_is_the_prompt_and_what_follows(question in text(), answer in text(), pick: prop::sample::Index) {
        for (tokenizer, templates) in pairs() {
            let template = pick.get(templates);
            let options = options(&["-"]);
            let encoder = Encoder::new(tokenizer, Some(template), &options).unwrap();
            let mut chat = Conversation::user(question.as_str());
            let prompt = template.prompt_ids(tokenizer, &chat).unwrap();
            chat.messages.push(Message::new(Role::Assistant, answer.as_str()));
            let mut stats = EncodeStats::default();
            let examples = encoder.encode(&Sample::Chat(chat), &mut stats).unwrap();
            prop_assert_eq!(examples.len(), 1);
            let example = &examples[0];
            prop_assert!(example.ids.starts_with(&prompt), "{}", template.name());
            let trained: Vec<bool> = (0..example.ids.len()).map(|t| t >= prompt.len()).collect();
            prop_assert_eq!(&example.trained, &trained, "{}", template.name());
            prop_assert!(encoder.stop_ids().contains(example.ids.last().unwrap()));
        }
    }

    #[test]
    fn streamed_text_is_the_whole_text(text in text()) {
        for name in ["tiny-chatml", "tiny-llama3", "tiny-mistral"] {
            let tokenizer = tokenizer(name);
            let ids = tokenizer.encode(&text).unwrap();
            let mut decoder = tokenizer.stream_decoder(false);
            let mut pieces = String::new();
            for id in &ids {
                pieces += &decoder.push(*id).unwrap();
            }
            pieces += &decoder.finish().unwrap();
            prop_assert_eq!(pieces, tokenizer.decode(&ids, false).unwrap());
        }
    }

    #[test]
    fn any_bytes_in_a_file_are_records_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), ending in 0usize..4) {
        let folder = Folder::new("bytes");
        let path = folder.write(&format!("x.{}", ["json", "jsonl", "parquet", "txt"][ending]), bytes);
        try_reading(&path);
    }

    #[test]
    fn damaged_files_are_records_or_an_error(at: prop::sample::Index, value: u8, cut: prop::sample::Index, file in 0usize..6) {
        let name = ["table_tiny.parquet", "table_tiny_gzip.parquet", "table_tiny_lz4.parquet", "alpaca_tiny.json",
            "openai_tiny.jsonl", "sharegpt_tiny.json"][file];
        let mut bytes = std::fs::read(fixtures().join("data").join(name)).unwrap();
        *at.get_mut(&mut bytes) = value;
        let folder = Folder::new("damage");
        try_reading(&folder.write(name, &bytes));
        bytes.truncate(cut.index(bytes.len()));
        try_reading(&folder.write(name, &bytes));
    }
}

fn try_reading(path: &str) {
    for stage in [Stage::Sft, Stage::Pt] {
        let options = DataOptions { stage, ..options(&[path]) };
        if let Ok(spec) = formats::resolve(path, &options) {
            for record in formats::records(&spec, &options) {
                let _ = record.map(|r| r.sample);
            }
        }
    }
}
