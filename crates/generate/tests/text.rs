//! Text: what streams out is the text of the tokens, cut before a stop string, in whole characters.

mod common;

use std::ops::ControlFlow;

use phalanx_generate::{FinishReason, Request, SamplingParams, TextOptions, generate_text};

fn requests(n: u64) -> Vec<Request> {
    (0..n)
        .map(|i| Request {
            prompt: (0..=i as u32).map(|t| 97 + t).collect(),
            max_new_tokens: 60,
            sampling: SamplingParams { top_k: 120, ..SamplingParams::at_temperature(1.5) },
            stop_token_ids: vec![common::IM_END],
            seed: i,
        })
        .collect()
}

#[test]
fn streamed_pieces_join_to_the_text_of_the_tokens() {
    let (tokenizer, _, _folder) = common::tokenizer("stream");
    let (model, env) = common::model(256);
    let mut streamed = vec![String::new(); 4];
    let done = generate_text(
        &mut common::generator(&model, &env),
        &tokenizer,
        requests(4),
        &TextOptions::default(),
        &mut |r, piece| {
            streamed[r].push_str(piece);
            Ok(ControlFlow::Continue(()))
        },
    )
    .unwrap();
    for (s, d) in streamed.iter().zip(&done) {
        assert_eq!(s, &d.text);
        assert_eq!(s, &tokenizer.decode(d.completion.answer_ids(), true).unwrap());
        assert!(s.chars().count() > 10);
    }
    // Random bytes: some do not form characters, some prompts end early or not; the lengths tell that batches were mixed.
    assert!(done.iter().any(|d| d.text.contains('\u{fffd}')));
}

#[test]
fn a_stop_string_ends_only_its_own_request_and_is_not_shown() {
    let (tokenizer, _, _folder) = common::tokenizer("stop");
    let (model, env) = common::model(256);
    let go_on = &mut |_: usize, _: &str| Ok(ControlFlow::Continue(()));
    let mut generator = common::generator(&model, &env);
    let free = generate_text(&mut generator, &tokenizer, requests(3), &TextOptions::default(), go_on).unwrap();
    // Three characters out of the middle of the second text, which each are a token or more.
    let stop: String = free[1].text.chars().skip(12).take(3).collect();
    let at = free[1].text.find(&stop).unwrap();
    let options = TextOptions { stop: vec!["never to be seen".into(), stop.clone()], ..TextOptions::default() };
    let mut streamed = String::new();
    let cut = generate_text(&mut generator, &tokenizer, requests(3), &options, &mut |r, piece| {
        if r == 1 {
            streamed.push_str(piece);
        }
        Ok(ControlFlow::Continue(()))
    })
    .unwrap();
    assert_eq!(cut[1].text, free[1].text[..at]);
    assert_eq!(streamed, cut[1].text);
    assert_eq!(cut[1].completion.finish_reason, FinishReason::StopString);
    assert!(cut[1].completion.ids.len() < free[1].completion.ids.len());
    for i in [0, 2] {
        if !free[i].text.contains(&stop) {
            assert_eq!(cut[i].text, free[i].text);
            assert_eq!(cut[i].completion.ids, free[i].completion.ids);
        }
    }
}
