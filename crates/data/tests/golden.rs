//! Against `transformers`: the text of every template, the ids of every text, and what is trained.

mod common;

use common::{conversation, json_lines, options, template, tokenizer};
use phalanx_data::{Conversation, DataError, EncodeStats, Encoder, Role, Sample};
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
fn tokenizers_give_the_ids_of_python() {
    for case in json_lines("golden_tokens.jsonl") {
        let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
        let text = case["text"].as_str().unwrap();
        let got = tokenizer.encode(text).unwrap();
        assert_eq!(got, ids(&case["ids"]), "{case}");
        assert_eq!(tokenizer.encode_plain(text).unwrap(), ids(&case["with_special"]), "{case}");
        assert_eq!(tokenizer.decode(&got, false).unwrap(), case["decoded"].as_str().unwrap(), "{case}");
        let mut stream = tokenizer.stream_decoder(false);
        let mut pieces: String = got.iter().map(|id| stream.push(*id).unwrap()).collect();
        pieces += &stream.finish().unwrap();
        assert_eq!(pieces, case["decoded"].as_str().unwrap(), "streamed: {case}");
    }
}

#[test]
fn templates_print_what_transformers_prints() {
    let mut compared = 0;
    for case in json_lines("golden_text.jsonl") {
        let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
        let mut options = options(&["-"]);
        options.enable_thinking = case["enable_thinking"].as_bool();
        let template = template(case["template"].as_str().unwrap(), &tokenizer, &options);
        let whole = conversation(case["conversation"].as_str().unwrap());
        let head = whole.prefix(whole.messages.len() - 1);
        for (part, conversation, prompt) in [("whole", &whole, false), ("prompt", &head, true)] {
            let got = template.render(conversation, prompt);
            let at = format!("{} {} {part}", case["template"], case["conversation"]);
            match (&case[part], got) {
                (Value::String(want), Ok(got)) => assert_eq!(&got, want, "{at}"),
                (want, Err(DataError::Template { detail, .. })) => {
                    let message = want["error"].as_str().unwrap_or_else(|| panic!("{at}: {detail}"));
                    if let Some(raised) = detail.strip_prefix("the template refuses it: ") {
                        assert_eq!(raised, message, "{at}");
                    }
                }
                (want, got) => panic!("{at}: want {want}, got {got:?}"),
            }
            compared += 1;
        }
    }
    assert!(compared > 400, "{compared} renderings compared");
}

/// ids(train) = ids(prompt at inference) + ids(answer) + stop, and exactly answer and stop are trained: for every
/// answer of every conversation in every template, against ids that transformers made of the parts.
#[test]
fn examples_are_prompt_answer_stop() {
    let (mut answers_seen, mut merged_seen, mut rewritten_seen) = (0, 0, 0);
    for case in json_lines("golden_ids.jsonl") {
        let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
        let options = options(&["-"]);
        let name = case["template"].as_str().unwrap();
        let template = template(name, &tokenizer, &options);
        let chat = conversation(case["conversation"].as_str().unwrap());
        let encoder = Encoder::new(&tokenizer, Some(&template), &options).unwrap();
        let at = format!("{} {}", case["template"], case["conversation"]);
        let mut stats = EncodeStats::default();
        let examples = match encoder.encode(&Sample::Chat(chat.clone()), &mut stats) {
            Ok(examples) => examples,
            // A template that does not show tools prints the conversation, but must not be trained on it.
            Err(DataError::Template { detail, .. }) => {
                assert!(detail.contains("leaves out"), "{at}: {detail}");
                continue;
            }
            Err(e) => panic!("{at}: {e}"),
        };
        // The tiny tokenizer has no <end_of_turn>, so EOS stands in for it.
        if name == "builtin:gemma" {
            assert_eq!(stats.appended_eos as usize, examples.len(), "{at}");
            continue;
        }
        let positions = assistant_positions(&chat);
        assert_eq!(positions.len(), case["answers"].as_array().unwrap().len());
        let mut earlier_merged = false;
        for (i, answer) in positions.into_iter().zip(case["answers"].as_array().unwrap()) {
            // An earlier answer that was tokenised apart stands in the example as it was generated, but a whole
            // history encoded anew would merge it with its prompt: one example cannot show both.
            if answer.is_null() || earlier_merged {
                continue;
            }
            earlier_merged = answer["merged"] == true;
            let want = ids(&answer["ids"]);
            let start = answer["prompt_len"].as_u64().unwrap() as usize;
            assert_eq!(template.prompt_ids(&tokenizer, &chat.prefix(i)).unwrap(), want[..start], "{at}, prompt {i}");
            let end = match want.iter().rposition(|id| encoder.stop_ids().contains(id)).filter(|end| *end >= start) {
                Some(stop) => stop + 1,
                None => panic!("{at}: no stop token in answer {i}"),
            };
            let holding = examples.iter().filter(|e| {
                e.ids.starts_with(&want[..end])
                    && e.trained[start..end].iter().all(|t| *t)
                    && !e.trained[start - 1]
                    && e.trained.get(end) != Some(&true)
            });
            assert_eq!(holding.count(), 1, "{at}, answer {i}: {:?}", tokenizer.decode(&want, false));
            answers_seen += 1;
            merged_seen += usize::from(answer["merged"] == true);
            rewritten_seen += usize::from(answer["kept"] == false);
        }
        for example in &examples {
            assert!(encoder.stop_ids().contains(example.ids.last().unwrap()), "{at}: ends with no stop token");
            assert_eq!(example.trained.last(), Some(&true), "{at}: the stop token is not trained");
            if let Some(bos) = tokenizer.bos().filter(|_| name != "builtin:llama2") {
                assert!(example.ids.iter().filter(|id| **id == bos).count() <= 1, "{at}: BOS is doubled");
            }
        }
    }
    assert!(
        answers_seen > 200 && merged_seen > 3 && rewritten_seen >= 5,
        "{answers_seen} {merged_seen} {rewritten_seen}"
    );
}

fn assistant_positions(chat: &Conversation) -> Vec<usize> {
    let messages = chat.messages.iter().enumerate();
    messages.filter(|(_, m)| m.role == Role::Assistant).map(|(i, _)| i).collect()
}

#[test]
fn streamed_text_waits_for_whole_characters() {
    let tokenizer = tokenizer("tiny-chatml");
    let ids = tokenizer.encode("a👋🏽\u{fffd}\u{fffd}𝀀好").unwrap();
    let mut stream = tokenizer.stream_decoder(false);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).filter(|p| !p.is_empty()).collect();
    assert_eq!(pieces, ["a", "👋", "🏽", "\u{fffd}\u{fffd}𝀀", "好"]);
    assert_eq!(stream.finish().unwrap(), "");
    // Half a character at the end.
    let mut stream = tokenizer.stream_decoder(false);
    for id in &ids[..3] {
        stream.push(*id).unwrap();
    }
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
}
