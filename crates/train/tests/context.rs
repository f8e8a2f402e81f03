//! Context parallelism with whole models: beside recompute, accumulation, micro-batches without rows or targets, and evaluation.

use phalanx_comm::{Mesh, MeshShape, run_ranks};
use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, ModelConfig, initialise};
use phalanx_nn::{Batch, Env};
use phalanx_parallel::context::ContextForm;
use phalanx_parallel::fsdp::Reshard;
use phalanx_parallel::{Distributed, ParallelPlan, Plan, resolve, sites};
use phalanx_tensor::Runtime;
use phalanx_testkit::rel_norm;
use phalanx_train::TrainError;
use phalanx_train::layouts::tiny_models;
use phalanx_train::step::evaluate_batch;
use phalanx_train::window::{MicroBatch, env_on, gradients};
use serde_json::Value;

const FORMS: [ContextForm; 4] =
    [ContextForm::AllGather, ContextForm::Ring, ContextForm::Ulysses, ContextForm::Hybrid { ulysses: 2 }];

fn config() -> ModelConfig {
    let (_, config) = tiny_models().unwrap().swap_remove(0);
    let mut raw = Value::Object(config.raw.clone());
    raw["tie_word_embeddings"] = false.into();
    raw["use_sliding_window"] = true.into();
    raw["sliding_window"] = 6.into();
    raw["max_window_layers"] = 3.into();
    ModelConfig::from_json("untied", raw).unwrap()
}

/// Documents of these lengths; which tokens are trained on is up to `trained`, given document and token.
fn batch(lens: &[usize], trained: impl Fn(usize, usize) -> bool) -> TokenBatch {
    let documents: Vec<(Vec<u32>, Vec<bool>)> = lens
        .iter()
        .enumerate()
        .map(|(d, &n)| {
            ((0..n).map(|t| ((37 * d + 11 * t + t * t) % 97) as u32).collect(), (0..n).map(|t| trained(d, t)).collect())
        })
        .collect();
    TokenBatch::from_documents(documents.iter().map(|(ids, trained)| (0, ids.as_slice(), trained.as_slice())))
}

#[derive(Clone, Default)]
struct Run {
    loss: f64,
    targets: u64,
    tokens: u64,
    evaluated: f64,
    /// Name and whole gradient.
    gradients: Vec<(String, Vec<f32>)>,
}

/// A window on `cp` ranks.
fn run(batches: &[TokenBatch], cp: usize, plan: &ParallelPlan, recompute: &str) -> Run {
    let config = config();
    let ranks = run_ranks(cp, |comm| {
        let rt = Runtime::try_new(1)?;
        let model = Model::new(&config)?;
        let mesh = Mesh::new(&comm, MeshShape { cp, ..MeshShape::default() })?;
        let distributed = Distributed::new(&model, mesh, plan.clone())?;
        initialise(&rt, &model, 3)?;
        let mut env = env_on(&Env::new(rt.clone(), Batch::causal(&[])), &distributed);
        let settings: Plan = serde_json::from_str(recompute).expect("a plan");
        env.plan = resolve(&sites(&model), &settings).expect("it resolves").into();
        let window: Vec<MicroBatch> = batches
            .iter()
            .enumerate()
            .map(|(i, tokens)| MicroBatch { tokens: tokens.clone(), moment: i as u64 })
            .collect();
        let (loss, tokens) = gradients(&model, &env, &window, Some(&distributed))?;
        let mut evaluated = [0.0];
        for tokens in batches {
            evaluated[0] += evaluate_batch(&model, &env, tokens)?.sum;
        }
        distributed.sum_over_data(&mut evaluated)?;
        let mut own = vec![];
        for p in model.parameters() {
            let values = p.kept_grad().get().map_or(Ok(vec![]), |g| rt.to_vec(&g))?;
            own.push((p.name().to_owned(), values));
        }
        Ok::<_, TrainError>(Run {
            loss: loss.sum,
            targets: loss.count,
            tokens,
            evaluated: evaluated[0],
            gradients: own,
        })
    })
    .unwrap();
    // Rows are dealt to the ranks in order.
    let mut whole = ranks[0].clone();
    for rank in &ranks[1..] {
        assert_eq!((rank.loss, rank.targets, rank.tokens), (whole.loss, whole.targets, whole.tokens));
        for ((_, whole), (_, own)) in whole.gradients.iter_mut().zip(&rank.gradients) {
            whole.extend(own);
        }
    }
    whole
}

fn assert_same(got: &Run, one: &Run, what: &str) {
    let relative = |a: f64, b: f64| if a == b { 0.0 } else { ((a - b) / b).abs() };
    assert!(relative(got.loss, one.loss) < 1e-6, "loss of {what}: {} {}", got.loss, one.loss);
    assert!(relative(got.evaluated, one.evaluated) < 1e-6, "evaluated, {what}: {} {}", got.evaluated, one.evaluated);
    assert_eq!((got.targets, got.tokens), (one.targets, one.tokens), "{what}");
    for ((name, got), (_, one)) in got.gradients.iter().zip(&one.gradients) {
        // A gradient of zeros may be none at all on one rank.
        let one = if one.is_empty() { &vec![0.0; got.len()] } else { one };
        assert!(rel_norm(got, one) < 1e-5, "gradient of {name}, {what}: {}", rel_norm(got, one));
        assert!(got.iter().all(|g| g.is_finite()));
    }
}

#[test]
fn recompute_accumulation_and_micro_batches_without_rows_or_targets() {
    let window = [
        batch(&[17, 1, 40, 6], |_, t| t > 3),
        batch(&[], |_, _| true),
        batch(&[3], |_, _| true),
        batch(&[12, 9], |_, _| false),
        // All targets are in the rows of one rank.
        batch(&[50], |_, t| t == 2 || t == 3),
    ];
    let one = run(&window, 1, &ParallelPlan::default(), "{}");
    assert_eq!(one.tokens, 64 + 3 + 21 + 50);
    let reshards = [Reshard::AfterForward, Reshard::AfterBackward, Reshard::AfterStep];
    for (i, context) in FORMS.into_iter().enumerate() {
        let plan = ParallelPlan { context, reshard: reshards[i % 3], ..ParallelPlan::default() };
        for recompute in
            ["{}", r#"{"recompute": "model.layers.{*}"}"#, r#"{"recompute": "model.layers.{1-4}.self_attn"}"#]
        {
            assert_same(&run(&window, 4, &plan, recompute), &one, &format!("{context:?}, {recompute}"));
        }
    }
}

#[test]
fn a_window_without_any_target_has_a_loss_of_zero_and_finite_gradients() {
    let window = [batch(&[30, 4], |_, _| false), batch(&[], |_, _| true)];
    let one = Run { tokens: 34, ..Run::default() };
    for context in FORMS {
        let got = run(&window, 4, &ParallelPlan { context, ..ParallelPlan::default() }, "{}");
        assert_eq!((got.loss, got.targets, got.tokens, got.evaluated), (0.0, 0, one.tokens, 0.0));
        assert!(got.gradients.iter().all(|(_, g)| g.iter().all(|&g| g == 0.0)), "{context:?}");
    }
}

#[test]
fn documents_in_a_pack_do_not_see_each_other() {
    // Only the second document is trained on, and only it has the ids that it has.
    let pack = |changed: Option<usize>| {
        let mut b = batch(&[23, 31, 14], |d, _| d == 1);
        (0..23).chain(54..68).for_each(|t| b.ids[t] = 98 + (t % 4) as u32);
        if let Some(t) = changed {
            b.ids[t] = 102;
        }
        [b]
    };
    for context in FORMS {
        let plan = ParallelPlan { context, ..ParallelPlan::default() };
        let before = run(&pack(None), 4, &plan, "{}");
        let embedding = &before.gradients.iter().find(|(name, _)| name.contains("embed_tokens")).unwrap().1;
        let width = embedding.len() / 103;
        assert!(embedding[98 * width..].iter().all(|&g| g == 0.0), "{context:?}: no gradient crosses a border");
        assert!(embedding[..98 * width].iter().any(|&g| g != 0.0));
        for changed in [0, 22, 54, 67] {
            let after = run(&pack(Some(changed)), 4, &plan, "{}");
            assert_eq!(before.loss.to_bits(), after.loss.to_bits(), "{context:?}, token {changed}");
        }
    }
}
