//! The trained model in the output folder: put there file by file, so that a kill never leaves a mixture of two models.

use std::path::Path;

use phalanx_formats::atomic;

use crate::checkpoint::SCALES_FILE;
use crate::{Result, TrainError};

/// Takes away a model that an earlier run left in the output folder, its configuration first: at no moment of a kill do files of two
/// models lie there under one configuration.
pub(crate) fn clear(dir: &Path) -> Result<()> {
    let mut doomed = vec![dir.join("config.json"), dir.join("adapter_config.json")];
    for entry in std::fs::read_dir(dir).map_err(TrainError::io(dir))? {
        let path = entry.map_err(TrainError::io(dir))?.path();
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        let weights = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
        if weights && (name.starts_with("model") || name.starts_with("adapter_model")) {
            doomed.push(path);
        }
    }
    for path in doomed.iter().filter(|p| p.exists()) {
        std::fs::remove_file(path).map_err(TrainError::io(path))?;
    }
    Ok(())
}

/// Copies model files of a checkpoint into the output folder, each atomically, the configuration last.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let not_model = ["optimizer.safetensors", SCALES_FILE, "trainer_state.json", "phalanx_state.json"];
    let entries = std::fs::read_dir(from).map_err(TrainError::io(from))?;
    let mut paths = entries.map(|e| Ok(e.map_err(TrainError::io(from))?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort_by_key(|p| p.file_name().is_some_and(|n| n == "config.json" || n == "adapter_config.json"));
    for path in paths {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        if path.is_file() && !not_model.contains(&name) {
            let mut source = std::fs::File::open(&path).map_err(TrainError::io(&path))?;
            atomic::write_file(to.join(name), |out| std::io::copy(&mut source, out))?;
        }
    }
    Ok(())
}
