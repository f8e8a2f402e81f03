//! `bench train`: tokens a second of whole training steps on random tokens, the same work as
//! `benches/peers/torch_train_bench.py` does in PyTorch: forward, backward, clip, AdamW.

use std::path::Path;

use phalanx_comm::{Communicator, Mesh, MeshShape, run_ranks};
use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, ModelConfig, initialise};
use phalanx_nn::{Batch, DelayedScales, Env};
use phalanx_parallel::{Distributed, Exactness, Plan, Precision};
use phalanx_tensor::rng::Stream;
use phalanx_tensor::{DType, Runtime};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::optimizer::{AdamW, AdamWOptions};
use crate::window::{self, MicroBatch, env_on};
use crate::{Result, TrainError};

/// Named shapes: name, hidden, layers, heads, kv heads, head dim, intermediate, vocabulary, tied.
pub const SHAPES: [(&str, [usize; 7], bool); 3] = [
    ("tiny-15m", [288, 6, 6, 6, 48, 768, 32000], true),
    ("smol-135m", [576, 30, 9, 3, 64, 1536, 49152], true),
    ("qwen3-600m-4l", [1024, 4, 16, 8, 128, 3072, 151_936], true),
];

/// `config.json` of a named shape (a qwen3).
///
/// # Errors
/// If there is no such shape.
pub fn shape_config(name: &str, max_position: usize) -> Result<Value> {
    let Some((_, [h, layers, heads, kv, d, inter, vocab], tied)) = SHAPES.iter().find(|(n, ..)| *n == name) else {
        let known = SHAPES.map(|(n, ..)| n).join(", ");
        return Err(TrainError::setting("shape", format!("\"{name}\" is not one of {known}")));
    };
    Ok(json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab, "hidden_size": h,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d,
        "intermediate_size": inter, "tie_word_embeddings": tied, "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu", "initializer_range": 0.02, "attention_bias": false, "dtype": "float32"
    }))
}

/// Most tokens of a step.
const MOST_TOKENS: usize = 1 << 31;

/// What to run.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// A name of [`SHAPES`].
    pub shape: String,
    /// Sequences a step.
    pub batch: usize,
    /// Tokens a sequence.
    pub seq: usize,
    /// Type that weights are computed with.
    pub dtype: DType,
    /// Steps before the measurement.
    pub warmup: usize,
    /// Measured steps.
    pub steps: usize,
    /// Whether blocks are recomputed.
    pub recompute: bool,
    /// How exact products must be; if left out, as `dtype` says.
    pub arithmetic: Option<Exactness>,
    /// Ranks, each a thread of its own with its share of the threads. Where it is not 1 or `layout` is given, the batch is dealt to the ranks.
    pub ranks: usize,
    /// Mesh and plan; if left out, parameters are sharded over all ranks.
    pub layout: Option<Layout>,
    /// Micro-batches that a rank's sequences are cut into.
    pub micro_batches: usize,
    /// Whether the device's profiler records the measured steps; whoever asks for it stops it.
    pub profile: bool,
}

/// A mesh and how a model lies on it, as a file holds them: `mesh:` and `plan:` of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Layout {
    /// Sizes of the mesh.
    pub mesh: MeshShape,
    /// The plan.
    pub plan: Plan,
}

impl Layout {
    /// Reads a YAML file.
    ///
    /// # Errors
    /// If it cannot be read or holds something else.
    pub fn read(path: &Path) -> Result<Layout> {
        let document = phalanx_config::Document::read(path)?;
        serde_json::from_value(document.root.to_json())
            .map_err(|e| TrainError::setting("plan", format!("{}: {e}", path.display())))
    }
}

/// What a run gave; the names of the peer's fields.
#[derive(Clone, Debug, Serialize)]
pub struct BenchResult {
    /// Which program.
    pub peer: String,
    /// Shape.
    pub shape: String,
    /// Parameters.
    pub params: usize,
    /// `f32` or `bf16`.
    pub dtype: &'static str,
    /// How exact products had to be.
    pub arithmetic: String,
    /// Instruction set that the kernels ran on.
    pub isa: String,
    /// Always false; the peer's field.
    pub compile: bool,
    /// Whether blocks were recomputed.
    pub checkpoint: bool,
    /// Threads, of all ranks together.
    pub threads: usize,
    /// Ranks.
    pub ranks: usize,
    /// The mesh.
    pub mesh: String,
    /// Sequences a step.
    pub batch: usize,
    /// Tokens a sequence.
    pub seq: usize,
    /// Median step, seconds.
    pub step_s: f64,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Model arithmetic a second, 10⁹.
    pub model_gflops: f64,
    /// Peak resident memory of the process, MiB.
    pub peak_rss_mib: u64,
    /// Peak of the tensor pool, MiB, by category and in all.
    pub peak_mib: Value,
    /// Blocks that the tensor pool asked the system for during the measured steps.
    pub system_allocations: usize,
    /// Loss before the first step.
    pub loss_first: f64,
    /// Loss before the last step.
    pub loss_last: f64,
}

/// Runs it.
///
/// # Errors
/// If the shape is unknown or memory runs out.
pub fn bench_train(rt: &Runtime, o: &BenchOptions) -> Result<BenchResult> {
    if o.batch == 0 || o.seq < 2 || o.steps == 0 {
        return Err(TrainError::setting("bench", "needs batch ≥ 1, seq ≥ 2 and steps ≥ 1"));
    }
    // Positions and targets are 32-bit numbers; far below that, no machine has the memory.
    if o.batch.checked_mul(o.seq).is_none_or(|tokens| tokens > MOST_TOKENS) {
        return Err(TrainError::setting(
            "bench",
            format!("{} sequences of {} tokens are more than 2^31 tokens a step; lower batch or seq", o.batch, o.seq),
        ));
    }
    if o.warmup.checked_add(o.steps).is_none() {
        return Err(TrainError::setting("bench", "warmup and steps together are more than can be counted; lower them"));
    }
    if o.ranks == 0 || o.micro_batches == 0 {
        return Err(TrainError::setting("bench", "needs at least one rank and one micro-batch"));
    }
    let mut layout = o.layout.clone().unwrap_or_default();
    if o.layout.is_none() {
        layout.mesh.dp_shard = o.ranks;
    }
    let mesh = layout.mesh;
    let world = mesh.num_ranks()?;
    if o.layout.is_some() && o.ranks != 1 && o.ranks != world {
        let why = format!("is {}, but the plan's mesh ({mesh}) has {world}", o.ranks);
        return Err(TrainError::setting("ranks", why));
    }
    let threads = rt.device().team().threads();
    let measured = if world == 1 {
        rank(rt, o, &layout, None)?
    } else {
        let each = (threads / world).max(1);
        let ranks = run_ranks(world, |comm| rank(&Runtime::try_new(each)?, o, &layout, Some(&comm)));
        let mut ranks = ranks.map_err(|e| TrainError::setting("bench", e.to_string()))?;
        let pools: Vec<_> = ranks.iter().map(|m| m.peak_total).collect();
        let mut first = ranks.swap_remove(0);
        first.peak_mib["ranks"] = json!(pools.iter().map(|b| b >> 20).collect::<Vec<_>>());
        first
    };
    let config = ModelConfig::from_json("shape", shape_config(&o.shape, o.seq.max(2048))?)?;
    let Measured { times, losses, arithmetic, peak_mib, system_allocations, .. } = measured;
    let (mid, tokens) = (times.len() / 2, (o.batch * o.seq) as f64);
    let median = if times.len() % 2 == 1 { times[mid] } else { (times[mid - 1] + times[mid]) / 2.0 };
    let round = |x: f64, digits: i32| (x * 10f64.powi(digits)).round() / 10f64.powi(digits);
    Ok(BenchResult {
        peer: format!("phalanx {}", env!("CARGO_PKG_VERSION")),
        shape: o.shape.clone(),
        params: config.num_params(),
        dtype: if o.dtype == DType::F32 { "f32" } else { "bf16" },
        arithmetic,
        isa: rt.device().isa().to_string(),
        compile: false,
        checkpoint: o.recompute,
        threads: if world == 1 { threads } else { (threads / world).max(1) * world },
        ranks: world,
        mesh: mesh.to_string(),
        batch: o.batch,
        seq: o.seq,
        step_s: round(median, 4),
        tokens_per_s: round(tokens / median, 1),
        model_gflops: round(config.train_flops_per_token(o.seq) * tokens / median / 1e9, 1),
        peak_rss_mib: phalanx_report::ProcessMemory::read().peak >> 20,
        peak_mib,
        system_allocations,
        loss_first: round(losses[0], 4),
        loss_last: round(losses[losses.len() - 1], 4),
    })
}

/// What one rank measured.
struct Measured {
    /// Seconds of the measured steps, ascending.
    times: Vec<f64>,
    losses: Vec<f64>,
    arithmetic: String,
    peak_mib: Value,
    peak_total: usize,
    system_allocations: usize,
}

fn rank(rt: &Runtime, o: &BenchOptions, layout: &Layout, comm: Option<&Communicator>) -> Result<Measured> {
    let config = ModelConfig::from_json("shape", shape_config(&o.shape, o.seq.max(2048))?)?;
    let model = Model::new(&config)?;
    let distributed = match comm {
        None => None,
        Some(comm) => Some(Distributed::new(&model, Mesh::new(comm, layout.mesh)?, layout.plan.parallel.clone())?),
    };
    initialise(rt, &model, 0)?;
    let options =
        AdamWOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decay_norms_and_biases: true };
    let params = model.parameters();
    let mut optimizer = AdamW::new(rt, &params, &|_| o.dtype, options)?;
    let (share, shares) = distributed.as_ref().map_or((0, 1), |d| d.data_share());
    let batches = random_batches(o, config.vocab_size, share, shares);
    let mut plan = layout.plan.clone();
    if o.recompute {
        plan.recompute = vec!["model.layers.{*}".into()];
    }
    plan.precision = vec![("**".into(), if o.dtype == DType::F32 { Precision::F32 } else { Precision::Bf16 })];
    plan.arithmetic.extend(o.arithmetic.map(|a| ("**".into(), a)));
    let resolved = phalanx_parallel::resolve(&phalanx_parallel::sites(&model), &plan).map_err(TrainError::Plan)?;
    let arithmetic = o.arithmetic.map_or_else(|| resolved.arithmetic("lm_head").to_string(), |a| a.to_string());
    let mut env = Env::new(rt.clone(), Batch::causal(&[]));
    env.scales = DelayedScales::new(&model, &resolved).into();
    env.plan = resolved.into();
    if let Some(d) = &distributed {
        env = env_on(&env, d);
    }
    let (mut times, mut losses) = (vec![], vec![]);
    let (mut asked_before, profiler) = (0, rt.device().profiler());
    for i in 0..o.warmup + o.steps {
        if i == o.warmup {
            asked_before = rt.pool().stats().system_allocations;
            if o.profile {
                profiler.start(0);
            }
        }
        let start = std::time::Instant::now();
        let done = window::step(&model, &env, &batches, &mut optimizer, (1e-4, 1.0), distributed.as_ref())?;
        if i >= o.warmup {
            times.push(start.elapsed().as_secs_f64());
        }
        losses.push(done.loss.mean());
    }
    times.sort_by(f64::total_cmp);
    let stats = rt.pool().stats();
    let mut peak: serde_json::Map<String, Value> =
        stats.peak.iter().map(|(k, v)| ((*k).to_owned(), json!(v >> 20))).collect();
    peak.insert("total".into(), json!(stats.peak_total >> 20));
    Ok(Measured {
        times,
        losses,
        arithmetic,
        peak_mib: peak.into(),
        peak_total: stats.peak_total,
        system_allocations: stats.system_allocations - asked_before,
    })
}

/// The micro-batches of one of `shares` shares of a step's sequences.
fn random_batches(o: &BenchOptions, vocab: usize, share: usize, shares: usize) -> Vec<MicroBatch> {
    let s = Stream::new(1, "bench.ids");
    let ids: Vec<u32> = (0..(o.batch * o.seq) as u64).map(|i| (s.uniform(i) * vocab as f32) as u32).collect();
    let trained = vec![true; o.seq];
    let own: Vec<_> = ids.chunks(o.seq).enumerate().skip(share).step_by(shares).collect();
    let each = o.batch.div_ceil(shares).div_ceil(o.micro_batches).max(1);
    let batch = |rows: &[(usize, &[u32])]| {
        TokenBatch::from_documents(rows.iter().map(|(i, d)| (*i as u64, *d, trained.as_slice())))
    };
    let mut out: Vec<TokenBatch> = own.chunks(each).map(batch).collect();
    out.resize_with(o.micro_batches, TokenBatch::default);
    out.into_iter().map(|tokens| MicroBatch { tokens, moment: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_beyond_counting_are_refused() {
        let refused = |batch, seq, warmup, steps| {
            let shape = "tiny-15m".to_owned();
            let (dtype, arithmetic) = (DType::F32, None);
            let (ranks, layout, micro_batches, recompute, profile) = (1, None, 1, false, false);
            let o = BenchOptions {
                shape,
                batch,
                seq,
                dtype,
                warmup,
                steps,
                recompute,
                arithmetic,
                ranks,
                layout,
                micro_batches,
                profile,
            };
            bench_train(&Runtime::new(1), &o).unwrap_err().to_string()
        };
        for (batch, seq) in [(usize::MAX, 512), (4, usize::MAX), (1 << 20, 1 << 20)] {
            let e = refused(batch, seq, 0, 1);
            assert!(e.starts_with("bench: ") && e.contains("lower batch or seq"), "{e}");
        }
        assert!(refused(1, 8, usize::MAX, 1).contains("lower them"));
    }
}
