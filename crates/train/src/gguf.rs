//! A GGUF file in the place of a model folder.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use phalanx_config::Config;
use phalanx_formats::convert::FloatType;
use phalanx_formats::gguf::GgufModel;

use crate::job::Use;
use crate::{Result, TrainError};

/// An open GGUF file, and a temporary folder with its configuration and tokenizer in the form of Hugging Face.
pub(crate) struct Gguf {
    pub(crate) file: GgufModel,
    dir: PathBuf,
}

impl Gguf {
    /// The file that `model_name_or_path` names, if it is one ending in `.gguf`; the configuration then names the temporary folder.
    ///
    /// # Errors
    /// If the model is to be trained, the file is damaged or not supported, or there is no place for the folder.
    pub(crate) fn of(config: &mut Config, purpose: Use) -> Result<Option<Gguf>> {
        let Some(path) = config.model.model_name_or_path.as_ref().map(PathBuf::from) else { return Ok(None) };
        if !path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) || !path.is_file() {
            return Ok(None);
        }
        if purpose == Use::Train {
            let why = format!(
                "{0} is a GGUF file: it generates as it is, but its rounded weights cannot be trained; make a folder of it with `phalanx import gguf {0} DIR` and name that",
                path.display()
            );
            return Err(TrainError::setting("model_name_or_path", why));
        }
        let file = GgufModel::open(&path)?;
        // Several jobs of one process do not share a folder.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("phalanx-gguf-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let gguf = Gguf { file, dir: std::env::temp_dir().join(name) };
        std::fs::create_dir_all(&gguf.dir).map_err(TrainError::io(&gguf.dir))?;
        gguf.file.write_metadata(&gguf.dir, FloatType::F32)?;
        config.model.model_name_or_path = Some(gguf.dir.display().to_string());
        Ok(Some(gguf))
    }
}

impl Drop for Gguf {
    fn drop(&mut self) {
        // What cannot be removed is a small folder among temporary ones.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
