//! Log-probabilities of generated tokens are, to the bit, those of a training forward pass over the same tokens: for every
//! family, any batch, any cut of the prompts, any number of threads.

use std::ops::ControlFlow;
use std::sync::Arc;

use phalanx_generate::{Completion, Generator, GeneratorOptions, Request, SamplingParams, Token};
use phalanx_models::{Model, ModelConfig, initialise, loss};
use phalanx_nn::{Batch, Cx, Env};
use phalanx_tensor::Runtime;
use serde_json::{Value, json};

const VOCAB: usize = 131;

fn families() -> Vec<(&'static str, Value)> {
    let config = |model_type: &str, more: Value| {
        let mut c = json!({"model_type": model_type, "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20,
            "max_position_embeddings": 160, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "initializer_range": 0.15,
            "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "float32"});
        if let (Value::Object(c), Value::Object(more)) = (&mut c, more) {
            c.extend(more);
        }
        c
    };
    vec![
        ("llama", config("llama", json!({"num_key_value_heads": 1, "tie_word_embeddings": true}))),
        ("mistral", config("mistral", json!({"sliding_window": 9}))),
        ("qwen2", config("qwen2", json!({}))),
        ("qwen3", config("qwen3", json!({"num_key_value_heads": 4}))),
        (
            "qwen3_moe",
            config(
                "qwen3_moe",
                json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                "norm_topk_prob": true}),
            ),
        ),
        (
            "deepseek_v3",
            config(
                "deepseek_v3",
                json!({"num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 24,
                "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 4,
                "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}),
            ),
        ),
    ]
}

fn model(config: &Value, rt: &Runtime) -> Model {
    let config = ModelConfig::from_json("test", config.clone()).unwrap();
    let model = Model::new(&config).unwrap();
    initialise(rt, &model, 11).unwrap();
    model
}

/// Prompts of different lengths, one of a single token, one longer than any pass of the chunked runs.
fn requests() -> Vec<Request> {
    let prompt = |n: usize, k: u32| (0..n as u32).map(|i| (i * i * 7 + i * k + 3) % VOCAB as u32).collect();
    let warm = SamplingParams { temperature: 0.9, top_k: 60, top_p: 0.97, min_p: 0.01, repetition_penalty: 1.1 };
    let request = |n, k, new, sampling, seed| Request {
        prompt: prompt(n, k),
        max_new_tokens: new,
        sampling,
        stop_token_ids: vec![],
        seed,
    };
    vec![
        request(1, 1, 15, warm, 1),
        request(37, 2, 12, SamplingParams::at_temperature(1.3), 2),
        request(5, 3, 9, SamplingParams::greedy(), 3),
        request(64, 4, 18, warm, 4),
        request(19, 5, 1, warm, 5),
        request(90, 6, 21, SamplingParams::at_temperature(0.7), 6),
        request(8, 7, 14, warm, 7),
    ]
}

fn run(config: &Value, threads: usize, options: GeneratorOptions) -> Vec<Completion> {
    let rt = Runtime::new(threads);
    let model = model(config, &rt);
    let env = Env::new(rt, Batch::causal(&[]));
    let mut generator = Generator::new(&model, &env, options).unwrap();
    let done = generator.generate(requests(), &mut |_: &Token| Ok(ControlFlow::Continue(()))).unwrap();
    assert_eq!(done.len(), requests().len());
    done
}

/// Log-probabilities of the tokens after each prompt, from a recorded (training) pass over all documents of `pack`.
fn train_logprobs(config: &Value, threads: usize, pack: &[(&[u32], &[u32])]) -> Vec<Vec<f32>> {
    let rt = Runtime::new(threads);
    let model = model(config, &rt);
    let docs: Vec<Vec<u32>> = pack.iter().map(|(prompt, new)| [*prompt, *new].concat()).collect();
    // The last token has no successor: it need not be read.
    let lens: Vec<usize> = docs.iter().map(|d| d.len() - 1).collect();
    let ids: Arc<[u32]> = docs.iter().flat_map(|d| d[..d.len() - 1].to_vec()).collect();
    let targets: Arc<[i32]> = docs.iter().flat_map(|d| d[1..].iter().map(|&t| t as i32).collect::<Vec<_>>()).collect();
    let mut env = Env::new(rt, Batch::causal(&lens));
    env.training = true;
    let mut cx = Cx::train(&env);
    let logp = loss(&model, &mut cx, &ids, &targets).unwrap().logp;
    let mut start = 0;
    let mut out = Vec::new();
    for ((prompt, _), len) in pack.iter().zip(lens) {
        out.push(logp[start + prompt.len() - 1..start + len].to_vec());
        start += len;
    }
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn sampled_logprobs_equal_training_to_the_bit() {
    for (name, config) in families() {
        let base = run(&config, 1, GeneratorOptions { max_batch: 1, ..GeneratorOptions::default() });
        let requests = requests();
        let pairs: Vec<(&[u32], &[u32])> =
            requests.iter().zip(&base).map(|(r, c)| (&r.prompt[..], &c.ids[..])).collect();
        for (r, c) in requests.iter().zip(&base) {
            assert_eq!((c.ids.len(), c.logprobs.len()), (r.max_new_tokens, r.max_new_tokens));
        }

        // Training, each document alone and all in one pack.
        for threads in [1, 2, 3] {
            let packed = train_logprobs(&config, threads, &pairs);
            for (i, (c, packed)) in base.iter().zip(&packed).enumerate() {
                assert_eq!(bits(&c.logprobs), bits(packed), "{name}, request {i}, {threads} threads, packed");
            }
        }
        for (i, (pair, c)) in pairs.iter().zip(&base).enumerate() {
            let alone = &train_logprobs(&config, 2, &[*pair])[0];
            assert_eq!(bits(&c.logprobs), bits(alone), "{name}, request {i} alone");
        }

        // Generation in other batches, with prompts in pieces, on other teams.
        // Few of the runs with several threads: on a busy machine each pass waits for the slowest.
        for (threads, max_batch, max_pass_tokens) in [(2, 2, 512), (3, 5, 16), (1, 5, 7), (1, 1, 5), (1, 7, 1)] {
            let options = GeneratorOptions { max_batch, max_pass_tokens, max_context: None };
            let other = run(&config, threads, options);
            for (i, (a, b)) in base.iter().zip(&other).enumerate() {
                let place = format!("{name}, request {i}, {threads} threads, {options:?}");
                assert_eq!(a.ids, b.ids, "{place}");
                assert_eq!(bits(&a.logprobs), bits(&b.logprobs), "{place}");
            }
        }
    }
}

#[test]
fn a_reused_prefix_changes_no_bit() {
    for (name, config) in families() {
        let rt = Runtime::new(2);
        let model = model(&config, &rt);
        let env = Env::new(rt, Batch::causal(&[]));
        let go_on = &mut |_: &Token| Ok(ControlFlow::Continue(()));
        let mut warm =
            Generator::new(&model, &env, GeneratorOptions { max_batch: 2, ..GeneratorOptions::default() }).unwrap();
        let first = Request { max_new_tokens: 20, ..requests()[3].clone() };
        let answer = warm.generate(vec![first.clone()], go_on).unwrap().remove(0);
        assert_eq!(answer.cached_tokens, 0);
        let next = Request { prompt: [&first.prompt[..], &answer.ids, &[5, 6, 7]].concat(), ..first.clone() };
        let reused = warm.generate(vec![next.clone()], go_on).unwrap().remove(0);
        // All but the last token of the answer, whose successor was never asked for.
        assert_eq!(reused.cached_tokens, first.prompt.len() + answer.ids.len() - 1, "{name}");
        let fresh =
            Generator::new(&model, &env, GeneratorOptions::default()).unwrap().generate(vec![next], go_on).unwrap();
        assert_eq!(reused.ids, fresh[0].ids, "{name}");
        assert_eq!(bits(&reused.logprobs), bits(&fresh[0].logprobs), "{name}");
        warm.forget();
        let again = warm.generate(vec![first], go_on).unwrap().remove(0);
        assert_eq!((again.cached_tokens, &again.ids), (0, &answer.ids), "{name}");
    }
}
