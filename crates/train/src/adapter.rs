//! LoRA adapters: made, read and written as PEFT does.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_formats::{Dtype, SafetensorsWriter, TensorSpec, WeightFolder, atomic};
use phalanx_models::Model;
use phalanx_nn::{AdapterSet, LowRank, Parameter, ResolvedPlan, init};
use phalanx_parallel::Site;
use phalanx_tensor::{Category, DType, Runtime};
use serde_json::{Value, json};

use crate::{Result, TrainError};

/// Prefix that PEFT puts before every name.
const PREFIX: &str = "base_model.model.";

/// The two uses of a tied weight. PEFT copies a module of `modules_to_save` and leaves the other on the base model's weight, so a
/// trained tied weight stands in the file under both names (what PEFT itself does with `ensure_weight_tying`).
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// `init_lora_weights` that leave the base model's weights as they are. The others (pissa, olora, corda, loftq, lora_ga) take
/// something out of them, and the adapter is right on the changed model only.
fn leaves_base(init: &Value) -> bool {
    matches!(init, Value::Null | Value::Bool(_)) || matches!(init.as_str(), Some("gaussian" | "eva" | "orthogonal"))
}

/// Settings of new adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraOptions {
    /// Rank.
    pub rank: usize,
    /// Scale before the division by rank.
    pub alpha: f64,
    /// Dropout on the adapter's input.
    pub dropout: f32,
    /// Divide alpha by √rank instead of rank.
    pub rslora: bool,
}

impl LoraOptions {
    /// Factor of an adapter of some rank.
    pub fn scale(&self, rank: usize) -> f32 {
        let r = rank as f64;
        (self.alpha / if self.rslora { r.sqrt() } else { r }) as f32
    }
}

/// New adapters where the plan has them: A uniform in ±1/√in (Kaiming, as PEFT), B zero, so that nothing changes at first.
///
/// # Errors
/// If memory runs out, or a rank is 0 or beyond the layer.
pub fn create(
    rt: &Runtime,
    sites: &[Site],
    shape_of: &dyn Fn(&str) -> Option<Vec<usize>>,
    plan: &ResolvedPlan,
    o: LoraOptions,
    seed: u64,
) -> Result<AdapterSet> {
    let mut by_path = BTreeMap::new();
    for site in sites.iter().filter(|s| plan.modules.get(&s.path).is_some_and(|m| m.adapter)) {
        let weight = format!("{}.weight", site.path);
        let Some([outputs, inputs]) = shape_of(&weight).and_then(|s| <[usize; 2]>::try_from(s).ok()) else { continue };
        if o.rank == 0 || o.rank > inputs.min(outputs) {
            return Err(TrainError::setting(
                "lora_rank",
                format!(
                    "{} does not fit {} [{outputs}, {inputs}]; use 1 to {}",
                    o.rank,
                    site.path,
                    inputs.min(outputs)
                ),
            ));
        }
        let a = Parameter::new(format!("{PREFIX}{}.lora_A.weight", site.path), &[o.rank, inputs]);
        let b = Parameter::new(format!("{PREFIX}{}.lora_B.weight", site.path), &[outputs, o.rank]);
        init::uniform(rt, &a, seed, 1.0 / (inputs as f32).sqrt())?;
        init::constant(rt, &b, 0.0)?;
        by_path.insert(site.path.clone(), Arc::new(LowRank { a, b, scale: o.scale(o.rank), dropout: o.dropout }));
    }
    Ok(AdapterSet { by_path })
}

/// What an adapter folder holds.
pub struct Loaded {
    /// The adapters.
    pub adapters: AdapterSet,
    /// Their settings.
    pub options: LoraOptions,
    /// Fully trained parameters that replace the base model's, by name (`modules_to_save`).
    pub replaced: BTreeMap<String, Vec<f32>>,
}

/// Reads a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`) for a model whose parameter shapes `shape_of` knows.
///
/// # Errors
/// If a file is missing or damaged, asks for something unsupported, or does not fit the model.
pub fn load(rt: &Runtime, dir: &Path, shape_of: &dyn Fn(&str) -> Option<Vec<usize>>) -> Result<Loaded> {
    let path = dir.join("adapter_config.json");
    let bad = |why: String| TrainError::Adapter { path: path.clone(), why };
    let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
    let c: Value = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
    if c["peft_type"] != "LORA" {
        return Err(bad(format!("peft_type {} is not supported, only LORA", c["peft_type"])));
    }
    for (key, neutral) in [
        ("use_dora", json!(false)),
        ("fan_in_fan_out", json!(false)),
        ("bias", json!("none")),
        ("rank_pattern", json!({})),
        ("alpha_pattern", json!({})),
        ("layer_replication", Value::Null),
        ("use_qalora", json!(false)),
        ("layers_to_transform", Value::Null),
        ("layers_pattern", Value::Null),
        ("target_parameters", Value::Null),
    ] {
        if c.get(key).is_some_and(|v| !v.is_null() && *v != neutral) {
            return Err(bad(format!("{key}: {} is not supported", c[key])));
        }
    }
    if !leaves_base(&c["init_lora_weights"]) {
        return Err(bad(format!(
            "init_lora_weights: {} changed the base model's weights, so this adapter does not fit the model as it was published; \
             let PEFT convert it (save_pretrained with path_initial_model_for_weight_conversion)",
            c["init_lora_weights"]
        )));
    }
    let must = |key: &str, what: &str| bad(format!("{key}: must be {what}, found {}", c[key]));
    let rank = c["r"].as_u64().filter(|&r| r > 0).ok_or_else(|| must("r", "a whole number of at least 1"))?;
    let alpha = c["lora_alpha"].as_f64().ok_or_else(|| must("lora_alpha", "a number"))?;
    let rslora = match &c["use_rslora"] {
        Value::Null => false,
        v => v.as_bool().ok_or_else(|| must("use_rslora", "true or false"))?,
    };
    let options =
        LoraOptions { rank: rank as usize, alpha, dropout: c["lora_dropout"].as_f64().unwrap_or(0.0) as f32, rslora };
    let folder = WeightFolder::open_file(dir.join("adapter_model.safetensors"))?;
    let file = dir.join("adapter_model.safetensors");
    let bad = |why: String| TrainError::Adapter { path: file.clone(), why };
    let (mut halves, mut replaced) = (BTreeMap::<String, [Option<Parameter>; 2]>::new(), BTreeMap::new());
    let tied = shape_of(HEAD).is_none() && shape_of(EMBEDDING).is_some();
    let names: Vec<String> = folder.names().map(str::to_owned).collect();
    for name in names {
        let Some(rest) = name.strip_prefix(PREFIX) else {
            return Err(bad(format!("tensor {name} has not PEFT's prefix {PREFIX}")));
        };
        let view = folder.get(&name)?;
        if let Some(i) = view.first_non_finite()? {
            return Err(bad(format!(
                "tensor {name} is not finite at element {i}; the file is damaged or its run diverged"
            )));
        }
        let half = ["A", "B"].iter().position(|h| rest.ends_with(&format!(".lora_{h}.weight")));
        match half {
            Some(h) => {
                let module = &rest[..rest.len() - ".lora_A.weight".len()];
                let shape = view.shape.to_vec();
                let Some([outputs, inputs]) =
                    shape_of(&format!("{module}.weight")).and_then(|s| <[usize; 2]>::try_from(s).ok())
                else {
                    return Err(bad(format!(
                        "tensor {name}: the model has no linear layer {module}; is this adapter for another model?"
                    )));
                };
                let want = if h == 0 { [options.rank, inputs] } else { [outputs, options.rank] };
                if shape != want {
                    return Err(bad(format!(
                        "tensor {name} has shape {shape:?}, this model and r = {rank} need {want:?}"
                    )));
                }
                let p = Parameter::new(name.clone(), &shape);
                let mut t = rt.empty(&shape, DType::F32, Category::Weights)?;
                view.read_f32_at(0, t.f32_mut()?)?;
                p.set(t)?;
                halves.entry(module.to_owned()).or_default()[h] = Some(p);
            }
            None => {
                let Some(want) = shape_of(if tied && rest == HEAD { EMBEDDING } else { rest }) else {
                    return Err(bad(format!("tensor {name} is neither a low-rank half nor a parameter of the model")));
                };
                if view.shape != want {
                    return Err(bad(format!("tensor {name} has shape {:?}, the model needs {want:?}", view.shape)));
                }
                replaced.insert(rest.to_owned(), view.to_f32()?);
            }
        }
    }
    if tied {
        join_tied(&mut replaced).map_err(bad)?;
    }
    let mut by_path = BTreeMap::new();
    for (module, pair) in halves {
        let [Some(a), Some(b)] = pair else {
            return Err(bad(format!("{module} has only one of lora_A and lora_B; the file is incomplete")));
        };
        let scale = options.scale(options.rank);
        by_path.insert(module, Arc::new(LowRank { a, b, scale, dropout: options.dropout }));
    }
    if by_path.is_empty() && replaced.is_empty() {
        return Err(bad("holds no adapter".into()));
    }
    Ok(Loaded { adapters: AdapterSet { by_path }, options, replaced })
}

/// Of a tied weight's two entries, keeps that of the embedding.
fn join_tied(replaced: &mut BTreeMap<String, Vec<f32>>) -> Result<(), String> {
    let (one, other) = match (replaced.remove(HEAD), replaced.get(EMBEDDING)) {
        (None, None) => return Ok(()),
        (Some(head), Some(embedding)) if head == *embedding => return Ok(()),
        (Some(_), Some(_)) => {
            return Err(format!(
                "{EMBEDDING} and {HEAD} differ, and this model uses one weight for both (tie_word_embeddings); \
                 untie the base model, or train the adapter with ensure_weight_tying"
            ));
        }
        (Some(_), None) => (HEAD, EMBEDDING),
        (None, Some(_)) => (EMBEDDING, HEAD),
    };
    Err(format!(
        "holds {one} but not {other}, and this model uses one weight for both (tie_word_embeddings), of which PEFT would change \
         one use only; untie the base model, or train the adapter with ensure_weight_tying"
    ))
}

/// What an adapter was trained on.
#[derive(Clone, Copy, Debug)]
pub struct StandsOn<'a> {
    /// The base model.
    pub model: &'a str,
    /// Adapters that had been merged into it, in order.
    pub merged: &'a [PathBuf],
}

/// Key of ours in `adapter_config.json`: adapters that the base model is to be merged with first. PEFT passes over it.
const MERGED: &str = "phalanx_merged_adapters";

/// The adapters that must be merged into the base model before the one in `dir` is right.
///
/// # Errors
/// If its configuration cannot be read.
pub fn merged_before(dir: &Path) -> Result<Vec<PathBuf>> {
    let path = dir.join("adapter_config.json");
    if let (false, Some((_, last))) = (path.exists(), crate::checkpoint::all(dir).last()) {
        let why = format!("holds a run that was stopped, and no finished adapter; use {}", last.display());
        return Err(TrainError::Adapter { path: dir.to_path_buf(), why });
    }
    let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
    let c: Value =
        serde_json::from_str(&text).map_err(|e| TrainError::Adapter { path: path.clone(), why: e.to_string() })?;
    let listed = c[MERGED].as_array().into_iter().flatten().filter_map(Value::as_str).map(PathBuf::from);
    let listed: Vec<PathBuf> = listed.collect();
    match listed.iter().find(|p| !p.join("adapter_config.json").is_file()) {
        None => Ok(listed),
        Some(gone) => Err(TrainError::Adapter {
            path,
            why: format!(
                "was trained on the base model merged with the adapter in {}, which is not there; put it back, or correct {MERGED}",
                gone.display()
            ),
        }),
    }
}

/// Writes a PEFT folder for adapters of `model` into `dir` (which exists). `saved` are fully trained parameters beside the adapters.
///
/// # Errors
/// If the disk refuses.
pub fn save(
    rt: &Runtime,
    dir: &Path,
    adapters: &AdapterSet,
    options: &LoraOptions,
    saved: &[(Parameter, Vec<f32>)],
    stands_on: &StandsOn<'_>,
    model: &Model,
) -> Result<()> {
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for p in adapters.parameters() {
        tensors.push((p.name().to_owned(), p.shape().to_vec(), rt.to_vec(&p.value()?)?));
    }
    let mut modules_to_save = BTreeSet::new();
    for (p, values) in saved {
        let both = p.name() == EMBEDDING && model.config().tie_word_embeddings;
        for name in std::iter::once(p.name()).chain(both.then_some(HEAD)) {
            tensors.push((format!("{PREFIX}{name}"), p.shape().to_vec(), values.clone()));
            modules_to_save.extend(name.rsplit('.').nth(1).map(str::to_owned));
        }
    }
    let specs = tensors.iter().map(|(n, s, _)| TensorSpec::new(n, Dtype::F32, s.as_slice())).collect();
    let by_name: BTreeMap<&str, &[f32]> = tensors.iter().map(|(n, _, v)| (n.as_str(), v.as_slice())).collect();
    SafetensorsWriter::new(specs)?
        .write_file(dir.join("adapter_model.safetensors"), |spec, sink| sink.write_f32(by_name[spec.name.as_str()]))?;
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": stands_on.model,
        "r": options.rank, "lora_alpha": if options.alpha.fract() == 0.0 { json!(options.alpha as i64) } else { json!(options.alpha) },
        "lora_dropout": options.dropout, "use_rslora": options.rslora, "use_dora": false,
        "target_modules": targets(adapters, model), "bias": "none", "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true,
        "modules_to_save": if modules_to_save.is_empty() { Value::Null } else { json!(modules_to_save) },
        "rank_pattern": {}, "alpha_pattern": {},
    });
    if !stands_on.merged.is_empty() {
        config[MERGED] = json!(stands_on.merged);
    }
    atomic::write_bytes(dir.join("adapter_config.json"), format!("{config:#}\n").as_bytes())?;
    Ok(())
}

/// `target_modules`: last names where every module of the name has an adapter, else whole paths.
fn targets(adapters: &AdapterSet, model: &Model) -> Vec<String> {
    let sites = phalanx_parallel::sites(model);
    let linear = || sites.iter().filter(|s| s.kind == "linear").map(|s| &s.path);
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let mut out = BTreeSet::new();
    for path in adapters.by_path.keys() {
        let name = last(path);
        let whole = linear().filter(|p| last(p) == name).all(|p| adapters.by_path.contains_key(p));
        out.insert(if whole { name } else { path.clone() });
    }
    out.into_iter().collect()
}

/// W + scale · B·A in f32.
///
/// # Errors
/// If a value is missing or memory runs out.
pub fn merged(rt: &Runtime, weight: &Parameter, lora: &LowRank) -> Result<Vec<f32>> {
    use phalanx_kernels::gemm::{Gemm, gemm};
    let (outputs, inputs, rank) = (weight.shape()[0], weight.shape()[1], lora.a.shape()[0]);
    let (a, b) = (lora.a.value()?, lora.b.value()?);
    let mut w = rt.to_vec(&weight.value()?)?;
    let product = Gemm::nn(outputs, inputs, rank, b.mat(), a.mat()).alpha(lora.scale).accumulate(true);
    gemm(rt.device(), &product, &mut w)?;
    Ok(w)
}
