//! Models laid out for generation: exact ones give the bits of plain tensors; rounded ones stay near what their weights stand for, and their bits
//! do not depend on the batch, the cut of the prompts or the threads.

use std::ops::ControlFlow;
use std::sync::Arc;

use phalanx_generate::{Completion, Generator, GeneratorOptions, Request, SamplingParams, Token};
use phalanx_kernels::gemm::prepared::Form;
use phalanx_models::{Model, ModelConfig, WeightForm, initialise, lay_out, logits, loss};
use phalanx_nn::{Arithmetic, Batch, Cx, Env};
use phalanx_tensor::{Category, DType, Runtime};
use serde_json::json;

const VOCAB: usize = 131;

/// A model with experts, `k` of 6 a token; most of its matrices are theirs.
fn mixture(rt: &Runtime, k: usize) -> Model {
    let config = json!({"model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
        "initializer_range": 0.15, "num_experts": 6, "num_experts_per_tok": k, "moe_intermediate_size": 40,
        "norm_topk_prob": true});
    let model = Model::new(&ModelConfig::from_json("test", config).unwrap()).unwrap();
    initialise(rt, &model, 11).unwrap();
    model
}

#[test]
fn experts_laid_out_give_the_bits_of_plain_ones_or_are_rounded_but_for_the_router() {
    let rt = Runtime::new(2);
    let exact = mixture(&rt, 2);
    let want = bits(&run(&exact, &rt, 3, 50));
    lay_out(&rt, &exact, WeightForm::Exact).unwrap();
    assert_eq!(bits(&run(&exact, &rt, 3, 50)), want);
    for form in [Form::Q8, Form::Q4] {
        let (one, two) = (Runtime::new(1), Runtime::new(2));
        let (alone, model) = (mixture(&one, 2), mixture(&two, 2));
        lay_out(&one, &alone, WeightForm::Rounded(form)).unwrap();
        lay_out(&two, &model, WeightForm::Rounded(form)).unwrap();
        for p in model.parameters() {
            let plain = p.shape().len() != 2 || p.name().ends_with("mlp.gate.weight");
            assert_eq!(p.prepared().is_none(), plain, "{}", p.name());
        }
        assert_eq!(bits(&run(&alone, &one, 1, 512)), bits(&run(&model, &two, 5, 7)), "{form}");
        // With all experts for every token no choice can flip: what is left is rounding, as in a dense model.
        let all = mixture(&rt, 6);
        lay_out(&rt, &all, WeightForm::Rounded(form)).unwrap();
        let error =
            phalanx_testkit::rel_norm(&all_logits(&all, &rt), &all_logits(&widened(&all, mixture(&rt, 6), &rt), &rt));
        assert!(error > 0.0 && error < 0.04, "{form}: {error}");
    }
}

/// `plain` with the values that the matrices of `rounded` stand for.
fn widened(rounded: &Model, plain: Model, rt: &Runtime) -> Model {
    for (from, to) in rounded.parameters().iter().zip(plain.parameters()) {
        let Some(m) = from.prepared() else { continue };
        let mut values = vec![0f32; to.len()];
        m.gather(&(0..m.shape()[0] as u32).collect::<Vec<_>>(), &mut values).unwrap();
        to.set(rt.from_f32(to.shape(), &values, Category::Weights).unwrap()).unwrap();
    }
    plain
}

fn model(rt: &Runtime, tied: bool) -> Model {
    let config = json!({"model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
        "initializer_range": 0.15, "tie_word_embeddings": tied});
    let model = Model::new(&ModelConfig::from_json("test", config).unwrap()).unwrap();
    initialise(rt, &model, 11).unwrap();
    // Biases that are not zero.
    for p in model.parameters().iter().filter(|p| p.name().ends_with(".bias")) {
        let values: Vec<f32> = (0..p.len()).map(|i| (i % 7) as f32 * 0.1 - 0.3).collect();
        p.set(rt.from_f32(p.shape(), &values, Category::Weights).unwrap()).unwrap();
    }
    model
}

fn run(model: &Model, rt: &Runtime, max_batch: usize, max_pass_tokens: usize) -> Vec<Completion> {
    let request = |i: usize| Request {
        prompt: (0..[1, 37, 5, 64, 19][i] as u32).map(|t| (t * t * 7 + t * i as u32 + 3) % VOCAB as u32).collect(),
        max_new_tokens: 9 + i,
        sampling: SamplingParams::at_temperature(0.9),
        stop_token_ids: vec![],
        seed: i as u64,
    };
    let env = Env::new(rt.clone(), Batch::causal(&[]));
    let options = GeneratorOptions { max_batch, max_pass_tokens, ..GeneratorOptions::default() };
    let mut generator = Generator::new(model, &env, options).unwrap();
    generator.generate((0..5).map(request).collect(), &mut |_: &Token| Ok(ControlFlow::Continue(()))).unwrap()
}

fn bits(done: &[Completion]) -> Vec<(Vec<u32>, Vec<u32>)> {
    done.iter().map(|c| (c.ids.clone(), c.logprobs.iter().map(|x| x.to_bits()).collect())).collect()
}

#[test]
fn exact_weights_give_the_same_bits_laid_out() {
    for tied in [false, true] {
        for dtype in [DType::F32, DType::Bf16] {
            let rt = Runtime::new(2);
            let model = model(&rt, tied);
            for p in model.parameters().iter().filter(|p| !p.name().contains("norm")) {
                p.set(rt.cast(&p.value().unwrap(), dtype, Category::Weights).unwrap()).unwrap();
            }
            let want = bits(&run(&model, &rt, 3, 50));
            lay_out(&rt, &model, WeightForm::Exact).unwrap();
            assert_eq!(bits(&run(&model, &rt, 3, 50)), want);
            assert_eq!(bits(&run(&model, &rt, 1, 512)), want);
        }
    }
}

#[test]
fn rounded_weights_do_not_depend_on_batch_and_threads() {
    for form in [Form::Q8, Form::Q4] {
        let one = Runtime::new(1);
        let alone = model(&one, true);
        lay_out(&one, &alone, WeightForm::Rounded(form)).unwrap();
        let want = bits(&run(&alone, &one, 1, 512));
        for (threads, batch, pass) in [(1, 5, 7), (2, 5, 512), (3, 2, 30)] {
            let rt = Runtime::new(threads);
            let model = model(&rt, true);
            lay_out(&rt, &model, WeightForm::Rounded(form)).unwrap();
            assert_eq!(bits(&run(&model, &rt, batch, pass)), want, "{form}: {threads} threads, batch {batch}");
        }
    }
}

/// Logits of 40 tokens.
fn all_logits(model: &Model, rt: &Runtime) -> Vec<f32> {
    let env = Env::new(rt.clone(), Batch::causal(&[40]));
    let ids: Arc<[u32]> = (0..40u32).map(|t| t * 17 % VOCAB as u32).collect();
    let hidden = model.hidden(&mut Cx::eval(&env), &ids).unwrap();
    rt.to_vec(&logits(rt, model, &hidden, Arithmetic::F32).unwrap()).unwrap()
}

#[test]
fn logits_of_rounded_weights_stay_within_four_per_cent_of_the_values_they_stand_for() {
    // Rounding x to 8 bits costs about half a per cent a product; here are 14 and the head, with random weights.
    let rt = Runtime::new(2);
    for form in [Form::Q8, Form::Q4] {
        let rounded = model(&rt, false);
        lay_out(&rt, &rounded, WeightForm::Rounded(form)).unwrap();
        let widened = widened(&rounded, model(&rt, false), &rt);
        let error = phalanx_testkit::rel_norm(&all_logits(&rounded, &rt), &all_logits(&widened, &rt));
        println!("{form}: {error}");
        assert!(error > 0.0 && error < 0.04, "{form}: {error}");
    }
}

#[test]
fn a_model_laid_out_is_not_trained() {
    let rt = Runtime::new(1);
    let model = model(&rt, true);
    lay_out(&rt, &model, WeightForm::Rounded(Form::Q8)).unwrap();
    let env = Env::new(rt.clone(), Batch::causal(&[4]));
    let (ids, targets): (Arc<[u32]>, Arc<[i32]>) = (Arc::from([1, 2, 3, 4]), Arc::from([2, 3, 4, 5]));
    let e = loss(&model, &mut Cx::train(&env), &ids, &targets).err().unwrap();
    let mut text = e.to_string();
    let mut source = std::error::Error::source(&e);
    while let Some(e) = source {
        text.push_str(&e.to_string());
        source = e.source();
    }
    assert!(text.contains("laid out for inference (q8)") && text.contains("embed_tokens"), "{text}");
}
