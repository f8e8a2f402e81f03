//! A tiny model folder, tiny data, and runs through the public interface.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use phalanx_config::{Config, Stage};
use phalanx_data::{Batch as TokenBatch, prepare};
use phalanx_formats::WeightFolder;
use phalanx_models::{Model, ModelConfig, StoredDType, initialise, save_weights};
use phalanx_nn::{Env, Parameter};
use phalanx_report::Step;
use phalanx_tensor::Runtime;
use phalanx_train::Result;
use phalanx_train::job::{Job, Use, data_options};
use phalanx_train::resume::starting_point;
use phalanx_train::step::layout;
use phalanx_train::trainer::{Finished, Observer, train};
use serde_json::{Value, json};

/// A folder that is gone when the test is over.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("phalanx-train-{name}-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Rows of the tiny tokenizer, rounded up.
pub const VOCAB: usize = 424;

pub fn shape(layers: usize, tied: bool) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "tie_word_embeddings": tied, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "initializer_range": 0.1
    })
}

pub fn model(rt: &Runtime, layers: usize, tied: bool) -> Model {
    model_of(rt, shape(layers, tied))
}

pub fn model_of(rt: &Runtime, shape: Value) -> Model {
    let m = Model::new(&ModelConfig::from_json("test", shape).unwrap()).unwrap();
    initialise(rt, &m, 5).unwrap();
    m
}

/// `shape` with experts in all blocks but the first: 5 of them, 2 a token.
pub fn moe_shape(family: &str, layers: usize) -> Value {
    let mut c = shape(layers, false);
    let more = match family {
        "qwen3_moe" => json!({"num_experts": 5, "norm_topk_prob": true, "mlp_only_layers": [0],
            "output_router_logits": true, "router_aux_loss_coef": 0.1}),
        _ => json!({"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 5, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1}),
    };
    let rest = json!({"model_type": family, "num_experts_per_tok": 2, "moe_intermediate_size": 20});
    for (k, v) in more.as_object().unwrap().iter().chain(rest.as_object().unwrap()) {
        c[k] = v.clone();
    }
    c
}

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// A Hugging Face folder with random weights and the tiny tokenizer.
pub fn write_model(dir: &Path, layers: usize, tied: bool, dtype: StoredDType) {
    write_model_of(dir, shape(layers, tied), dtype);
}

pub fn write_model_of(dir: &Path, shape: Value, dtype: StoredDType) {
    std::fs::create_dir_all(dir).unwrap();
    let rt = Runtime::new(1);
    let m = model_of(&rt, shape);
    save_weights(&rt, &m, dir, dtype, 1 << 30, &|_: &Parameter| Ok(None)).unwrap();
    std::fs::write(dir.join("config.json"), m.config().to_json(dtype).to_string()).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/fixtures/tiny-chatml");
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        std::fs::copy(tokenizer.join(file), dir.join(file)).unwrap();
    }
}

/// `n` prompts with answers of very unequal length.
pub fn write_data(path: &Path, n: usize) {
    let words = ["red", "fish", "runs", "home", "little", "tree", "and", "sings", "two", "blue"];
    let text =
        |seed: usize, len: usize| (0..len).map(|i| words[(seed * 7 + i * i + i) % 10]).collect::<Vec<_>>().join(" ");
    let rows: Vec<Value> = (0..n)
        .map(|i| json!({"instruction": text(i, 2 + i % 3), "input": "", "output": text(i + 3, 1 + (i * 5) % 13)}))
        .collect();
    std::fs::write(path, serde_json::to_string(&rows).unwrap()).unwrap();
}

/// A scratch folder with `model/` and `data.json`.
pub struct Bench {
    pub scratch: Scratch,
}

impl Bench {
    pub fn new(name: &str, rows: usize) -> Bench {
        let scratch = Scratch::new(name);
        write_model(&scratch.path("model"), 2, false, StoredDType::F32);
        write_data(&scratch.path("data.json"), rows);
        Bench { scratch }
    }

    pub fn out(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// A configuration: the common keys, with `keys` over them.
    pub fn config(&self, out: &str, keys: &str) -> Config {
        Config::parse(&self.yaml(out, keys), "run.yaml", &[]).unwrap()
    }

    pub fn yaml(&self, out: &str, keys: &str) -> String {
        let mut all: Vec<(String, String)> = vec![];
        let model = self.scratch.path("model").display().to_string();
        let data = self.scratch.path("data.json").display().to_string();
        let out = self.scratch.path(out).display().to_string();
        let common = format!(
            "model_name_or_path: {model}\ndataset: {data}\noutput_dir: {out}\ntemplate: chatml\ncutoff_len: 64\nstage: sft\n\
             finetuning_type: full\nlearning_rate: 1e-2\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 3\n\
             num_train_epochs: 2\nlogging_steps: 1\nsave_steps: 1000\nreport_to: none\nthreads: 1\n"
        );
        for line in common.lines().chain(keys.lines()).map(str::trim).filter(|l| !l.is_empty()) {
            let (key, value) = line.split_once(':').unwrap();
            all.retain(|(k, _)| k != key);
            if value.trim() != "DROP" {
                all.push((key.to_owned(), value.to_owned()));
            }
        }
        all.iter().map(|(k, v)| format!("{k}:{v}\n")).collect()
    }
}

/// What a run showed; stops it after a step if asked to.
#[derive(Debug, Default)]
pub struct Watch<'a> {
    pub steps: Vec<(u64, f64, f64)>,
    pub samples: Vec<Vec<u64>>,
    pub messages: Vec<String>,
    stop: Option<(u64, &'a AtomicBool)>,
}

impl Observer for Watch<'_> {
    fn message(&mut self, text: &str) {
        self.messages.push(text.into());
    }
    fn step(&mut self, s: &Step, _logged: bool) {
        self.steps.push((s.step, s.loss, s.grad_norm));
        if let Some((at, flag)) = self.stop.filter(|(at, _)| *at == s.step) {
            let _ = at;
            flag.store(true, Ordering::Relaxed);
        }
    }
    fn samples(&mut self, ids: &[u64]) {
        self.samples.push(ids.to_vec());
    }
}

/// A job with its data, ready to train.
pub fn prepared(config: Config) -> Result<(Job, phalanx_data::Prepared)> {
    let job = Job::prepare(config, Use::Train)?;
    let tokenizer = job.tokenizer()?;
    let template = match job.config.method.stage {
        Stage::Pt => None,
        Stage::Sft => Some(job.template(&tokenizer)?.0),
    };
    let data = prepare(&data_options(&job.config), &tokenizer, template.as_ref(), &|_| {})?;
    Ok((job, data))
}

/// A whole run as `phalanx train` does it, stopped by hand after step `stop`.
pub fn run(config: Config, stop: Option<u64>) -> Result<(Finished, Watch<'static>)> {
    let start = starting_point(&config)?;
    let (mut job, data) = prepared(config)?;
    let flag = AtomicBool::new(false);
    let mut watch = Watch { stop: stop.map(|s| (s, &flag)), ..Watch::default() };
    let finished = train(&mut job, data.train, data.eval, &start, &flag, &mut watch)?;
    let Watch { steps, samples, messages, .. } = watch;
    Ok((finished, Watch { steps, samples, messages, stop: None }))
}

/// Lines of metrics.jsonl that hold a training loss: step, loss, gradient norm, learning rate.
pub fn metrics(out: &Path) -> Vec<[f64; 4]> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    lines
        .filter(|v| v.get("loss").is_some())
        .map(|v| ["step", "loss", "grad_norm", "learning_rate"].map(|k| v[k].as_f64().unwrap_or(f64::NAN)))
        .collect()
}

/// Every tensor of a folder's weights by name.
pub fn weights(dir: &Path) -> Vec<(String, Vec<f32>)> {
    let adapter = dir.join("adapter_model.safetensors");
    let folder = if adapter.exists() { WeightFolder::open_file(adapter) } else { WeightFolder::open(dir) }.unwrap();
    let names: Vec<String> = folder.names().map(str::to_owned).collect();
    names.into_iter().map(|n| (n.clone(), folder.get(&n).unwrap().to_f32().unwrap())).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[track_caller]
pub fn assert_same_weights(a: &Path, b: &Path) {
    let (a, b) = (weights(a), weights(b));
    assert_eq!(a.len(), b.len());
    for ((name, x), (other, y)) in a.iter().zip(&b) {
        assert_eq!(name, other);
        assert!(bits(x) == bits(y), "{name} differs");
    }
}

/// Documents of the given lengths; of each only the last `trained` tokens count.
pub fn batch(docs: &[(usize, usize)], seed: u32) -> TokenBatch {
    let all: Vec<(Vec<u32>, Vec<bool>)> = docs
        .iter()
        .enumerate()
        .map(|(d, &(len, trained))| {
            let start = u64::from(seed) + d as u64 * 131;
            let ids = (0..len as u64).map(|t| ((start + t * 37 + t * t) * 2_654_435 % VOCAB as u64) as u32);
            (ids.collect(), (0..len).map(|t| t >= len - trained).collect())
        })
        .collect();
    TokenBatch::from_documents(all.iter().enumerate().map(|(i, (ids, on))| (i as u64, ids.as_slice(), on.as_slice())))
}

pub fn env(rt: &Runtime, batch: &TokenBatch) -> Env {
    Env::new(rt.clone(), layout(batch))
}

/// Gradients by name; a parameter without one is left out.
pub fn grads(params: &[Parameter]) -> Vec<(String, Vec<f32>)> {
    params.iter().filter_map(|p| Some((p.name().to_owned(), p.grad().get()?.f32().unwrap().to_vec()))).collect()
}

pub fn clear(params: &[Parameter]) {
    params.iter().for_each(|p| drop(p.grad().take()));
}

pub fn value(p: &Parameter) -> Vec<f32> {
    Runtime::new(1).to_vec(&p.value().unwrap()).unwrap()
}
