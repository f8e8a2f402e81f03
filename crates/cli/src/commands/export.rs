//! `phalanx export`

use phalanx_config::{Config, ExportDtype, FinetuningType, Purpose};
use phalanx_models::StoredDType;
use phalanx_train::export::export;
use phalanx_train::job::{Job, Use};

use super::configured;
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(args: &[String]) -> Result<Outcome> {
    let c = configured::read(args, Purpose::Export)?;
    let Some(dir) = c.config.export.export_dir.clone() else { return Err("export_dir is missing".into()) };
    let mut config = c.config;
    refuse_forgotten(&config)?;
    // Whatever is generated with, merging is done on exact weights.
    config.model.infer_dtype = phalanx_config::InferDtype::Float32;
    let mut job = Job::prepare(config, Use::Infer)?;
    let dtype = match job.config.export.export_dtype {
        ExportDtype::Auto => job.model.config().dtype,
        ExportDtype::Float32 => StoredDType::F32,
        ExportDtype::Bfloat16 => StoredDType::Bf16,
        ExportDtype::Float16 => StoredDType::F16,
    };
    let shard = job.config.export.export_size.saturating_mul(1_000_000_000);
    job.load(None)?;
    super::watch::abandon_on_signal()?;
    let done = export(&mut job, &dir, dtype, shard)?;
    if c.json {
        out::line(serde_json::to_string(&done)?)?;
    } else {
        out::line(format_args!("wrote {} as {}", dir.display(), done.dtype))?;
        if done.merged_layers > 0 {
            out::line(format_args!(
                "merged adapters of {} layers: logits agree to {:.1e} of the largest; {:.1} % of the merged weights changed",
                done.merged_layers,
                done.logits_rel,
                100.0 * done.changed_share
            ))?;
        }
    }
    Ok(Outcome::Done)
}

/// A training file names what was trained on, and not its result: exporting by it alone would ship the untrained base.
fn refuse_forgotten(config: &Config) -> Result<()> {
    if let Some(f) = configured::forgotten(config) {
        return Err(format!("{}: is not what was trained; to export that, set {}", f.key, f.mend).into());
    }
    let lora = config.is_set("finetuning_type") && config.method.finetuning_type == FinetuningType::Lora;
    if lora && config.model.adapter_name_or_path.is_empty() {
        let what =
            "is missing, so the base model would be exported without what was trained; add adapter_name_or_path=DIR";
        return Err(format!("adapter_name_or_path: {what}").into());
    }
    Ok(())
}
