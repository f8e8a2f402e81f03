//! The sample stream: exact resume, seeking, prefetching, over several epochs.

mod common;

use std::sync::OnceLock;

use common::{options, tokenizer};
use phalanx_data::{
    ChatTemplate, Corpus, DataError, DataOptions, MixStrategy, Prefetch, Stage, Stream, StreamOptions, StreamState,
    prepare,
};
use proptest::prelude::*;

/// Pieces of text from three data sets, mixed as asked for, packed or not.
fn corpus(mix: MixStrategy, packing: bool) -> Corpus {
    static CACHE: OnceLock<Vec<((MixStrategy, bool), Corpus)>> = OnceLock::new();
    let all = CACHE.get_or_init(|| {
        let tokenizer = tokenizer("tiny-chatml");
        let mut all = Vec::new();
        for mix in [MixStrategy::Concat, MixStrategy::InterleaveUnder, MixStrategy::InterleaveOver] {
            for packing in [false, true] {
                let options = DataOptions {
                    stage: Stage::Pt,
                    cutoff_len: 11,
                    mix_strategy: mix,
                    packing,
                    interleave_probs: (mix != MixStrategy::Concat).then(|| vec![0.2, 0.5, 0.3]),
                    ..options(&["tale", "text_tiny", "tale.txt"])
                };
                all.push(((mix, packing), prepare(&options, &tokenizer, None, &|_| {}).unwrap().train));
            }
        }
        all
    });
    all.iter().find(|(k, _)| *k == (mix, packing)).unwrap().1.clone()
}

fn any_corpus() -> impl Strategy<Value = Corpus> {
    let mixes = [MixStrategy::Concat, MixStrategy::InterleaveUnder, MixStrategy::InterleaveOver];
    (prop::sample::select(mixes.to_vec()), any::<bool>()).prop_map(|(mix, packing)| corpus(mix, packing))
}

/// The sample ids of everything from the stream's position to `end`.
fn ids_until(stream: &mut Stream, end: u64, sizes: &[usize]) -> Vec<u64> {
    let mut ids = Vec::new();
    for size in sizes.iter().cycle() {
        let left = (end - stream.position()) as usize;
        if left == 0 {
            return ids;
        }
        ids.extend(stream.next_batch((*size).min(left)).unwrap().sample_ids);
    }
    ids
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Stopped twice, anywhere in two epochs and a half, with other batch sizes each time: the same samples.
    #[test]
    fn resuming_twice_changes_nothing(
        corpus in any_corpus(), shuffle: bool, seed: u64, cuts in [0f64..1.0, 0f64..1.0],
        sizes in prop::collection::vec(1usize..5, 1..4), other_sizes in prop::collection::vec(1usize..9, 1..4),
    ) {
        let options = StreamOptions { shuffle, seed };
        let end = corpus.rows_per_epoch() * 5 / 2;
        let want = ids_until(&mut Stream::new(corpus.clone(), options), end, &sizes);
        let mut cuts = cuts.map(|c| (c * end as f64) as u64);
        cuts.sort_unstable();
        let (mut got, mut saved) = (Vec::new(), None::<String>);
        for (until, sizes) in [(cuts[0], &sizes), (cuts[1], &other_sizes), (end, &sizes)] {
            let mut stream = Stream::new(corpus.clone(), options);
            if let Some(saved) = saved {
                stream.resume(&serde_json::from_str::<StreamState>(&saved).unwrap()).unwrap();
            }
            got.extend(ids_until(&mut stream, until, sizes));
            saved = Some(serde_json::to_string(&stream.state()).unwrap());
        }
        prop_assert_eq!(got, want);
    }

    /// Batches that were made ahead and never handed over are not lost.
    #[test]
    fn prefetching_changes_nothing(corpus in any_corpus(), seed: u64, rows in 1usize..4, depth in 1usize..5, taken in 0usize..9) {
        let options = StreamOptions { shuffle: true, seed };
        let mut plain = Stream::new(corpus.clone(), options);
        let mut ahead = Prefetch::new(Stream::new(corpus.clone(), options), rows, depth).unwrap();
        for _ in 0..taken {
            prop_assert_eq!(ahead.next_batch().unwrap(), plain.next_batch(rows).unwrap());
            prop_assert_eq!(ahead.position(), plain.position());
        }
        let mut resumed = Stream::new(corpus, options);
        resumed.resume(&ahead.state()).unwrap();
        drop(ahead);
        prop_assert_eq!(resumed.next_batch(rows).unwrap(), plain.next_batch(rows).unwrap());
    }

    #[test]
    fn an_epoch_visits_each_row_once(packing: bool, seed: u64, epoch in 0u64..5) {
        let corpus = corpus(MixStrategy::Concat, packing);
        let mut stream = Stream::new(corpus.clone(), StreamOptions { shuffle: true, seed });
        stream.seek(epoch * corpus.rows_per_epoch());
        let mut ids = ids_until(&mut stream, (epoch + 1) * corpus.rows_per_epoch(), &[3]);
        ids.sort_unstable();
        let whole = Stream::new(corpus, StreamOptions::in_order()).next_batch(usize::MAX).unwrap();
        let mut want = whole.sample_ids;
        want.sort_unstable();
        prop_assert_eq!(ids, want);
    }
}

#[test]
fn the_last_window_is_short_and_epochs_differ() {
    let corpus = corpus(MixStrategy::Concat, false);
    let n = corpus.rows_per_epoch();
    let mut stream = Stream::new(corpus, StreamOptions { shuffle: true, seed: 3 });
    let mut epochs = Vec::new();
    for epoch in 0..3 {
        assert_eq!(stream.epoch(), epoch);
        let mut ids = Vec::new();
        let mut sizes = Vec::new();
        while stream.epoch() == epoch {
            let batch = stream.next_batch(4).unwrap();
            sizes.push(batch.docs.len() as u64);
            ids.extend(batch.sample_ids);
        }
        assert_eq!(sizes.iter().sum::<u64>(), n);
        assert!(sizes[..sizes.len() - 1].iter().all(|s| *s == 4));
        assert_eq!(*sizes.last().unwrap(), (n - 1) % 4 + 1);
        epochs.push(ids);
    }
    assert_ne!(epochs[0], epochs[1]);
    assert_ne!(epochs[1], epochs[2]);
    assert!(stream.next_batch(0).is_err());
}

#[test]
fn a_state_of_other_data_or_order_is_refused() {
    let options = StreamOptions { shuffle: true, seed: 1 };
    let mut state = Stream::new(corpus(MixStrategy::Concat, false), options).state();
    state.position = 5;
    let refuse = |corpus, options| match Stream::new(corpus, options).resume(&state) {
        Err(DataError::Resume(text)) => text,
        other => panic!("{other:?}"),
    };
    assert!(refuse(corpus(MixStrategy::Concat, true), options).contains("data is not that of the checkpoint"));
    assert!(refuse(corpus(MixStrategy::InterleaveOver, false), options).contains("rows an epoch then"));
    let text = refuse(corpus(MixStrategy::Concat, false), StreamOptions { shuffle: true, seed: 2 });
    assert!(text.contains("shuffled by seed 1") && text.contains("shuffled by seed 2"), "{text}");
    let mut same = Stream::new(corpus(MixStrategy::Concat, false), options);
    same.resume(&state).unwrap();
    assert_eq!(same.position(), 5);
}

/// Conversations as the model in `folder` prints them, under a template that may be changed.
fn dated(folder: &str, options: &DataOptions, change: impl Fn(&str) -> String) -> Corpus {
    let tokenizer = tokenizer(folder);
    let (own, _) = ChatTemplate::choose(&tokenizer, options).unwrap();
    let template = ChatTemplate::from_source("changed", &change(own.source()), &tokenizer, options).unwrap();
    prepare(options, &tokenizer, Some(&template), &|_| {}).unwrap().train
}

#[test]
fn a_run_goes_on_after_midnight() {
    let print_day = |source: &str| format!("{}{source}", "{{- strftime_now('%d %b %Y') }}");
    let day = |day: &str| DataOptions { template_date: Some(day.into()), ..options(&["alpaca_tiny"]) };
    let order = StreamOptions { shuffle: true, seed: 1 };
    let (monday, tuesday) = (day("2024-07-29"), day("2024-07-30"));
    let state = Stream::new(dated("tiny-chatml", &monday, print_day), order).state();
    assert_eq!(state.template_date.as_deref(), Some("2024-07-29"));

    // Of another day, the data is other data, and the message says the way out.
    let mut stream = Stream::new(dated("tiny-chatml", &tuesday, print_day), order);
    let refused = stream.resume(&state).unwrap_err().to_string();
    assert!(refused.contains("2024-07-29 then and 2024-07-30 now: set template_date: 2024-07-29"), "{refused}");

    // Whatever day it is, the run keeps its own, unless the user names one.
    let today = DataOptions { template_date: None, ..monday };
    let going_on = today.of_run(&state);
    Stream::new(dated("tiny-chatml", &going_on, print_day), order).resume(&state).unwrap();
    assert_eq!(tuesday.of_run(&state).template_date.as_deref(), Some("2024-07-30"));
}

#[test]
fn what_prints_the_same_is_the_same_data() {
    let folder = std::env::temp_dir().join(format!("phalanx-same-{}", std::process::id()));
    let cached = |day: &str| DataOptions {
        template_date: Some(day.into()),
        cache_dir: Some(folder.clone()),
        ..options(&["alpaca_tiny"])
    };
    let order = StreamOptions { shuffle: true, seed: 1 };
    let before = Stream::new(dated("tiny-chatml", &cached("2024-07-29"), str::to_owned), order).state();
    assert_eq!(before.template_date, None);
    // Another day, and another text of the template and so another cache; the same tokens.
    let reworded = |source: &str| format!("{}{source}", "{#- strftime_now is not called -#}");
    let after = dated("tiny-chatml", &cached("2024-07-30"), reworded);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
    Stream::new(after, order).resume(&before).unwrap();
    // From memory, the same again.
    let memory = DataOptions { cache_dir: None, ..cached("2024-07-30") };
    Stream::new(dated("tiny-chatml", &memory, str::to_owned), order).resume(&before).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}
