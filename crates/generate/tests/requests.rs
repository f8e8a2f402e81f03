//! What cannot be generated is refused before anything is computed, and how generations end.

use std::ops::ControlFlow;

use phalanx_generate::{
    Completion, FinishReason, GenerateError, Generator, GeneratorOptions, Request, SamplingParams, Token,
};
use phalanx_models::{Model, ModelConfig, initialise};
use phalanx_nn::{Batch, Env};
use phalanx_tensor::Runtime;
use serde_json::json;

const CONTEXT: usize = 24;

fn setup() -> (Model, Env) {
    let config = json!({"model_type": "qwen2", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.2});
    let rt = Runtime::new(1);
    let model = Model::new(&ModelConfig::from_json("test", config).unwrap()).unwrap();
    initialise(&rt, &model, 3).unwrap();
    (model, Env::new(rt, Batch::causal(&[])))
}

fn request(prompt: Vec<u32>) -> Request {
    Request { prompt, max_new_tokens: 8, sampling: SamplingParams::at_temperature(1.0), seed: 1, ..Request::default() }
}

fn go_on(_: &Token) -> phalanx_generate::Result<ControlFlow<FinishReason>> {
    Ok(ControlFlow::Continue(()))
}

fn run(requests: Vec<Request>) -> Result<Vec<Completion>, GenerateError> {
    let (model, env) = setup();
    Generator::new(&model, &env, GeneratorOptions::default())?.generate(requests, &mut go_on)
}

#[test]
fn impossible_requests_are_refused_with_the_mend() {
    let fine = || request(vec![1, 2, 3]);
    let sampling = |s: SamplingParams| Request { sampling: s, ..fine() };
    let warm = SamplingParams::at_temperature(1.0);
    for (bad, words) in [
        (request(vec![]), "empty"),
        (request(vec![0; CONTEXT]), "at most 23 tokens"),
        (request(vec![1, 40]), "id 40 at place 1"),
        (Request { stop_token_ids: vec![99], ..fine() }, "stop_token_ids: id 99"),
        (Request { max_new_tokens: 0, ..fine() }, "max_new_tokens: 0 must be"),
        (sampling(SamplingParams { temperature: -1.0, ..warm }), "temperature: -1 must be"),
        (sampling(SamplingParams { temperature: f64::NAN, ..warm }), "temperature: NaN must be"),
        (sampling(SamplingParams { top_p: 1.5, ..warm }), "top_p: 1.5 must be"),
    ] {
        let e = run(vec![fine(), bad]).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
        if e.starts_with("request") {
            assert!(e.starts_with("request 1:"), "{e}");
        }
    }
    let (model, env) = setup();
    let options = GeneratorOptions { max_batch: 0, ..GeneratorOptions::default() };
    assert!(Generator::new(&model, &env, options).err().unwrap().to_string().starts_with("max_batch: 0"));
    assert_eq!(run(vec![]).unwrap(), []);
}

#[test]
fn a_batch_limit_beyond_memory_is_only_a_limit() {
    let (model, env) = setup();
    let options = GeneratorOptions { max_batch: usize::MAX, ..GeneratorOptions::default() };
    let mut generator = Generator::new(&model, &env, options).unwrap();
    let requests = || vec![request(vec![1, 2, 3]), request(vec![4, 5]), request(vec![6])];
    let done = generator.generate(requests(), &mut go_on).unwrap();
    assert_eq!(done, run(requests()).unwrap());
}

#[test]
fn generations_end_for_the_reason_they_give() {
    let free = run(vec![request(vec![1, 2, 3])]).unwrap().remove(0);
    assert_eq!((free.ids.len(), free.finish_reason), (8, FinishReason::Length));

    let stop = free.ids[3];
    let at = free.ids.iter().position(|&id| id == stop).unwrap();
    let done = run(vec![Request { stop_token_ids: vec![stop], ..request(vec![1, 2, 3]) }]).unwrap().remove(0);
    assert_eq!(done.finish_reason, FinishReason::StopToken);
    assert_eq!((&done.ids[..], done.answer_ids()), (&free.ids[..=at], &free.ids[..at]));
    assert_eq!(done.logprobs, free.logprobs[..=at]);

    let done = run(vec![Request { max_new_tokens: 1000, ..request(vec![5; 20]) }]).unwrap().remove(0);
    assert_eq!((done.ids.len(), done.finish_reason), (CONTEXT - 20, FinishReason::Context));
}

#[test]
fn a_generator_goes_on_after_a_failing_caller() {
    let (model, env) = setup();
    let mut generator = Generator::new(&model, &env, GeneratorOptions { max_batch: 2, ..Default::default() }).unwrap();
    let all = || (1..5).map(|n| request(vec![n; n as usize])).collect::<Vec<_>>();
    let want = generator.generate(all(), &mut go_on).unwrap();
    let fail = &mut |t: &Token| match t.request {
        1 => Err(GenerateError::Write(std::io::Error::other("full"))),
        _ => Ok(ControlFlow::Continue(())),
    };
    assert!(generator.generate(all(), fail).unwrap_err().to_string().contains("full"));
    assert_eq!(
        generator.generate(all(), &mut go_on).unwrap().iter().map(|c| &c.ids).collect::<Vec<_>>(),
        want.iter().map(|c| &c.ids).collect::<Vec<_>>()
    );
}

#[test]
fn weights_that_are_not_finite_are_named_not_sampled() {
    let (model, env) = setup();
    let head = model.head();
    let mut values = env.rt.to_vec(&head.value().unwrap()).unwrap();
    values[7] = f32::NAN;
    head.set(env.rt.from_f32(head.shape(), &values, phalanx_tensor::Category::Weights).unwrap()).unwrap();
    let mut generator = Generator::new(&model, &env, GeneratorOptions::default()).unwrap();
    let e = generator.generate(vec![request(vec![1, 2])], &mut go_on).unwrap_err();
    assert!(matches!(e, GenerateError::NotFinite { request: 0, position: 2 }), "{e}");
}

#[test]
fn too_little_memory_is_an_error_and_not_the_end() {
    let (model, env) = setup();
    let mut generator = Generator::new(&model, &env, GeneratorOptions::default()).unwrap();
    let all = || (1..9).map(|n| request(vec![n; 10])).collect::<Vec<_>>();
    let want = generator.generate(all(), &mut go_on).unwrap();
    generator.forget();
    let pool = env.rt.pool();
    let in_use: usize = pool.stats().current.values().sum();
    // Some of these limits are hit while the cache grows, others in the forward pass.
    for more in [1 << 10, 8 << 10, 16 << 10, 32 << 10, 48 << 10] {
        pool.set_limit(Some(in_use + more));
        let e = generator.generate(all(), &mut go_on).unwrap_err().to_string();
        assert!(e.contains("out of memory"), "{e}");
    }
    pool.set_limit(None);
    let again = generator.generate(all(), &mut go_on).unwrap();
    assert!(again.iter().zip(&want).all(|(a, b)| a.ids == b.ids && a.logprobs == b.logprobs));
}
