//! Reading: each format into the common form, and bad input into errors with file, place and mend.

mod common;

use common::{Folder, fixtures, options};
use phalanx_data::formats::{self, ProblemKind};
use phalanx_data::{Conversation, DataError, DataOptions, Message, Role, Sample, Stage, TextUnit};
use serde_json::json;

fn read(options: &DataOptions, name: &str) -> Result<Vec<formats::Record>, DataError> {
    let spec = formats::resolve(name, options)?;
    formats::records(&spec, options).collect()
}

fn chats(name: &str) -> Vec<Conversation> {
    let records = read(&options(&[name]), name).unwrap();
    let chat = |r: formats::Record| match r.sample {
        Ok(Sample::Chat(chat)) => Some(chat),
        _ => None,
    };
    records.into_iter().filter_map(chat).collect()
}

fn said(chat: &Conversation) -> Vec<(Role, &str, bool)> {
    chat.messages.iter().map(|m| (m.role, m.content.as_str(), m.trained)).collect()
}

#[test]
fn alpaca() {
    let read = chats("alpaca_tiny");
    assert_eq!(read.len(), 3, "the empty answer is left out");
    assert_eq!(said(&read[0]), [(Role::User, "Add\n1 and 2", false), (Role::Assistant, "3", true)]);
    assert_eq!(read[2].system.as_deref(), Some("You tell the time."));
    let turns = [
        (Role::User, "Is it late?", false),
        (Role::Assistant, "No.", true),
        (Role::User, "Early?", false),
        (Role::Assistant, "", false),
        (Role::User, "And now?", false),
        (Role::Assistant, "Noon.", true),
    ];
    assert_eq!(said(&read[2]), turns);
}

#[test]
fn sharegpt_with_a_tool() {
    let read = chats("sharegpt_tiny");
    let chat = &read[0];
    assert_eq!(chat.system.as_deref(), Some("Use tools."));
    assert_eq!(chat.tools[0]["type"], "function");
    assert_eq!(chat.tools[0]["function"]["name"], "get_weather");
    assert_eq!(chat.messages[1].tool_calls[0].arguments, json!({"town": "Bern"}));
    assert_eq!(chat.messages[2], Message::new(Role::Tool, "rain"));
    assert_eq!(read[1].messages.len(), 5);
}

#[test]
fn openai_messages() {
    let read = chats("openai_tiny");
    let trained: Vec<bool> = read[0].messages.iter().map(|m| m.trained).collect();
    assert_eq!(trained, [false, false, false, true, false, true], "weight 0 switches an answer off");
    let call = &read[0].messages[3].tool_calls[0];
    assert_eq!((call.id.as_deref(), call.name.as_str()), (Some("call00001"), "add"));
    assert_eq!(call.arguments, json!({"a": 1, "b": 2}), "a string of JSON becomes an object");
    assert_eq!(read[1].messages[0].content, "Two parts");
}

#[test]
fn texts() {
    let pt = |name: &str, unit| {
        let options = DataOptions { stage: Stage::Pt, text_unit: unit, ..options(&[name]) };
        let texts = read(&options, name).unwrap().into_iter().map(|r| (r.sample, r.place.to_string()));
        texts.map(|(s, place)| (s.ok(), place)).collect::<Vec<_>>()
    };
    assert_eq!(
        pt("text_tiny", TextUnit::File)[1],
        (Some(Sample::Text("Second text, a little longer.".into())), "2".into())
    );
    assert_eq!(pt("text_tiny", TextUnit::File)[2], (None, "3".into()), "nothing but spaces");
    assert_eq!(pt("tale", TextUnit::File).len(), 1);
    assert_eq!(pt("tale", TextUnit::Line).len(), 6);
    let paragraphs = pt("tale", TextUnit::Paragraph);
    assert_eq!(paragraphs.len(), 3);
    assert_eq!(
        paragraphs[1].0,
        Some(Sample::Text("The book was about numbers.\nOne, two, three, four,\nand so on.".into()))
    );
    assert_eq!(paragraphs[1].1, "4");
}

#[cfg(feature = "parquet")]
#[test]
fn parquet_in_every_codec() {
    for name in ["table_tiny", "table_tiny_gzip.parquet", "table_tiny_lz4.parquet"] {
        let read = chats(name);
        assert_eq!(read.len(), 5, "{name}");
        assert_eq!(said(&read[4]), [(Role::User, "What is 4+1?", false), (Role::Assistant, "5", true)]);
    }
    let refused = read(&options(&["-"]), "table_tiny_zstd.parquet").unwrap_err().to_string();
    assert!(refused.contains("ZSTD") && refused.contains("snappy"), "{refused}");
    let folder = Folder::new("parquet");
    let whole = std::fs::read(fixtures().join("data/table_tiny.parquet")).unwrap();
    for (cut, name) in [(whole.len() / 2, "half.parquet"), (0, "empty.parquet"), (whole.len() - 1, "almost.parquet")] {
        let path = folder.write(name, &whole[..cut]);
        let error = read(&options(&["-"]), &path).unwrap_err().to_string();
        assert!(error.contains("not a readable Parquet file"), "{error}");
    }
}

#[test]
fn files_without_dataset_info_are_recognised() {
    let folder = Folder::new("detect");
    for (name, text, shape) in [
        ("a.jsonl", r#"{"question": "q", "answer": "a"}"#, "alpaca with question -> answer"),
        ("b.json", r#"[{"instruction": "q", "input": "", "output": "a"}]"#, "alpaca with instruction -> output"),
        (
            "c.json",
            r#"[{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]"#,
            "sharegpt",
        ),
        (
            "d.jsonl",
            r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
            "OpenAI",
        ),
        // JSON lines under the name of an array.
        (
            "e.json",
            "{\"prompt\": \"q\", \"response\": \"a\"}\n{\"prompt\": \"q\", \"response\": \"a\"}\n",
            "alpaca with prompt",
        ),
    ] {
        let path = folder.write(name, text);
        let spec = formats::resolve(&path, &options(&[&path])).unwrap();
        assert!(spec.notes[0].contains(shape), "{:?}", spec.notes);
        let read = chats(&path);
        assert_eq!(said(&read[0]), [(Role::User, "q", false), (Role::Assistant, "a", true)], "{name}");
    }
    let path = folder.write("strange.jsonl", r#"{"foo": 1, "bar": 2}"#);
    let error = formats::resolve(&path, &options(&[&path])).unwrap_err().to_string();
    assert!(error.contains("strange.jsonl:1") && error.contains("foo, bar"), "{error}");
}

#[test]
fn every_file_of_a_folder_is_read() {
    let folder = Folder::new("folder");
    folder.write("2.jsonl", r#"{"text": "b"}"#);
    folder.write("1.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \"a2\"}");
    let name = folder.0.display().to_string();
    let options = DataOptions { stage: Stage::Pt, ..options(&[&name]) };
    let places: Vec<_> = read(&options, &name).unwrap().iter().map(|r| r.place.to_string()).collect();
    assert_eq!(places, ["1", "3", "1"]);
    folder.write("3.txt", "c");
    let error = formats::resolve(&name, &options).unwrap_err().to_string();
    assert!(error.contains("mixes file types"), "{error}");
}

#[test]
fn a_broken_line_is_named() {
    let folder = Folder::new("broken");
    let good = r#"{"question": "q", "answer": "a"}"#;
    for (bad, what) in [
        ("{\"question\": \"q\", ", "broken JSON at column"),
        ("{\"question\": \"q\"} x", "broken JSON at column"),
        ("not json", "broken JSON at column"),
        ("{\"question\": \"\u{1}\"}", "control character"),
    ] {
        let path = folder.write("lines.jsonl", format!("{good}\n\n{bad}\n{good}\n"));
        let error = read(&options(&["-"]), &path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{path}:3: ")) && error.contains(what), "{error}");
    }
    let path = folder.write("lines.jsonl", b"{\"question\": \"\xff\", \"answer\": \"a\"}");
    assert!(read(&options(&["-"]), &path).unwrap_err().to_string().contains("lines.jsonl:1"));
    let path = folder.write("array.json", "[{\"question\": \"q\", \"answer\": \"a\"},\n{\"question\": ]");
    assert!(read(&options(&["-"]), &path).unwrap_err().to_string().contains("array.json:2"));
    let path = folder.write("latin1.txt", b"one\ntwo \xe9\n");
    let options = DataOptions { stage: Stage::Pt, ..options(&["-"]) };
    assert!(read(&options, &path).unwrap_err().to_string().contains("latin1.txt:2: not valid UTF-8"));
}

#[test]
fn problems_have_kinds_and_words() {
    let spec = common::openai_spec();
    for (record, kind, word) in [
        (json!({"messages": [{"role": "usr", "content": "q"}]}), ProblemKind::UnknownRole, "did you mean \"user\""),
        (json!({"messages": [{"content": "q"}]}), ProblemKind::MissingField, "role_tag"),
        (json!({"message": []}), ProblemKind::MissingField, "no field \"messages\" (there are: message)"),
        (json!({"messages": "x"}), ProblemKind::WrongType, "must be a list"),
        (json!({"messages": [{"role": "user", "content": 7}]}), ProblemKind::WrongType, "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": "q"}]}), ProblemKind::EmptyAnswer, "no answer"),
        (json!({"messages": [{"role": "assistant", "content": " "}]}), ProblemKind::EmptyAnswer, "no answer"),
        (json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}), ProblemKind::BadToolCall, "name"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}),
            ProblemKind::NotText,
            "image_url",
        ),
        (json!([1]), ProblemKind::WrongType, "object"),
    ] {
        let problem = formats::convert(&spec, &record).unwrap_err();
        assert_eq!(problem.kind, kind, "{record}");
        assert!(problem.detail.contains(word), "{}", problem.detail);
    }
}

#[test]
fn data_sets_that_cannot_be_used_say_why() {
    for (name, words) in [
        ("alpaca_tny", &["did you mean \"alpaca_tiny\""][..]),
        ("zzzzzzzzz", &["neither a file nor in", "alpaca_tiny"]),
        ("preference_tiny", &["preference data", "train_on_chosen: true"]),
        ("remote", &["somebody/something", "file_name"]),
        ("typo", &["formating"]),
    ] {
        let error = formats::resolve(name, &options(&[name])).unwrap_err().to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{name}: {error}");
    }
    let chosen = DataOptions { train_on_chosen: true, ..options(&["preference_tiny"]) };
    let records = read(&chosen, "preference_tiny").unwrap();
    let Ok(Sample::Chat(chat)) = &records[0].sample else { panic!() };
    assert_eq!(said(chat), [(Role::User, "Which?", false), (Role::Assistant, "The good one.", true)]);
}
