//! Checkpoints: everything a run needs to go on as if nothing had happened, in one folder that appears at once.
//!
//! `checkpoint-N/` holds Hugging Face files (the exact f32 weights, or the adapter), the tokenizer, `optimizer.safetensors`,
//! `delayed_scales.safetensors` (with the recipe `fp8_delayed`), `trainer_state.json` and `phalanx_state.json` (counters, sample stream, configuration). It is written under a temporary name,
//! flushed, and renamed: a run killed at any moment leaves the last complete one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use phalanx_data::StreamState;
use phalanx_formats::{Dtype, SafetensorsWriter, TensorSpec, WeightFolder, atomic};
use phalanx_kernels::lowp::Operand;
use phalanx_nn::DelayedScales;
use phalanx_tensor::Runtime;
use serde::{Deserialize, Serialize};

use crate::optimizer::{AdamW, ParamState};
use crate::ranks::{Gathering, What};
use crate::step::LossCount;
use crate::{Result, TrainError};

/// Files of a tokenizer and of generation defaults that travel with weights.
pub const COMPANION_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "chat_template.jinja",
];

/// Counters of a run; with the sample stream all that is not a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Layout of this file.
    pub version: u32,
    /// Steps done.
    pub step: u64,
    /// Updates made (steps less the skipped ones).
    pub updates: u64,
    /// Micro-batches done: tells their randomness apart.
    pub moment: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Counted targets seen.
    pub label_tokens: u64,
    /// Steps skipped for values that were not finite.
    pub skipped: u64,
    /// Seconds of training so far.
    pub seconds: f64,
    /// Best evaluation loss and its step.
    pub best: Option<(f64, u64)>,
    /// What was seen since the last log entry.
    #[serde(default)]
    pub interval: Interval,
    /// Steps without an update since the last one that made one.
    #[serde(default)]
    pub skipped_in_a_row: u64,
    /// An evaluation was due at this step and was broken off by whoever stopped the run.
    #[serde(default)]
    pub eval_owed: bool,
    /// Where the sample stream stands.
    pub stream: StreamState,
    /// The configuration, key by key.
    pub config: serde_json::Map<String, serde_json::Value>,
}

/// What was seen since the last log entry: the next entry speaks of it, also when a run stopped in between.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Losses of the steps that made an update.
    pub loss: LossCount,
    /// Gradient norm of the last of them.
    #[serde(deserialize_with = "crate::step::nan_where_null")]
    pub last_norm: f64,
}

impl Interval {
    /// Adds a step.
    pub fn add(&mut self, loss: LossCount, norm: f64, updated: bool) {
        if updated {
            self.loss.add(loss);
            self.last_norm = norm;
        }
    }
}

/// The present layout of [`RunState`].
pub const VERSION: u32 = 1;

/// Checkpoints of an output folder by step, those written with `save_only_model` too. (A folder of that name is complete: it appears
/// at once.)
pub fn all(output_dir: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(output_dir) else { return vec![] };
    let mut found: Vec<_> = entries
        .filter_map(|e| {
            let path = e.ok()?.path();
            let step = path.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok()?;
            path.is_dir().then_some((step, path))
        })
        .collect();
    found.sort();
    found
}

/// Checkpoints of an output folder that a run can go on from, by step.
pub fn list(output_dir: &Path) -> Vec<(u64, PathBuf)> {
    all(output_dir).into_iter().filter(|(_, path)| path.join("phalanx_state.json").exists()).collect()
}

/// Reads the counters of a checkpoint.
///
/// # Errors
/// If it is not a checkpoint of this program, or a damaged one.
pub fn read_state(dir: &Path) -> Result<RunState> {
    let path = dir.join("phalanx_state.json");
    let bad = |why: String| TrainError::Checkpoint { path: path.clone(), why };
    let text = std::fs::read_to_string(&path).map_err(|e| {
        bad(format!("{e}; give a folder `checkpoint-N` written by `phalanx train` (not with save_only_model)"))
    })?;
    let state: RunState = serde_json::from_str(&text).map_err(|e| bad(format!("damaged: {e}")))?;
    if state.version != VERSION {
        return Err(bad(format!("layout {} is not the {VERSION} that this program reads", state.version)));
    }
    Ok(state)
}

/// Checks that the tensor files of a checkpoint are whole, by their headers and lengths; no tensor is read.
///
/// # Errors
/// If one is damaged.
pub fn check_files(dir: &Path) -> Result<()> {
    let damaged = |e: phalanx_formats::FormatError| TrainError::Checkpoint {
        path: dir.to_path_buf(),
        why: format!("damaged: {e}"),
    };
    for name in ["optimizer.safetensors", "adapter_model.safetensors", SCALES_FILE] {
        let path = dir.join(name);
        if path.exists() {
            WeightFolder::open_file(&path).map_err(damaged)?;
        }
    }
    if dir.join("config.json").exists() {
        WeightFolder::open(dir).map_err(damaged)?;
    }
    Ok(())
}

/// Writes moments (and nothing else: exact weights stand in the model file) into `dir`. `whole` gives a whole tensor where this rank has only a
/// part of it.
///
/// # Errors
/// If the disk refuses.
pub(crate) fn write_optimizer(dir: &Path, optimizer: &AdamW, whole: Option<&Gathering<'_>>) -> Result<()> {
    let mut moments: BTreeMap<String, (&ParamState, What)> = BTreeMap::new();
    let mut specs = Vec::new();
    for s in optimizer.states() {
        for (kind, what) in [("exp_avg", What::ExpAvg), ("exp_avg_sq", What::ExpAvgSq)] {
            let name = format!("{}/{kind}", s.param.name());
            specs.push(TensorSpec::new(name.clone(), Dtype::F32, s.param.shape()));
            moments.insert(name, (s, what));
        }
    }
    let mut failed = None;
    let written = SafetensorsWriter::new(specs)?.write_file(dir.join("optimizer.safetensors"), |spec, sink| {
        let (s, what) = moments[spec.name.as_str()];
        let tensor = if what == What::ExpAvg { &s.exp_avg } else { &s.exp_avg_sq };
        let fetched = whole.map(|w| w.fetch(what, &s.param)).transpose();
        match (fetched, tensor.f32()) {
            (Ok(Some(values)), _) => sink.write_f32(&values),
            (Ok(None), Ok(values)) => sink.write_f32(values),
            // A short tensor is refused by the writer.
            (Err(e), _) => {
                failed = Some(e);
                sink.write_f32(&[])
            }
            (Ok(None), Err(e)) => {
                failed = Some(e.into());
                sink.write_f32(&[])
            }
        }
    });
    match failed {
        Some(e) => Err(e),
        None => Ok(written.map(|_| ())?),
    }
}

/// Reads moments back.
///
/// # Errors
/// If the file is damaged or belongs to another set of trained parameters.
pub fn read_optimizer(dir: &Path, optimizer: &mut AdamW) -> Result<()> {
    let path = dir.join("optimizer.safetensors");
    if !path.exists() {
        return Err(TrainError::Checkpoint {
            path,
            why: "is missing: the checkpoint was written with save_only_model and holds no optimizer; start a new run from it with model_name_or_path".into(),
        });
    }
    let folder = WeightFolder::open_file(&path)?;
    let expected: Vec<_> = optimizer
        .states()
        .iter()
        .flat_map(|s| ["exp_avg", "exp_avg_sq"].map(|k| (format!("{}/{k}", s.param.name()), s.param.shape().to_vec())))
        .collect();
    folder.check_names(&expected, &[])?;
    for s in optimizer.states_mut() {
        let name = s.param.name().to_owned();
        let (placement, shape) = (s.param.placement(), s.param.shape().to_vec());
        for (kind, values) in [("exp_avg", s.exp_avg.f32_mut()?), ("exp_avg_sq", s.exp_avg_sq.f32_mut()?)] {
            let name = format!("{name}/{kind}");
            if let Some(i) = folder.get(&name)?.first_non_finite()? {
                let why = format!("damaged: {name} is not finite at element {i}; go on from the checkpoint before");
                return Err(TrainError::Checkpoint { path, why });
            }
            let (view, mut done) = (folder.get(&name)?, 0);
            for (at, n) in placement.kept_runs(&shape) {
                view.read_f32_at(at, &mut values[done..done + n])?;
                done += n;
            }
        }
    }
    Ok(())
}

/// File of the magnitudes that delayed scales follow from.
pub const SCALES_FILE: &str = "delayed_scales.safetensors";

/// Writes the delayed scales of every layer into `dir`: the magnitudes of each operand, oldest first, and the scale. Without such layers
/// there is no file.
///
/// # Errors
/// If the disk refuses.
pub fn write_scales(dir: &Path, scales: &DelayedScales) -> Result<()> {
    let mut tensors: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (path, layer) in &scales.by_path {
        for operand in Operand::ALL {
            let (history, at) = (layer.history(operand), format!("{path}/{}", operand.name()));
            // An empty history is one that is not listed.
            if history.amaxes().len() > 0 {
                tensors.insert(format!("{at}/amaxes"), history.amaxes().collect());
            }
            tensors.extend(history.scale().map(|scale| (format!("{at}/scale"), vec![scale])));
        }
    }
    if tensors.is_empty() {
        return Ok(());
    }
    let specs =
        tensors.iter().map(|(name, values)| TensorSpec::new(name.clone(), Dtype::F32, [values.len()])).collect();
    SafetensorsWriter::new(specs)?
        .write_file(dir.join(SCALES_FILE), |spec, sink| sink.write_f32(&tensors[spec.name.as_str()]))?;
    Ok(())
}

/// Reads delayed scales back. Operands that the checkpoint knows nothing of (it was written with other arithmetic) begin with an empty
/// history; gives the number of layers of which nothing was found.
///
/// # Errors
/// If the file is damaged.
pub fn read_scales(dir: &Path, scales: &DelayedScales) -> Result<usize> {
    let path = dir.join(SCALES_FILE);
    if scales.by_path.is_empty() || !path.exists() {
        return Ok(scales.by_path.len());
    }
    let folder = WeightFolder::open_file(&path)?;
    let read = |name: String, usable: fn(f32) -> bool| -> Result<Vec<f32>> {
        if !folder.contains(&name) {
            return Ok(vec![]);
        }
        let values = folder.get(&name)?.to_f32()?;
        match values.iter().find(|&&v| !usable(v)) {
            None => Ok(values),
            Some(v) => {
                let why = format!("damaged: {name} holds {v}; go on from the checkpoint before");
                Err(TrainError::Checkpoint { path: path.clone(), why })
            }
        }
    };
    let mut without = 0;
    for (place, layer) in &scales.by_path {
        let mut found = false;
        for operand in Operand::ALL {
            let at = format!("{place}/{}", operand.name());
            let amaxes = read(format!("{at}/amaxes"), |v| v.is_finite() && v >= 0.0)?;
            let scale = read(format!("{at}/scale"), |v| v.is_normal() && v > 0.0)?;
            found |= !amaxes.is_empty();
            layer.restore(operand, &amaxes, scale.first().copied());
        }
        without += usize::from(!found);
    }
    Ok(without)
}

/// Copies tokenizer and generation files from `from` into `to`; those that are not there are skipped.
///
/// # Errors
/// If the disk refuses.
pub fn copy_companions(from: &Path, to: &Path) -> Result<()> {
    for name in COMPANION_FILES {
        let source = from.join(name);
        if source.is_file() {
            let bytes = std::fs::read(&source).map_err(TrainError::io(&source))?;
            atomic::write_bytes(to.join(name), &bytes)?;
        }
    }
    Ok(())
}

/// Removes checkpoints beyond the last `keep`, never the one of step `best`. Each disappears at once (renamed first).
///
/// # Errors
/// If the disk refuses.
pub fn prune(output_dir: &Path, keep: Option<u64>, best: Option<u64>) -> Result<Vec<PathBuf>> {
    let Some(keep) = keep else { return Ok(vec![]) };
    let all = all(output_dir);
    let excess = all.len().saturating_sub(keep.max(1) as usize);
    if excess > 0 {
        // A process of the same number may have been killed here: its left-overs would be in the way.
        atomic::clean_stale(output_dir)?;
    }
    let mut removed = Vec::new();
    for (step, path) in all.into_iter().take(excess) {
        if Some(step) == best {
            continue;
        }
        let doomed = output_dir.join(format!(".tmp-checkpoint-{step}-{}", std::process::id()));
        std::fs::rename(&path, &doomed).map_err(TrainError::io(&path))?;
        std::fs::remove_dir_all(&doomed).map_err(TrainError::io(&doomed))?;
        removed.push(path);
    }
    Ok(removed)
}

/// The exact f32 values of a parameter: its master's, where it has one.
pub(crate) fn exact_values(rt: &Runtime, optimizer: Option<&AdamW>, p: &phalanx_nn::Parameter) -> Result<Vec<f32>> {
    match optimizer.and_then(|o| o.exact(p)) {
        Some(master) => Ok(rt.to_vec(master)?),
        None => Ok(rt.to_vec(&p.value()?)?),
    }
}
