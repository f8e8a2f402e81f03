//! From options to rows: what is trained, what is cut, the cache, the validation split, packing.

mod common;

use common::{Folder, chat, fixtures, options, template, tokenizer};
use phalanx_data::{
    Batch, ChatTemplate, CheckOptions, DataError, DataOptions, EncodeStats, Encoder, Example, IGNORED, MixStrategy,
    Prepared, RewrittenHistory, Sample, Stage, Stream, StreamOptions, Tokenizer, check, prepare, prepare_eval,
};
use serde_json::{Value, json};

fn prepared(options: &DataOptions) -> Result<Prepared, DataError> {
    let tokenizer = tokenizer("tiny-chatml");
    let (template, _) = ChatTemplate::choose(&tokenizer, options).unwrap();
    prepare(options, &tokenizer, Some(&template), &|_| {})
}

fn encode(options: &DataOptions, template_name: &str, record: &Value) -> (Tokenizer, Vec<Example>, EncodeStats) {
    let tokenizer = tokenizer("tiny-chatml");
    let template = template(template_name, &tokenizer, options);
    let mut stats = EncodeStats::default();
    let encoder = Encoder::new(&tokenizer, Some(&template), options).unwrap();
    let examples = encoder.encode(&Sample::Chat(chat(record)), &mut stats).unwrap();
    (tokenizer, examples, stats)
}

/// The text of the trained tokens, one string for each stretch of them.
fn trained_text(tokenizer: &Tokenizer, example: &Example) -> Vec<String> {
    let pairs: Vec<(u32, bool)> = example.ids.iter().copied().zip(example.trained.iter().copied()).collect();
    let stretches = pairs.chunk_by(|a, b| a.1 == b.1).filter(|c| c[0].1);
    stretches.map(|c| tokenizer.decode(&c.iter().map(|p| p.0).collect::<Vec<_>>(), false).unwrap()).collect()
}

fn two_turns() -> Value {
    json!({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"}, {"role": "user", "content": "five"}]})
}

#[test]
fn answers_and_their_stop_tokens_are_trained() {
    let (tokenizer, examples, _) = encode(&options(&["-"]), "chatml", &two_turns());
    assert_eq!(trained_text(&tokenizer, &examples[0]), ["two<|im_end|>", "four<|im_end|>"]);
    let text = tokenizer.decode(&examples[0].ids, false).unwrap();
    assert!(text.ends_with("four<|im_end|>"), "neither the line feed nor the open question follows: {text}");

    let last = DataOptions { mask_history: true, ..options(&["-"]) };
    let (tokenizer, examples, _) = encode(&last, "chatml", &two_turns());
    assert_eq!(trained_text(&tokenizer, &examples[0]), ["four<|im_end|>"]);

    let all = DataOptions { train_on_prompt: true, ..options(&["-"]) };
    let (_, examples, _) = encode(&all, "chatml", &two_turns());
    assert!(examples[0].trained.iter().all(|t| *t));
}

#[test]
fn rewritten_history_is_split_or_left_out() {
    let (tokenizer, examples, stats) = encode(&options(&["-"]), "thinking_like_qwen3", &two_turns());
    let trained: Vec<_> = examples.iter().map(|e| trained_text(&tokenizer, e)).collect();
    assert_eq!(trained, [["<think>\n\n</think>\n\nfour<|im_end|>"], ["<think>\n\n</think>\n\ntwo<|im_end|>"]]);
    assert_eq!(stats.split_conversations, 1);

    let last = DataOptions { rewritten_history: RewrittenHistory::LastTurn, ..options(&["-"]) };
    let (tokenizer, examples, stats) = encode(&last, "thinking_like_qwen3", &two_turns());
    assert_eq!((examples.len(), stats.untrained_answers), (1, 1));
    assert_eq!(trained_text(&tokenizer, &examples[0]), ["<think>\n\n</think>\n\nfour<|im_end|>"]);

    // Without thinking, the empty thoughts belong to the prompt and are not trained.
    let silent = DataOptions { enable_thinking: Some(false), ..options(&["-"]) };
    let (tokenizer, examples, _) = encode(&silent, "thinking_like_qwen3", &two_turns());
    assert_eq!(trained_text(&tokenizer, &examples[0]), ["four<|im_end|>"]);

    // The built-in of the same family keeps its history, so one example trains both.
    let (tokenizer, examples, _) = encode(&options(&["-"]), "builtin:qwen3", &two_turns());
    let thought = "<think>\n\n</think>\n\n";
    assert_eq!(
        trained_text(&tokenizer, &examples[0]),
        [format!("{thought}two<|im_end|>"), format!("{thought}four<|im_end|>")]
    );
}

#[test]
fn a_template_without_stop_token_gets_eos() {
    let tokenizer = tokenizer("tiny-chatml");
    let options = options(&["-"]);
    let source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}";
    let template = ChatTemplate::from_source("bare", source, &tokenizer, &options).unwrap();
    let encoder = Encoder::new(&tokenizer, Some(&template), &options).unwrap();
    let mut stats = EncodeStats::default();
    let examples = encoder.encode(&Sample::Chat(chat(&two_turns())), &mut stats).unwrap();
    assert_eq!(trained_text(&tokenizer, &examples[0]), [" two", " four<|im_end|>"]);
    assert_eq!((stats.appended_eos, stats.missing_stop), (1, 1));
}

#[test]
fn a_template_that_drops_something_is_refused() {
    let tools = json!({"tools": [{"name": "f", "parameters": {}}], "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]});
    let role = json!({"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]});
    let call = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]});
    let tokenizer = tokenizer("tiny-chatml");
    let options = options(&["-"]);
    for (name, record, words) in [
        ("chatml", &tools, "leaves out tools"),
        ("chatml", &call, "leaves out function calls"),
        (
            "builtin:fallback",
            &role,
            "cannot show messages with the role tool: the template refuses it: no place for the role tool",
        ),
    ] {
        let template = template(name, &tokenizer, &options);
        let encoder = Encoder::new(&tokenizer, Some(&template), &options).unwrap();
        let error = encoder.encode(&Sample::Chat(chat(record)), &mut EncodeStats::default()).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("template: qwen"), "{error}");
    }
}

#[test]
fn cutoff_counts_what_it_cuts() {
    let whole = prepared(&options(&["alpaca_tiny"])).unwrap();
    let full = whole.datasets[0].stats.clone();
    assert_eq!((full.records, full.empty_records, full.examples), (4, 1, 3));
    assert_eq!((full.cut_examples, full.cut_tokens), (0, 0));

    let cut = prepared(&DataOptions { cutoff_len: 70, ..options(&["alpaca_tiny"]) }).unwrap();
    let stats = &cut.datasets[0].stats;
    assert!(stats.cut_examples > 0 && stats.dropped_examples < 3, "{stats:?}");
    assert_eq!(stats.tokens + stats.cut_tokens, full.tokens, "every token is kept or counted as cut");
    assert!(cut.messages.iter().any(|m| m.contains("cutoff_len cut")), "{:?}", cut.messages);

    let error = prepared(&DataOptions { cutoff_len: 8, ..options(&["alpaca_tiny"]) }).unwrap_err().to_string();
    assert!(error.starts_with("cutoff_len: 8 tokens cut off every answer"), "{error}");
}

#[test]
fn texts_end_with_eos_and_fall_into_pieces() {
    let tokenizer = tokenizer("tiny-llama3");
    let options = DataOptions { stage: Stage::Pt, cutoff_len: 16, shuffle: false, ..options(&["tale"]) };
    let data = prepare(&options, &tokenizer, None, &|_| {}).unwrap();
    let mut stream = Stream::new(data.train.clone(), StreamOptions::in_order());
    let batch = stream.next_batch(1000).unwrap();
    assert!(batch.docs.len() >= 3 && batch.docs[0] == (0..16));
    let text = std::fs::read_to_string(fixtures().join("data/tale.txt")).unwrap();
    let mut want = tokenizer.encode_plain(&text).unwrap();
    assert_eq!(Some(want[0]), tokenizer.bos(), "BOS once, in front");
    want.push(tokenizer.eos().unwrap());
    want.truncate(batch.ids.len());
    assert_eq!(batch.ids, want);
    assert_eq!(batch.num_targets, batch.ids.len() - batch.docs.len());
}

#[test]
fn the_cache_is_used_and_mended() {
    let folder = Folder::new("cache");
    let cached = DataOptions { cache_dir: Some(folder.0.clone()), ..options(&["alpaca_tiny", "sharegpt_tiny"]) };
    let first = prepared(&cached).unwrap();
    assert!(first.datasets.iter().all(|d| !d.from_cache));
    let second = prepared(&cached).unwrap();
    assert!(second.datasets.iter().all(|d| d.from_cache));
    let batch = |data: &Prepared| Stream::new(data.train.clone(), StreamOptions::of(&cached)).next_batch(100).unwrap();
    let state = |data: &Prepared| Stream::new(data.train.clone(), StreamOptions::of(&cached)).state();
    let want = (batch(&first), state(&first));
    assert_eq!((batch(&second), state(&second)), want);
    let in_memory = prepared(&DataOptions { cache_dir: None, ..cached.clone() }).unwrap();
    assert_eq!(batch(&in_memory), want.0);

    let files: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().path()).collect();
    // Options that matter have a cache of their own; workers do not matter.
    for changed in [
        DataOptions { cutoff_len: 60, ..cached.clone() },
        DataOptions { train_on_prompt: true, ..cached.clone() },
        DataOptions { template: Some("qwen3".into()), ..cached.clone() },
        DataOptions { default_system: Some("Hm.".into()), ..cached.clone() },
    ] {
        assert!(prepared(&changed).unwrap().datasets.iter().all(|d| !d.from_cache));
    }
    let threads = DataOptions { preprocessing_num_workers: 3, ..cached.clone() };
    assert!(prepared(&threads).unwrap().datasets.iter().all(|d| d.from_cache));

    // Whatever happens to a file, the same data comes out.
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
    let broken: [Damage<'_>; 5] = [
        &|b| b.truncate(b.len() / 2),
        &|b| b.clear(),
        &|b| {
            let at = b.len() / 3;
            b[at] ^= 1
        },
        &|b| {
            let at = b.len() - 60;
            b[at] ^= 0x80
        },
        &|b| b.push(0),
    ];
    for damage in broken {
        for file in &files {
            let mut bytes = std::fs::read(file).unwrap();
            damage(&mut bytes);
            // As a new file, since a mapped one must not change in place.
            std::fs::remove_file(file).unwrap();
            std::fs::write(file, bytes).unwrap();
        }
        let again = prepared(&cached).unwrap();
        assert!(again.datasets.iter().all(|d| !d.from_cache));
        assert!(again.messages.iter().any(|m| m.contains("tokenising again")), "{:?}", again.messages);
        assert_eq!((batch(&again), state(&again)), want);
    }
    // What a killed run left is cleared away before the next cache is written.
    std::fs::write(folder.0.join(".tmp-alpaca_tiny.tokens-1"), "half").unwrap();
    prepared(&DataOptions { cutoff_len: 61, ..cached }).unwrap();
    let names: Vec<_> = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(names.iter().all(|n| n.extension().unwrap() == "tokens"), "nothing half-written is left: {names:?}");
}

/// What is wrong with the data is said as without a cache, and leaves nothing half-written.
#[test]
fn a_bad_record_is_named_where_a_cache_is_written_too() {
    let folder = Folder::new("badcache");
    let file = folder.write("bad.jsonl", "{\"question\": \"a\", \"answer\": \"b\"}\n{\"question\": \n");
    let cache = folder.0.join("cache");
    let in_memory = options(&[&file]);
    let cached = DataOptions { cache_dir: Some(cache.clone()), ..in_memory.clone() };
    let error = |o: &DataOptions| prepared(o).unwrap_err().to_string();
    assert!(error(&cached).contains("bad.jsonl:"), "{}", error(&cached));
    assert_eq!(error(&cached), error(&in_memory));
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0);
}

#[test]
fn evaluation_data_alone_is_as_beside_the_training_data() {
    let folder = Folder::new("evalalone");
    let train = numbered(&folder, "train.jsonl", 30);
    let other = numbered(&folder, "other.jsonl", 5);
    let both = DataOptions {
        eval_dataset: vec!["alpaca_tiny".into()],
        mix_strategy: MixStrategy::InterleaveOver,
        interleave_probs: Some(vec![0.9, 0.1]),
        ..options(&[&train, &other])
    };
    let tokenizer = tokenizer("tiny-chatml");
    let (template, _) = ChatTemplate::choose(&tokenizer, &both).unwrap();
    let read = std::cell::RefCell::new(std::collections::BTreeSet::new());
    let on_progress = |p: phalanx_data::Progress<'_>| {
        read.borrow_mut().insert(p.dataset.to_owned());
    };
    let (alone, _) = prepare_eval(&both, &tokenizer, Some(&template), &on_progress).unwrap();
    assert_eq!(read.into_inner().into_iter().collect::<Vec<_>>(), ["alpaca_tiny"]);
    let batch = |corpus| Stream::new(corpus, StreamOptions::in_order()).next_batch(100).unwrap();
    assert_eq!(batch(alone), batch(prepared(&both).unwrap().eval.unwrap()));
    let none = prepare_eval(&options(&[&train]), &tokenizer, Some(&template), &|_| {}).unwrap_err().to_string();
    assert!(none.starts_with("eval_dataset: "), "{none}");
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let folder = Folder::new("nocache");
    let file = folder.write("file", "x");
    let error =
        prepared(&DataOptions { cache_dir: Some(file.into()), ..options(&["alpaca_tiny"]) }).unwrap_err().to_string();
    assert!(error.contains("cache folder"), "{error}");
}

fn numbered(folder: &Folder, name: &str, n: usize) -> String {
    let line = |i| json!({"question": format!("What is {i}?"), "answer": format!("{i}")}).to_string() + "\n";
    folder.write(name, (0..n).map(line).collect::<String>())
}

fn all_ids(corpus: &phalanx_data::Corpus) -> Vec<u64> {
    let mut ids = Stream::new(corpus.clone(), StreamOptions::in_order()).next_batch(usize::MAX).unwrap().sample_ids;
    ids.sort_unstable();
    ids
}

#[test]
fn the_order_does_not_depend_on_threads() {
    let folder = Folder::new("threads");
    let file = numbered(&folder, "n.jsonl", 1000);
    let batch = |workers| {
        let options =
            DataOptions { preprocessing_num_workers: workers, packing: true, cutoff_len: 128, ..options(&[&file]) };
        Stream::new(prepared(&options).unwrap().train, StreamOptions::of(&options)).next_batch(1000).unwrap()
    };
    let one = batch(1);
    for workers in [2, 3, 7] {
        assert_eq!(batch(workers), one);
    }
}

#[test]
fn the_validation_split_is_apart() {
    let folder = Folder::new("split");
    let (a, b) = (numbered(&folder, "a.jsonl", 60), numbered(&folder, "b.jsonl", 43));
    for (val_size, held) in [(0.1, 10), (5.0, 5), (0.001, 1)] {
        let data = prepared(&DataOptions { val_size, ..options(&[&a, &b]) }).unwrap();
        let eval = all_ids(data.eval.as_ref().unwrap());
        let train = all_ids(&data.train);
        assert_eq!((eval.len(), train.len()), (held, 103 - held));
        assert!(eval.iter().all(|id| !train.contains(id)));
    }
    for val_size in [103.0, 1000.0] {
        let error = prepared(&DataOptions { val_size, ..options(&[&a, &b]) }).unwrap_err().to_string();
        assert!(error.starts_with("val_size: "), "{error}");
    }
    // One long text is divided by pieces.
    let pt = DataOptions { stage: Stage::Pt, cutoff_len: 8, val_size: 0.25, ..options(&["tale"]) };
    let data = prepared(&pt).unwrap();
    let (train, eval) = (all_ids(&data.train), all_ids(data.eval.as_ref().unwrap()));
    assert!(!eval.is_empty() && eval.iter().all(|id| !train.contains(id)));
    let other = DataOptions { eval_dataset: vec![b.clone()], ..options(&[&a]) };
    let data = prepared(&other).unwrap();
    assert_eq!((data.train.rows_per_epoch(), data.eval.unwrap().rows_per_epoch()), (60, 43));
}

#[test]
fn packed_rows_hold_the_documents_that_unpacked_rows_hold() {
    let folder = Folder::new("packing");
    let file = numbered(&folder, "n.jsonl", 200);
    let plain = DataOptions { cutoff_len: 200, shuffle: false, ..options(&[&file]) };
    let packed = DataOptions { packing: true, ..plain.clone() };
    let batch = |options: &DataOptions| {
        let data = prepared(options).unwrap();
        (Stream::new(data.train.clone(), StreamOptions::of(options)).next_batch(usize::MAX).unwrap(), data.train)
    };
    let ((one, _), (many, corpus)) = (batch(&plain), batch(&packed));
    let documents = |batch: &Batch| {
        let mut documents: Vec<_> = batch
            .docs
            .iter()
            .zip(&batch.sample_ids)
            .map(|(d, id)| {
                (
                    *id,
                    batch.ids[d.clone()].to_vec(),
                    batch.targets[d.clone()].to_vec(),
                    batch.positions[d.clone()].to_vec(),
                )
            })
            .collect();
        documents.sort();
        documents
    };
    assert_eq!(documents(&one), documents(&many));
    assert_eq!(one.num_targets, many.num_targets);
    assert!(corpus.rows_per_epoch() < 80, "{} rows", corpus.rows_per_epoch());
    let mut stream = Stream::new(corpus.clone(), StreamOptions::in_order());
    for _ in 0..corpus.rows_per_epoch() {
        let row = stream.next_batch(1).unwrap();
        assert!(row.ids.len() <= 200);
        assert!(row.docs.iter().all(|d| row.targets[d.end - 1] == IGNORED && row.positions[d.start] == 0));
    }
}

#[test]
fn mixing_follows_the_weights() {
    let folder = Folder::new("mixing");
    let files = [numbered(&folder, "a.jsonl", 50), numbered(&folder, "b.jsonl", 10), numbered(&folder, "c.jsonl", 200)];
    let names: Vec<&str> = files.iter().map(String::as_str).collect();
    for (mix_strategy, want) in
        [(MixStrategy::InterleaveUnder, [50, 10, 40]), (MixStrategy::InterleaveOver, [250, 50, 200])]
    {
        for shuffle in [true, false] {
            let options =
                DataOptions { mix_strategy, interleave_probs: Some(vec![0.5, 0.1, 0.4]), shuffle, ..options(&names) };
            let mut stream = Stream::new(prepared(&options).unwrap().train, StreamOptions::of(&options));
            let mut visits = std::collections::HashMap::new();
            for _ in 0..5 {
                let epoch = stream.next_batch(usize::MAX).unwrap();
                let count = |set| epoch.sample_ids.iter().filter(|id| **id >> 40 == set).count();
                assert_eq!([count(0), count(1), count(2)], want);
                for id in epoch.sample_ids {
                    *visits.entry(id).or_insert(0) += 1;
                }
            }
            // Over five epochs every record is used, and of one data set equally often.
            for set in 0..3 {
                let of_set: Vec<i32> = visits.iter().filter(|(id, _)| **id >> 40 == set).map(|(_, n)| *n).collect();
                assert_eq!(of_set.len(), [50, 10, 200][set as usize]);
                assert!(of_set.iter().max().unwrap() - of_set.iter().min().unwrap() <= 1);
            }
        }
    }
}

#[test]
fn an_epoch_that_would_not_fit_into_memory_is_refused() {
    let folder = Folder::new("endless");
    let files = [numbered(&folder, "a.jsonl", 10), numbered(&folder, "b.jsonl", 10)];
    let mixed = |probs: [f64; 2], shuffle| DataOptions {
        mix_strategy: MixStrategy::InterleaveOver,
        interleave_probs: Some(probs.to_vec()),
        shuffle,
        ..options(&[&files[0], &files[1]])
    };
    let refused = |o| prepared(&o).unwrap_err().to_string();
    assert!(refused(mixed([1e-300, 1.0], true)).starts_with("interleave_probs: "));
    let far_apart = [1e-9, 1.0];
    assert!(refused(mixed(far_apart, false)).starts_with("disable_shuffling: "));
    // Shuffled rows are computed, not listed.
    let options = mixed(far_apart, true);
    let mut stream = Stream::new(prepared(&options).unwrap().train, StreamOptions::of(&options));
    assert_eq!(stream.rows_per_epoch(), 10_000_000_010);
    assert_eq!(stream.next_batch(3).unwrap().docs.len(), 3);
}

#[test]
fn nothing_to_train_on_is_an_error() {
    let folder = Folder::new("empty");
    for (name, text, words) in [
        ("empty.jsonl", "", "no record"),
        ("blank.json", "  \n", "no record"),
        ("none.json", "[]", "no record"),
        ("silent.jsonl", r#"{"question": "q", "answer": ""}"#, "has an answer"),
    ] {
        let path = folder.write(name, text);
        let error = prepared(&options(&[&path])).unwrap_err();
        assert!(matches!(&error, DataError::Empty(text) if text.contains(words)), "{name}: {error}");
    }
    assert!(prepared(&options(&[])).unwrap_err().to_string().starts_with("dataset: "));
    let one = folder.write("one.jsonl", r#"{"question": "q", "answer": "a"}"#);
    let data = prepared(&options(&[&one])).unwrap();
    assert_eq!(data.train.rows_per_epoch(), 1);
    let mut stream = Stream::new(data.train, StreamOptions { shuffle: true, seed: 1 });
    assert_eq!(stream.next_batch(4).unwrap(), stream.next_batch(4).unwrap());
    assert_eq!(stream.position(), 2);
}

#[test]
fn bad_records_stop_or_are_counted() {
    let folder = Folder::new("bad");
    let good = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#;
    let path = folder.write("m.jsonl", format!("{good}\n{}\n{good}\n", good.replace("user", "person")));
    let error = prepared(&options(&[&path])).unwrap_err().to_string();
    assert!(error.contains("m.jsonl:2: ") && error.contains("unknown role \"person\""), "{error}");
    let skipping = DataOptions { skip_bad_samples: true, ..options(&[&path]) };
    let data = prepared(&skipping).unwrap();
    assert_eq!((data.train.rows_per_epoch(), data.datasets[0].stats.bad_records), (2, 1));
}

#[test]
fn ids_beyond_the_embedding_are_named() {
    let tokenizer = tokenizer("tiny-chatml");
    assert!(tokenizer.check_rows(tokenizer.vocab_rows()).is_ok() && tokenizer.check_rows(100_000).is_ok());
    let error = tokenizer.check_rows(tokenizer.vocab_rows() - 1).unwrap_err().to_string();
    assert!(error.contains("<|im_end|>") && error.contains("rows"), "{error}");
}

#[test]
fn check_finds_what_is_wrong() {
    let folder = Folder::new("check");
    let turn = |q: &str, a: &str| {
        json!({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}).to_string()
    };
    let long = "word ".repeat(300);
    let lines = [
        turn("q", "a"),
        turn("q", "a"),
        turn("x", ""),
        turn("q", "b").replace("user", "person"),
        turn("l", &long),
        turn("<|im_end|>", "c"),
    ];
    let path = folder.write("m.jsonl", lines.join("\n"));
    let eval = folder.write("eval.jsonl", turn("q", "a") + "\n{broken");
    let options = DataOptions { cutoff_len: 64, eval_dataset: vec![eval], ..options(&[&path]) };
    let tokenizer = tokenizer("tiny-chatml");
    let (template, _) = ChatTemplate::choose(&tokenizer, &options).unwrap();
    let look = CheckOptions { embedding_rows: Some(10), positions: Some(6), examples: 1 };
    let report = check(&options, &tokenizer, Some(&template), &look, &|_| {}).unwrap();
    let kinds: Vec<&str> = report.findings.iter().map(|f| f.kind.as_str()).collect();
    for kind in [
        "id_beyond_embedding",
        "unknown_role",
        "unreadable",
        "duplicate",
        "empty_answer",
        "evaluation_overlap",
        "over_long",
        "beyond_positions",
        "stop_token_in_text",
    ] {
        assert!(kinds.contains(&kind), "{kind} is not in {kinds:?}");
    }
    assert!(!report.ok);
    let set = &report.datasets[0];
    assert_eq!((set.duplicates, set.stats.cut_examples, set.stats.examples), (1, 1, 4));
    assert!(set.label_share > 0.0 && set.over_long_share == 0.25 && set.lengths[3] == 64);
    let plain = report.render(false);
    assert!(plain.contains("assistant⏎\n  | ⟦a<|im_end|>⟧") && !plain.contains('\x1b'), "{plain}");
    let colored = report.render(true);
    assert!(colored.contains("\x1b[0;32ma<|im_end|>"), "{colored}");
    assert!(serde_json::to_string(&report).unwrap().contains("\"kind\":\"unknown_role\""));

    let good = DataOptions { eval_dataset: vec![], ..common::options(&["openai_tiny"]) };
    let report = check(&good, &tokenizer, Some(&template), &CheckOptions::default(), &|_| {}).unwrap();
    assert!(report.ok, "{:?}", report.findings);
}
