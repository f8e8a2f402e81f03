//! Where a run begins: anew, or from which checkpoint; decided from the configuration and the output folder alone, before anything
//! is loaded.
//!
//! The rules, in the order of what users lose when they are wrong:
//! * A folder that holds a trained model, or files that no run writes, is never written into unless `overwrite_output_dir` says so;
//!   then only what a run writes is removed.
//! * A run goes on by itself only as itself: with `resume_from_checkpoint` left out, a changed setting that changes the numbers is
//!   refused, with the list ([`crate::same_run`]).
//! * Checkpoints of an abandoned continuation never mix with those of the present one.

use std::fs;
use std::path::{Path, PathBuf};

use phalanx_config::{Config, MapOrPath, ResumeFrom};

use crate::same_run::{Change, Class, changes, recorded};
use crate::{Result, TrainError, checkpoint};

/// Where a run begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The checkpoint to go on from; `None` begins anew.
    pub checkpoint: Option<PathBuf>,
    /// What the user should know, in sentences.
    pub notes: Vec<String>,
    /// What an earlier run left and this one replaces; still there until [`Start::clear`].
    doomed: Vec<PathBuf>,
}

impl Start {
    /// Begins at a checkpoint, or anew, and replaces nothing.
    pub fn at(checkpoint: Option<PathBuf>) -> Start {
        Start { checkpoint, ..Start::default() }
    }

    /// Removes what this run replaces. Called when everything else has been checked, just before the first step: a mistake found
    /// before costs nothing.
    ///
    /// # Errors
    /// If the file system refuses.
    pub fn clear(&self) -> Result<()> {
        match self.doomed.first().and_then(|p| p.parent()) {
            Some(dir) => remove(dir, &self.doomed),
            None => Ok(()),
        }
    }
}

/// Holds an output folder for one run; another that wants it meanwhile is refused. Given up when dropped, or when the process ends in
/// any way.
pub struct Claim(#[allow(dead_code, reason = "held for its lock")] fs::File);

/// Claims `output_dir` for this process, making the folder if need be.
///
/// # Errors
/// If another run holds it, or the folder cannot be made.
pub fn claim(config: &Config) -> Result<Option<Claim>> {
    config.train.output_dir.as_deref().map_or(Ok(None), claim_folder)
}

/// As [`claim`], for a folder.
///
/// # Errors
/// As [`claim`].
pub fn claim_folder(dir: &Path) -> Result<Option<Claim>> {
    let unwritable = |e: std::io::Error| {
        TrainError::setting("output_dir", format!("{} cannot be written: {e}; name another folder", dir.display()))
    };
    fs::create_dir_all(dir).map_err(unwritable)?;
    let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(dir.join(".lock"));
    let file = file.map_err(unwritable)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(Claim(file))),
        Err(fs::TryLockError::WouldBlock) => Err(TrainError::setting(
            "output_dir",
            format!("{} is in use by another run; wait for it, stop it, or name another folder", dir.display()),
        )),
        // A file system without locks must not keep anybody from training.
        Err(fs::TryLockError::Error(_)) => Ok(None),
    }
}

/// Decides where a run begins. Changes nothing; with `overwrite_output_dir`, [`Start::clear`] removes what an earlier run left.
///
/// # Errors
/// If the folder holds what would be lost, the checkpoint is not there or not complete, or the configuration is not that of the
/// checkpoint.
pub fn starting_point(config: &Config) -> Result<Start> {
    let t = &config.train;
    let Some(dir) = t.output_dir.as_deref() else {
        return Err(TrainError::setting("output_dir", "is missing: name a folder for checkpoints and metrics"));
    };
    let folder = Folder::read(dir)?;
    refuse_sources_in(dir, config)?;
    match &t.resume_from_checkpoint {
        ResumeFrom::Path(path) => from_path(config, &folder, path),
        ResumeFrom::Latest => match folder.resumable.last() {
            Some((_, path)) => {
                let mut start = go_on(config, path, false).map_err(|e| folder.name_the_one_before(path, e))?;
                if t.overwrite_output_dir {
                    start.notes.push(
                        "overwrite_output_dir is not applied, because resume_from_checkpoint: true goes on with the run there"
                            .into(),
                    );
                }
                Ok(start)
            }
            None => Err(TrainError::setting("resume_from_checkpoint", folder.nothing_to_go_on_from())),
        },
        ResumeFrom::No => anew(config, &folder),
        ResumeFrom::Auto if t.overwrite_output_dir => anew(config, &folder),
        ResumeFrom::Auto => match folder.resumable.last() {
            Some((_, path)) => go_on(config, path, true).map_err(|e| folder.name_the_one_before(path, e)),
            None => anew(config, &folder),
        },
    }
}

/// Keys that change which rows there are: a sample stream cannot be gone on with over others.
const DATA_KEYS: [&str; 7] =
    ["dataset", "eval_dataset", "val_size", "cutoff_len", "packing", "max_samples", "template"];

/// Goes on from `checkpoint`, if the configuration is still that of the run. `strictly`: nobody asked for it by name.
fn go_on(config: &Config, path: &Path, strictly: bool) -> Result<Start> {
    let state = checkpoint::read_state(path)?;
    checkpoint::check_files(path)?;
    let changed = changes(&state.config, &recorded(config)?);
    let list = |of: &[&Change]| of.iter().map(|c| c.to_string()).collect::<Vec<_>>().join("; ");
    let of = |class: Class| changed.iter().filter(|c| c.class == class).collect::<Vec<_>>();
    let (structure, numbers) = (of(Class::Structure), of(Class::Numbers));
    let refuse = |why: String| Err(TrainError::Checkpoint { path: path.to_path_buf(), why });
    if !structure.is_empty() {
        return refuse(format!(
            "cannot be gone on from with these settings: {}; set them as they were, or start a new run in another output_dir",
            list(&structure)
        ));
    }
    if strictly && !numbers.is_empty() {
        // Other data is refused later in any case.
        let data = numbers.iter().any(|c| DATA_KEYS.contains(&c.key.as_str()));
        let on = if data { "" } else { "resume_from_checkpoint=true goes on with the new settings, " };
        return refuse(format!(
            "the settings are not those of the run that is to go on: {}; set them as they were, or say what you want: \
             {on}overwrite_output_dir=true starts anew in their place",
            list(&numbers)
        ));
    }
    let mut notes = vec![format!("going on from {} after step {}", path.display(), state.step)];
    notes.extend(numbers.iter().map(|c| format!("{c}: the run is no longer the one that was begun")));
    let length = changed.iter().filter(|c| ["max_steps", "num_train_epochs"].contains(&c.key.as_str()));
    notes.extend(length.map(|c| format!("{c}: the learning rate follows the schedule of the new length")));
    Ok(Start { checkpoint: Some(path.to_path_buf()), notes, doomed: vec![] })
}

fn from_path(config: &Config, folder: &Folder, path: &Path) -> Result<Start> {
    let overwrite = config.train.overwrite_output_dir;
    if !path.join("phalanx_state.json").exists()
        && let Some((_, inner)) = checkpoint::list(path).last()
    {
        let why = format!("is the folder of a run; name a checkpoint in it, such as {}", inner.display());
        return Err(TrainError::Checkpoint { path: path.to_path_buf(), why });
    }
    let step = checkpoint::read_state(path)?.step;
    let inside = path.parent().is_some_and(|p| same(p, &folder.dir));
    if !inside {
        let mut start = go_on(config, path, false)?;
        let fresh = anew(config, folder)?;
        start.notes.extend(fresh.notes);
        start.doomed = fresh.doomed;
        return Ok(start);
    }
    // Checkpoints after this one belong to a continuation that is given up. They would be taken for this run's.
    let later: Vec<PathBuf> = folder.checkpoints.iter().filter(|(s, _)| *s > step).map(|(_, p)| p.clone()).collect();
    let mut start = go_on(config, path, false)?;
    if !later.is_empty() {
        let names = names(&later);
        if !overwrite {
            return Err(TrainError::setting(
                "resume_from_checkpoint",
                format!(
                    "{} is followed by {names}, which would be taken for this run's; move them away, write to another output_dir, or remove them with overwrite_output_dir: true",
                    path.display()
                ),
            ));
        }
        refuse_sources_among(&later, config)?;
        start.notes.push(format!("{names}, which came after {}, will be removed when this run begins", path.display()));
        start.doomed = later;
    }
    Ok(start)
}

/// A new run in the folder.
fn anew(config: &Config, folder: &Folder) -> Result<Start> {
    let dir = folder.dir.display();
    let holds_run = !folder.checkpoints.is_empty() || !folder.model.is_empty();
    if config.train.overwrite_output_dir {
        let mut doomed: Vec<PathBuf> = folder.checkpoints.iter().map(|(_, p)| p.clone()).rev().collect();
        doomed.extend(folder.model.iter().chain(&folder.traces).cloned());
        refuse_sources_among(&doomed, config)?;
        let mut notes = Vec::new();
        if holds_run {
            notes.push(format!("the earlier run in {dir} ({}) will be replaced when this one begins", names(&doomed)));
        }
        if !folder.other.is_empty() {
            notes.push(format!("left alone what is not of a run in {dir}: {}", names(&folder.other)));
        }
        return Ok(Start { checkpoint: None, notes, doomed });
    }
    let refuse =
        |what: String, mend: &str| Err(TrainError::setting("output_dir", format!("{dir} holds {what}; {mend}")));
    if holds_run {
        let what = folder.checkpoints.iter().map(|(_, p)| p).chain(&folder.model).cloned().collect::<Vec<_>>();
        let mend = if folder.resumable.is_empty() {
            "name another folder, or overwrite_output_dir: true to replace it"
        } else {
            "name another folder, overwrite_output_dir: true to replace it, or resume_from_checkpoint: true to go on with it"
        };
        return refuse(format!("another run ({})", names(&what)), mend);
    }
    if !folder.other.is_empty() {
        return refuse(
            format!("files that are not of a run ({})", names(&folder.other)),
            "name a new folder, or overwrite_output_dir: true to write beside them",
        );
    }
    let traces = folder.traces.iter().any(|p| p.ends_with("metrics.jsonl"));
    let notes = if traces {
        vec![format!("{dir} holds a run that ended before its first checkpoint; it begins anew")]
    } else {
        vec![]
    };
    Ok(Start { checkpoint: None, notes, doomed: vec![] })
}

/// What an output folder holds.
struct Folder {
    dir: PathBuf,
    /// Every `checkpoint-N`, by step.
    checkpoints: Vec<(u64, PathBuf)>,
    /// Those of them that can be gone on from.
    resumable: Vec<(u64, PathBuf)>,
    /// Files of a trained model.
    model: Vec<PathBuf>,
    /// What else a run writes.
    traces: Vec<PathBuf>,
    /// What no run writes.
    other: Vec<PathBuf>,
}

impl Folder {
    fn read(dir: &Path) -> Result<Folder> {
        let mut folder = Folder {
            dir: dir.to_path_buf(),
            checkpoints: checkpoint::all(dir),
            resumable: checkpoint::list(dir),
            model: vec![],
            traces: vec![],
            other: vec![],
        };
        if !dir.exists() {
            return Ok(folder);
        }
        if !dir.is_dir() {
            return Err(TrainError::setting("output_dir", format!("{} is a file; name a folder", dir.display())));
        }
        let entries = fs::read_dir(dir).map_err(TrainError::io(dir))?;
        let mut paths = entries.map(|e| Ok(e.map_err(TrainError::io(dir))?.path())).collect::<Result<Vec<_>>>()?;
        paths.sort();
        for path in paths {
            let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
                folder.other.push(path);
                continue;
            };
            if folder.checkpoints.iter().any(|(_, c)| *c == path) || is_note(name) {
                continue;
            }
            let place = match kind_of(name) {
                Some(Kind::Model) => &mut folder.model,
                Some(Kind::Trace) => &mut folder.traces,
                None => &mut folder.other,
            };
            place.push(path);
        }
        Ok(folder)
    }

    /// A damaged newest checkpoint need not be the end of a run.
    fn name_the_one_before(&self, path: &Path, e: TrainError) -> TrainError {
        let before = self.resumable.iter().rev().skip_while(|(_, p)| p != path).nth(1);
        match (e, before) {
            (TrainError::Checkpoint { path: file, why }, Some((_, before))) if why.starts_with("damaged") => {
                let why =
                    format!("{why}; move {} away to go on from the one before, {}", path.display(), before.display());
                TrainError::Checkpoint { path: file, why }
            }
            (e, _) => e,
        }
    }

    fn nothing_to_go_on_from(&self) -> String {
        let dir = self.dir.display();
        match self.checkpoints.last() {
            Some((_, path)) => format!(
                "{dir} holds no checkpoint to go on from: {} was written with save_only_model and has no optimizer; start a new run from it with model_name_or_path",
                path.display()
            ),
            None => format!("{dir} holds no checkpoint to go on from; leave resume_from_checkpoint out to begin anew"),
        }
    }
}

enum Kind {
    Model,
    Trace,
}

/// What kind of a run's file a name stands for.
fn kind_of(name: &str) -> Option<Kind> {
    let weights =
        name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
    let model = ["config.json", "adapter_config.json", "adapter_model.safetensors"];
    if weights || model.contains(&name) {
        return Some(Kind::Model);
    }
    let traces = ["metrics.jsonl", "trainer_state.json", "runs", "training_loss.svg", "training_loss.png"];
    let trace = traces.contains(&name) || checkpoint::COMPANION_FILES.contains(&name);
    trace.then_some(Kind::Trace)
}

/// Hidden entries (the cache of encoded data, left-overs of killed writers), configurations and logs of the shell disturb nothing.
fn is_note(name: &str) -> bool {
    name.starts_with('.') || [".yaml", ".yml", ".log", ".out"].iter().any(|end| name.ends_with(end))
}

/// The first few names of a list.
fn names(paths: &[PathBuf]) -> String {
    let name =
        |p: &PathBuf| p.file_name().map_or_else(|| p.display().to_string(), |n| n.to_string_lossy().into_owned());
    let mut text = paths.iter().take(4).map(name).collect::<Vec<_>>().join(", ");
    if paths.len() > 4 {
        text += &format!(" and {} more", paths.len() - 4);
    }
    text
}

/// Whether both paths lead to the same place.
pub(crate) fn same(a: &Path, b: &Path) -> bool {
    let real = |p: &Path| fs::canonicalize(if p.as_os_str().is_empty() { Path::new(".") } else { p });
    matches!((real(a), real(b)), (Ok(a), Ok(b)) if a == b)
}

/// What the run reads, with the key that names it.
fn sources(config: &Config) -> Vec<(&'static str, PathBuf)> {
    let m = &config.model;
    let mut all = vec![("dataset_dir", config.data.dataset_dir.clone())];
    all.extend(m.model_name_or_path.iter().map(|p| ("model_name_or_path", PathBuf::from(p))));
    all.extend(m.adapter_name_or_path.iter().map(|p| ("adapter_name_or_path", p.clone())));
    all.extend(m.tokenizer_name_or_path.iter().map(|p| ("tokenizer_name_or_path", p.clone())));
    all.extend(m.config_name_or_path.iter().map(|p| ("config_name_or_path", p.clone())));
    all.extend(config.data.dataset.iter().map(|p| ("dataset", PathBuf::from(p))));
    all.extend(config.data.eval_dataset.iter().map(|p| ("eval_dataset", PathBuf::from(p))));
    if let Some(MapOrPath::Path(p)) = &config.run.plan {
        all.push(("plan", p.clone()));
    }
    if let ResumeFrom::Path(p) = &config.train.resume_from_checkpoint {
        all.push(("resume_from_checkpoint", p.clone()));
    }
    all
}

/// A model must not be written over the one it is made from.
fn refuse_sources_in(dir: &Path, config: &Config) -> Result<()> {
    for (key, path) in sources(config) {
        if ["model_name_or_path", "adapter_name_or_path", "tokenizer_name_or_path"].contains(&key) && same(&path, dir) {
            return Err(TrainError::setting(
                "output_dir",
                format!("{} is also {key}, which the trained model would replace; name another folder", dir.display()),
            ));
        }
    }
    Ok(())
}

/// Nothing that the run reads may be removed.
fn refuse_sources_among(doomed: &[PathBuf], config: &Config) -> Result<()> {
    let doomed: Vec<PathBuf> = doomed.iter().filter_map(|p| fs::canonicalize(p).ok()).collect();
    for (key, path) in sources(config) {
        let Ok(real) = fs::canonicalize(&path) else { continue };
        if doomed.iter().any(|d| real.starts_with(d)) {
            return Err(TrainError::setting(
                "overwrite_output_dir",
                format!("would remove {}, which {key} names; write to another output_dir", path.display()),
            ));
        }
    }
    Ok(())
}

/// Removes entries of `dir`. Each disappears at once (renamed first); what a kill leaves over is cleaned by the next run.
fn remove(dir: &Path, paths: &[PathBuf]) -> Result<()> {
    // A process of the same number may have been killed here: its left-overs would be in the way.
    phalanx_formats::atomic::clean_stale(dir)?;
    let mut left = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let doomed = dir.join(format!("{}{name}-{}", phalanx_formats::atomic::TEMP_PREFIX, std::process::id()));
        fs::rename(path, &doomed).map_err(TrainError::io(path))?;
        left.push(doomed);
    }
    for path in left {
        // A link is removed, not what it points to.
        let is_dir = fs::symlink_metadata(&path).map_err(TrainError::io(&path))?.is_dir();
        let gone = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        gone.map_err(TrainError::io(&path))?;
    }
    Ok(())
}
