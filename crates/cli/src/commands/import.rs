//! `phalanx import gguf | llama2c`

use phalanx_formats::convert::FloatType;
use phalanx_formats::import::{ImportOptions, ImportReport};
use phalanx_formats::{gguf, llama2c};
use phalanx_report::units;
use serde_json::json;

use super::preparing::Bar;
use crate::args::{Import, ImportOptions as Args, Stored};
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(what: Import) -> Result<Outcome> {
    super::watch::abandon_on_signal()?;
    let (path, json, report) = match what {
        Import::Gguf { file, out, options } => {
            let bar = Bar::new(options.json);
            let report = gguf::import(&file, &out, convert(&options), &mut |p| bar.import(p))?;
            (out, options.json, report)
        }
        Import::Llama2c { file, tokenizer, out, options } => {
            let bar = Bar::new(options.json);
            let report = llama2c::import(&file, &tokenizer, &out, convert(&options), &mut |p| bar.import(p))?;
            (out, options.json, report)
        }
    };
    let ImportReport { model_type, tensors, parameters, bytes, source_types, notes } = report;
    if json {
        out::line(
            json!({"folder": path, "model_type": model_type, "tensors": tensors, "parameters": parameters, "bytes": bytes, "source_types": source_types, "notes": notes}),
        )?;
        return Ok(Outcome::Done);
    }
    let types = source_types.iter().map(|(t, n)| format!("{n} × {t}")).collect::<Vec<_>>().join(", ");
    out::line(format_args!(
        "wrote {}: {model_type}, {parameters} parameters in {tensors} tensors ({types}), {}",
        path.display(),
        units::bytes(bytes)
    ))?;
    notes.iter().try_for_each(|n| out::line(format_args!("note: {n}")))?;
    out::line(format_args!("try it: phalanx chat {}", path.display()))?;
    Ok(Outcome::Done)
}

fn convert(a: &Args) -> ImportOptions {
    let dtype = match a.dtype {
        Stored::F32 => FloatType::F32,
        Stored::Bf16 => FloatType::Bf16,
        Stored::F16 => FloatType::F16,
    };
    ImportOptions { dtype, overwrite: a.overwrite, ..ImportOptions::default() }
}
