//! The processors leave what those of `transformers` leave (`fixtures/make_processors.py`).

use phalanx_generate::SamplingParams;
use phalanx_generate::sampling::{Sampler, Seen};
use serde_json::Value;

#[test]
fn processors_leave_what_transformers_leaves() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("fixtures/processors.json")).unwrap();
    let mut sampler = Sampler::default();
    let mut kept = std::collections::BTreeSet::new();
    for (i, case) in cases.iter().enumerate() {
        let numbers = |key: &str| -> Vec<f64> { serde_json::from_value(case[key].clone()).unwrap() };
        let number = |key: &str| case[key].as_f64().unwrap();
        let params = SamplingParams {
            temperature: number("temperature"),
            top_k: number("top_k") as usize,
            top_p: number("top_p"),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
        };
        let logits: Vec<f32> = numbers("logits").iter().map(|&x| x as f32).collect();
        let mut seen = Seen::default();
        numbers("input_ids").iter().for_each(|&id| seen.insert(id as u32));
        let mut got = sampler.distribution(&params, &logits, &seen);
        got.sort_by_key(|(id, _)| *id);
        let ids: Vec<f64> = got.iter().map(|(id, _)| f64::from(*id)).collect();
        assert_eq!(ids, numbers("kept"), "case {i}: {params:?}");
        let want = numbers("probs");
        for (id, p) in &got {
            assert!((p - want[*id as usize]).abs() < 1e-6, "case {i}, token {id}: {p}; {params:?}");
        }
        kept.insert(got.len());
    }
    assert!(cases.len() >= 40 && kept.len() >= 5, "the cases cut in different ways: {kept:?}");
}
