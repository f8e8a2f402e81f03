//! Documents packed into one row do not see each other.

use std::sync::Arc;

use phalanx_models::{Model, ModelConfig, initialise, logits};
use phalanx_nn::{Arithmetic, Cx};
use phalanx_tensor::Runtime;
use phalanx_testkit::rel_norm;
use phalanx_train::step::{LossCount, evaluate_batch, forward_backward};

use crate::common::{batch, clear, env, grads, model, shape};

#[test]
fn data_and_kernels_leave_out_the_same_target() {
    assert_eq!(phalanx_data::IGNORED, phalanx_kernels::cross_entropy::IGNORE);
}

fn all_logits(rt: &Runtime, m: &Model, b: &phalanx_data::Batch) -> Vec<f32> {
    let ids: Arc<[u32]> = b.ids.as_slice().into();
    let hidden = m.hidden(&mut Cx::eval(&env(rt, b)), &ids).unwrap();
    rt.to_vec(&logits(rt, m, &hidden, Arithmetic::F32).unwrap()).unwrap()
}

fn families(rt: &Runtime) -> Vec<(&'static str, Model)> {
    let windowed = {
        let mut s = shape(2, true);
        s["model_type"] = "mistral".into();
        s["architectures"] = serde_json::json!(["MistralForCausalLM"]);
        s["sliding_window"] = 5.into();
        let m = Model::new(&ModelConfig::from_json("test", s).unwrap()).unwrap();
        initialise(rt, &m, 5).unwrap();
        m
    };
    vec![("full attention", model(rt, 2, false)), ("sliding window, tied", windowed)]
}

#[test]
fn a_changed_token_changes_nothing_in_other_documents() {
    let rt = Runtime::new(1);
    for (name, m) in families(&rt) {
        let docs = [(13, 13), (21, 21), (9, 9), (30, 30)];
        let before = batch(&docs, 1);
        for changed in 0..docs.len() {
            let mut after = before.clone();
            for at in [before.docs[changed].start, before.docs[changed].end - 1] {
                after.ids[at] = (after.ids[at] + 11) % 400;
            }
            let (x, y) = (all_logits(&rt, &m, &before), all_logits(&rt, &m, &after));
            for (d, range) in before.docs.iter().enumerate() {
                let part = range.start * 424..range.end * 424;
                let same = x[part.clone()].iter().zip(&y[part]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert_eq!(same, d != changed, "{name}: document {d} when {changed} changed");
            }
        }
    }
}

/// The gradient of one document's loss does not depend on what it is packed with, to the bit.
#[test]
fn gradients_of_a_document_do_not_feel_its_neighbours() {
    let rt = Runtime::new(1);
    for (name, m) in families(&rt) {
        let params = m.parameters();
        // Only the second document counts.
        let before = batch(&[(13, 0), (21, 9), (9, 0)], 1);
        forward_backward(&m, &env(&rt, &before), &before).unwrap();
        let want = grads(&params);
        clear(&params);
        let mut after = before.clone();
        for d in [0, 2] {
            for at in before.docs[d].clone() {
                after.ids[at] = (after.ids[at] * 3 + 1) % 400;
            }
        }
        forward_backward(&m, &env(&rt, &after), &after).unwrap();
        let got = grads(&params);
        clear(&params);
        for ((p, a), (_, b)) in got.iter().zip(&want) {
            if p.contains("embed_tokens") && m.config().tie_word_embeddings {
                continue; // every row takes part as an output
            }
            let same = a.iter().zip(b).all(|(x, y)| x == y);
            assert!(same, "{name}: {p}");
        }
        // Tokens of the others get no gradient in the embedding.
        if !m.config().tie_word_embeddings {
            let (_, g) = got.iter().find(|(n, _)| n.contains("embed_tokens")).unwrap();
            let own: Vec<u32> = after.ids[after.docs[1].clone()].to_vec();
            for id in after.ids.iter().filter(|id| !own.contains(id)) {
                assert!(g[*id as usize * 32..][..32].iter().all(|&x| x == 0.0), "{name}: id {id}");
            }
        }
    }
}

#[test]
fn packed_and_alone_the_loss_is_the_same() {
    let rt = Runtime::new(1);
    for (name, m) in families(&rt) {
        let params = m.parameters();
        let docs = [(13, 13), (21, 4), (9, 9), (30, 1)];
        let packed = batch(&docs, 1);
        let whole = forward_backward(&m, &env(&rt, &packed), &packed).unwrap();
        let want = grads(&params);
        clear(&params);
        let mut sum = LossCount::default();
        for (d, range) in packed.docs.iter().enumerate() {
            let on: Vec<bool> = (0..docs[d].0).map(|t| t >= docs[d].0 - docs[d].1).collect();
            let alone = phalanx_data::Batch::from_documents([(0, &packed.ids[range.clone()], on.as_slice())]);
            let loss = forward_backward(&m, &env(&rt, &alone), &alone).unwrap();
            assert_eq!(loss, evaluate_batch(&m, &env(&rt, &alone), &alone).unwrap());
            sum.add(loss);
        }
        assert_eq!(sum.count, whole.count);
        assert!((sum.sum - whole.sum).abs() <= 1e-6 * whole.sum, "{name}: {} and {}", sum.sum, whole.sum);
        for ((p, a), (_, b)) in grads(&params).iter().zip(&want) {
            assert!(rel_norm(a, b) <= 2e-6, "{name} {p}: {}", rel_norm(a, b));
        }
    }
}
