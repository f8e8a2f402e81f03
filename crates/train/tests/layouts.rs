//! Any layout gives the numbers of one rank.

use phalanx_models::ModelConfig;
use phalanx_train::layouts::{chosen, tiny_models, verify};
use serde_json::{Value, json};

/// The tiny dense model; its head tied to the embedding, or not.
fn dense(tied: bool) -> ModelConfig {
    let (_, config) = tiny_models().unwrap().swap_remove(0);
    let mut raw = Value::Object(config.raw.clone());
    raw["tie_word_embeddings"] = tied.into();
    ModelConfig::from_json("dense", raw).unwrap()
}

fn all_pass(config: &ModelConfig, ranks: usize, only: &str) {
    let cases = chosen(config, ranks, only).unwrap();
    let mut failed = vec![];
    let results = verify(config, &cases, &mut |r| {
        if !r.pass {
            failed.push(format!("{r:#?}"));
        }
    })
    .unwrap();
    assert_eq!(results.len(), cases.len());
    assert!(failed.is_empty(), "{} of {} layouts:\n{}", failed.len(), cases.len(), failed.join("\n"));
}

#[test]
fn every_layout_of_up_to_six_ranks() {
    all_pass(&dense(true), 6, "");
}

/// Six query heads over three key heads, biases everywhere (those of row layers too), no norms of heads.
fn biased() -> ModelConfig {
    let config: Value = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 101, "hidden_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
        "intermediate_size": 42, "tie_word_embeddings": false, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu", "initializer_range": 0.2, "attention_bias": true, "mlp_bias": true, "dtype": "float32"
    });
    ModelConfig::from_json("biased", config).unwrap()
}

#[test]
fn with_biases_and_three_key_heads() {
    all_pass(&biased(), 6, "tp");
}

#[test]
fn with_experts_and_with_latent_attention() {
    for (name, config) in tiny_models().unwrap().split_off(1) {
        println!("{name}");
        all_pass(&config, 4, "");
    }
}

/// Blocks 3 to 5 see 7 tokens, and all heads share one key head: every rank that works on some of them needs it.
#[test]
fn sliding_windows_over_pieces_of_sequences() {
    let (_, config) = tiny_models().unwrap().swap_remove(0);
    let mut raw = Value::Object(config.raw.clone());
    raw["use_sliding_window"] = true.into();
    raw["sliding_window"] = 7.into();
    raw["max_window_layers"] = 3.into();
    raw["num_key_value_heads"] = 1.into();
    let config = ModelConfig::from_json("sliding", raw).unwrap();
    assert_eq!(config.windows, [None, None, None, Some(7), Some(7), Some(7)]);
    all_pass(&config, 3, "cp3");
    all_pass(&config, 4, "cp4");
}

#[test]
fn with_a_head_of_its_own() {
    all_pass(&dense(false), 4, "");
}

/// Gradients when only some parameters train: adapters, or biases alone. Which tensor-parallel rank forms what is another question then.
mod partly_trained {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use phalanx_comm::{Mesh, MeshShape, run_ranks};
    use phalanx_data::Batch as TokenBatch;
    use phalanx_models::{Model, ModelConfig, initialise};
    use phalanx_nn::{AdapterSet, Batch, Env, LowRank, Parameter, init};
    use phalanx_parallel::tensor::Style;
    use phalanx_parallel::{Distributed, ParallelPlan, Plan, resolve, sites};
    use phalanx_tensor::Runtime;
    use phalanx_testkit::rel_norm;
    use phalanx_train::TrainError;
    use phalanx_train::step::LossCount;
    use phalanx_train::window::{MicroBatch, env_on, gradients};

    #[derive(Clone, Copy, PartialEq)]
    enum Trained {
        /// Adapters beside all linear layers.
        Adapters,
        /// Biases of row layers: one rank adds them, all must take part in what follows.
        RowBiases,
    }

    struct Setting {
        trained: Trained,
        mesh: MeshShape,
        recompute: bool,
        styles: &'static [(&'static str, Style)],
    }

    /// A gradient: the runs of the whole that it is of, and its values.
    type Gradients = BTreeMap<String, (Vec<(usize, usize)>, Vec<f32>)>;

    fn adapters(model: &Model) -> AdapterSet {
        let parameters = model.parameters();
        let linear = sites(model).into_iter().filter(|s| s.kind == "linear");
        let by_path = linear.map(|site| {
            let name = format!("{}.weight", site.path);
            let [out, inputs] = parameters.iter().find(|p| p.name() == name).unwrap().shape() else { unreachable!() };
            let a = Parameter::new(format!("{}.lora_A", site.path), &[2, *inputs]);
            let b = Parameter::new(format!("{}.lora_B", site.path), &[*out, 2]);
            (site.path, Arc::new(LowRank { a, b, scale: 0.5, dropout: 0.25 }))
        });
        AdapterSet { by_path: by_path.collect() }
    }

    fn run(config: &ModelConfig, s: &Setting) -> Vec<(LossCount, Gradients)> {
        run_ranks(s.mesh.num_ranks().unwrap(), |comm| {
            let rt = Runtime::try_new(1)?;
            let model = Model::new(config)?;
            let set = match s.trained {
                Trained::Adapters => adapters(&model),
                Trained::RowBiases => AdapterSet::default(),
            };
            let mut plan = ParallelPlan::default();
            plan.tensor.styles = s.styles.iter().map(|&(p, style)| (p.into(), style)).collect();
            let d = Distributed::with_adapters(&model, &set, Mesh::new(&comm, s.mesh)?, plan)?;
            initialise(&rt, &model, 5)?;
            for p in model.parameters() {
                p.set_trainable(s.trained == Trained::RowBiases && p.name().ends_with("o_proj.bias"));
            }
            let mut trained: Vec<Parameter> = model.parameters().into_iter().filter(Parameter::trainable).collect();
            trained.extend(set.parameters());
            trained.iter().try_for_each(|p| init::normal(&rt, p, 5, 0.3))?;
            let mut env = env_on(&Env::new(rt, Batch::causal(&[])), &d);
            (env.adapters, env.training, env.seed) = (Arc::new(set), true, 3);
            if s.recompute {
                let plan = Plan { recompute: vec!["model.layers.{*}.self_attn".into()], ..Plan::default() };
                env.plan = Arc::new(resolve(&sites(&model), &plan).unwrap());
            }
            let document = |from: u32, len: u32| ((from..from + len).collect::<Vec<u32>>(), vec![true; len as usize]);
            // 23 rows; 2 rows, fewer than ranks; none.
            let batches = [vec![document(3, 9), document(40, 14)], vec![document(70, 2)], vec![]].map(|documents| {
                let documents = documents.iter().map(|(ids, trained)| (0, ids.as_slice(), trained.as_slice()));
                TokenBatch::from_documents(documents)
            });
            let batch = |(i, tokens)| MicroBatch { tokens, moment: i as u64 };
            let batches: Vec<MicroBatch> = batches.into_iter().enumerate().map(batch).collect();
            let (loss, _) = gradients(&model, &env, &batches, Some(&d))?;
            let gradient = |p: &Parameter| {
                let values = p.kept_grad().get().unwrap().f32().unwrap().to_vec();
                (p.name().to_owned(), (p.placement().kept_runs(p.shape()), values))
            };
            Ok::<_, TrainError>((loss, trained.iter().map(gradient).collect()))
        })
        .unwrap()
    }

    fn check(config: &ModelConfig, s: Setting) {
        let one = run(config, &Setting { mesh: MeshShape::default(), recompute: false, styles: &[], ..s });
        let (want_loss, want) = &one[0];
        for (rank, (loss, got)) in run(config, &s).into_iter().enumerate() {
            assert_eq!(loss.count, want_loss.count);
            assert!((loss.sum / want_loss.sum - 1.0).abs() < 1e-6, "{} against {}", loss.sum, want_loss.sum);
            assert_eq!(got.len(), want.len());
            for (name, (runs, values)) in got {
                let whole = &want[&name].1;
                let part: Vec<f32> = runs.iter().flat_map(|&(at, n)| whole[at..at + n].to_vec()).collect();
                assert!(part.iter().any(|&x| x != 0.0), "{name} has no gradient");
                let error = rel_norm(&values, &part);
                assert!(error < 1e-5, "rank {rank}, {name}: {error:e}");
            }
        }
    }

    const TP2: MeshShape = MeshShape { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 2, ep: 1 };

    #[test]
    fn adapters_are_cut_as_the_layers_beside_them_and_drop_the_same_elements() {
        // With three ranks a key head each, with six a key head for two ranks.
        for tp in [3, 6] {
            let mesh = MeshShape { tp, ..TP2 };
            let s = Setting { trained: Trained::Adapters, mesh, recompute: tp == 3, styles: &[] };
            check(&super::biased(), s);
        }
        let styles = &[("**.self_attn", Style::Replicate), ("**.mlp", Style::Sequence)];
        check(&super::dense(true), Setting { trained: Trained::Adapters, mesh: TP2, recompute: false, styles });
    }

    #[test]
    fn a_bias_that_one_rank_adds_is_trained_alone() {
        let mesh = MeshShape { tp: 3, ..TP2 };
        check(&super::biased(), Setting { trained: Trained::RowBiases, mesh, recompute: false, styles: &[] });
    }
}
