//! Whether the output folder has room for what a run will write: found out before the first step, not at the first save.

use std::path::Path;

use phalanx_formats::atomic;

use crate::job::Job;
use crate::{Result, TrainError};

/// Bytes of one checkpoint: exact weights (or the adapters), and two moments for each trained element.
pub fn checkpoint_bytes(job: &Job) -> u64 {
    let (mut all, mut trained) = (0u64, 0u64);
    for p in job.model.parameters() {
        all += p.len() as u64;
        trained += if p.trainable() { p.len() as u64 } else { 0 };
    }
    let adapters: u64 = match &job.lora {
        None => 0,
        Some(o) => {
            let adapted = job.plan.modules.iter().filter(|(_, m)| m.adapter);
            adapted
                .filter_map(|(path, _)| job.shape_of(&format!("{path}.weight")))
                .map(|s| (o.rank as u64).saturating_mul(s.iter().sum::<usize>() as u64))
                .fold(0u64, u64::saturating_add)
        }
    };
    let adapted = trained.saturating_add(adapters);
    let model = if job.lora.is_some() { adapted } else { all };
    let moments = if job.config.train.save_only_model { 0 } else { adapted.saturating_mul(2) };
    model.saturating_add(moments).saturating_mul(4)
}

/// Refuses a run whose first checkpoint would not fit.
///
/// # Errors
/// If the file system of `output_dir` has less free than one checkpoint takes.
pub fn check_space(job: &Job) -> Result<()> {
    let Some(dir) = &job.config.train.output_dir else { return Ok(()) };
    // The folder may not be there yet: ask the nearest one that is.
    let mut at: &Path = dir;
    while !at.exists() {
        match at.parent() {
            Some(p) if !p.as_os_str().is_empty() => at = p,
            _ => at = Path::new("."),
        }
    }
    let needed = checkpoint_bytes(job);
    match atomic::free_space(at) {
        Some(free) if free < needed => Err(TrainError::setting(
            "output_dir",
            format!(
                "{} has {} MB free, one checkpoint takes {} MB; free some space, name another folder, or set save_only_model: true",
                at.display(),
                free / 1_000_000,
                needed.div_ceil(1_000_000)
            ),
        )),
        _ => Ok(()),
    }
}
