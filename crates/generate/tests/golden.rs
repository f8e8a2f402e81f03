//! Greedy continuations of the golden cases, written by `transformers`.

use std::ops::ControlFlow;
use std::path::PathBuf;

use phalanx_generate::{Generator, GeneratorOptions, Request, SamplingParams};
use phalanx_models::{Model, ModelConfig, load_weights};
use phalanx_nn::{Batch, Env};
use phalanx_tensor::{DType, Runtime};
use serde_json::Value;

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect()
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testkit/fixtures/golden");
    for case in [
        "llama-gqa",
        "llama3-rope-tied",
        "qwen2-bias",
        "qwen3-qknorm",
        "mistral-window",
        "qwen3-moe",
        "deepseek-v3-mla",
    ] {
        let dir = golden.join(case);
        let text = std::fs::read_to_string(dir.join("case.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        let rt = Runtime::new(2);
        let model = Model::new(&ModelConfig::from_folder(&dir).unwrap()).unwrap();
        load_weights(&rt, &model, &dir, &|_| DType::F32).unwrap();
        let env = Env::new(rt, Batch::causal(&[]));
        let want = ids(&expected["greedy_continuation"]);
        let request = Request {
            prompt: ids(&expected["greedy_prompt"]),
            max_new_tokens: want.len(),
            sampling: SamplingParams::greedy(),
            ..Request::default()
        };
        let mut generator = Generator::new(&model, &env, GeneratorOptions::default()).unwrap();
        let mut streamed = vec![];
        let done = generator
            .generate(vec![request.clone(), request], &mut |t| {
                streamed.push((t.request, t.id));
                Ok(ControlFlow::Continue(()))
            })
            .unwrap();
        assert_eq!(done[0].ids, want, "{case}");
        assert_eq!(done[0], done[1], "{case}");
        let of = |r| streamed.iter().filter(|t| t.0 == r).map(|t| t.1).collect::<Vec<_>>();
        assert_eq!((of(0), of(1)), (want.clone(), want), "{case}");
    }
}
