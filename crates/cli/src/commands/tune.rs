//! `phalanx tune`: finds better block sizes for this machine's matrix products and keeps them in a file that every command reads.
//!
//! The sizes change speed and no bit of any result. The file names the processor it was made on; on another one it is not used.

use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_kernels::gemm::tuning::{Tuning, tune, unit_name};
use phalanx_kernels::gemm::{Arithmetic, Blocking};
use phalanx_report::System;
use serde::{Deserialize, Serialize};

use crate::args::Tune;
use crate::out;
use crate::outcome::{Outcome, Result};

/// What the file holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    processor: String,
    sizes: Vec<Sizes>,
}

/// Block sizes of one unit; the fields of [`Blocking`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sizes {
    unit: String,
    kc: usize,
    mc: usize,
    stretch: usize,
    narrow: usize,
    narrow_rows: usize,
    narrow_values: usize,
    narrow_kc: usize,
}

impl Sizes {
    fn new(unit: String, b: Blocking) -> Sizes {
        let Blocking { kc, mc, stretch, narrow, narrow_rows, narrow_values, narrow_kc } = b;
        Sizes { unit, kc, mc, stretch, narrow, narrow_rows, narrow_values, narrow_kc }
    }

    fn blocking(&self) -> Blocking {
        let Sizes { kc, mc, stretch, narrow, narrow_rows, narrow_values, narrow_kc, .. } = *self;
        Blocking { kc, mc, stretch, narrow, narrow_rows, narrow_values, narrow_kc }
    }
}

pub fn run(a: &Tune) -> Result<Outcome> {
    let file = file().ok_or("neither XDG_CACHE_HOME nor HOME is set, so there is no place for the file")?;
    if a.reset {
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(format!("{}: {e}", file.display()).into()),
            _ => out::line(format_args!("the table's own sizes are used again ({} is gone)", file.display()))?,
        }
        return Ok(Outcome::Done);
    }
    let rt = super::runtime(a.threads)?;
    let dev = rt.device();
    let mut tuning = Tuning::default();
    if let Ok(Some(kept)) = read(&file) {
        for s in &kept.sizes {
            tuning.set(&s.unit, s.blocking())?;
        }
    }
    let mut done: Vec<String> = Vec::new();
    for arithmetic in [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::Int8Block] {
        let unit = unit_name(dev.isa(), arithmetic);
        if done.contains(&unit) {
            continue;
        }
        eprintln!("{unit}: trying sizes of blocks");
        let patience = Duration::from_millis(a.patience_ms);
        let found = tune(dev, arithmetic, patience)?;
        if found.best != found.before {
            tuning.set(&unit, found.best)?;
        }
        if a.json {
            let line = serde_json::json!({"unit": unit, "gain": found.gain, "before": Sizes::new(unit.clone(), found.before), "best": Sizes::new(unit.clone(), found.best)});
            out::line(line)?;
        } else if found.best == found.before {
            out::line(format_args!("{unit:<10} stays as it is; {} other sizes were tried", found.tried))?;
        } else {
            let b = found.best;
            out::line(format_args!(
                "{unit:<10} {:.2} times as fast: kc {}, mc {}, stretch {}, narrow_rows {}, narrow_kc {}",
                found.gain, b.kc, b.mc, b.stretch, b.narrow_rows, b.narrow_kc
            ))?;
        }
        done.push(unit);
    }
    let kept = Kept { processor: processor(), sizes: tuning.entries().map(|(unit, b)| Sizes::new(unit, b)).collect() };
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    phalanx_formats::atomic::write_bytes(&file, serde_json::to_string_pretty(&kept)?.as_bytes())?;
    if !a.json {
        out::line(format_args!("kept in {}; `phalanx tune --reset` forgets it", file.display()))?;
    }
    Ok(Outcome::Done)
}

/// Makes the kept sizes those of this process. A file that cannot be used is named on standard error and left alone.
pub fn install() {
    let Some(file) = file() else { return };
    let outcome = read(&file).and_then(|kept| {
        let mut tuning = Tuning::default();
        for s in kept.iter().flat_map(|k| &k.sizes) {
            tuning.set(&s.unit, s.blocking())?;
        }
        Ok(tuning)
    });
    match outcome {
        Ok(tuning) => {
            tuning.install();
        }
        Err(e) => eprintln!("note: {} is not used: {e}; `phalanx tune` makes a new one", file.display()),
    }
}

/// What the file holds, if there is one and it is of this processor.
fn read(file: &Path) -> Result<Option<Kept>, String> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let kept: Kept = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    Ok((kept.processor == processor()).then_some(kept))
}

/// The processor by all that is known of it.
fn processor() -> String {
    let system = System::read();
    format!("{} ({})", system.cpu.as_deref().unwrap_or("unknown"), phalanx_kernels::processor_signature())
}

/// Where the sizes are kept. The one place where the binary reads these variables.
#[expect(clippy::disallowed_methods, reason = "the door for the environment")]
fn file() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("phalanx").join("tune.json"))
}
