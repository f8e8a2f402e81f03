//! The demo's folder: what lies in it, and what is there already.

use std::path::{Path, PathBuf};

use phalanx_formats::atomic;
use phalanx_train::checkpoint;
use serde_json::json;

use crate::error::{DemoError, Result};

/// Paths of a demo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// The folder.
    pub dir: PathBuf,
}

/// What is in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Contents {
    /// Nothing, or a demo that had not come to its first checkpoint.
    Nothing,
    /// A demo that was stopped; the checkpoint to go on from.
    Stopped(u64, PathBuf),
    /// A demo that is done: its steps, and the checkpoint to go on from unless someone removed it.
    Finished(u64, Option<PathBuf>),
}

impl Folder {
    /// The folder `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Folder {
        Folder { dir: dir.into() }
    }
    /// What says that a demo was begun here, in a folder that was empty: without it nothing is removed unasked.
    pub fn mark(&self) -> PathBuf {
        self.dir.join(".phalanx-demo")
    }
    /// The configuration.
    pub fn config(&self) -> PathBuf {
        self.dir.join("demo.yaml")
    }
    /// The corpus, one `{"text": ...}` a line.
    pub fn stories(&self) -> PathBuf {
        self.dir.join("stories.jsonl")
    }
    /// What says how to read it.
    pub fn dataset_info(&self) -> PathBuf {
        self.dir.join("dataset_info.json")
    }
    /// The tokenizer's files.
    pub fn tokenizer(&self) -> PathBuf {
        self.dir.join("tokenizer")
    }
    /// The trained model, and what the run reports.
    pub fn model(&self) -> PathBuf {
        self.dir.join("model")
    }

    /// Looks what is there.
    ///
    /// # Errors
    /// [`DemoError::NotADemo`] if it holds something that is not a demo.
    pub fn look(&self) -> Result<Contents> {
        let begun = self.mark().is_file();
        let mut entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Contents::Nothing),
            Err(e) => return Err(DemoError::io(&self.dir)(e)),
        };
        if !self.config().is_file() {
            // A demo that was stopped while it wrote its corpus has no configuration yet, and nothing worth keeping.
            let ours = [self.mark(), self.stories(), self.dataset_info(), self.tokenizer(), self.dir.join(".lock")];
            return match entries.all(|e| begun && e.is_ok_and(|e| ours.contains(&e.path()))) {
                true => Ok(Contents::Nothing),
                false => Err(DemoError::NotADemo { dir: self.dir.clone() }),
            };
        }
        match (holds_weights(&self.model()), checkpoint::list(&self.model()).pop()) {
            (true, Some((step, path))) => Ok(Contents::Finished(step, Some(path))),
            (true, None) => Ok(Contents::Finished(0, None)),
            (false, Some((step, path))) => Ok(Contents::Stopped(step, path)),
            (false, None) if begun => Ok(Contents::Nothing),
            (false, None) => Err(DemoError::NotADemo { dir: self.dir.clone() }),
        }
    }

    /// Makes the folder, and says in it that it is a demo's.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn begin(&self) -> Result<()> {
        std::fs::create_dir_all(&self.dir).map_err(DemoError::io(&self.dir))?;
        Ok(atomic::write_bytes(self.mark(), b"Made by `phalanx demo`.\n")?)
    }

    /// Removes what a demo wrote, and nothing else.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn clear(&self) -> Result<()> {
        let gone = |path: &Path, done: std::io::Result<()>| match done {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(DemoError::io(path)(e)),
            _ => Ok(()),
        };
        for dir in [self.model(), self.tokenizer()] {
            gone(&dir, std::fs::remove_dir_all(&dir))?;
        }
        for file in [self.stories(), self.dataset_info(), self.config(), self.mark()] {
            gone(&file, std::fs::remove_file(&file))?;
        }
        Ok(())
    }

    /// Writes the corpus as the data set `stories`.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn write_stories(&self, stories: &[String]) -> Result<()> {
        atomic::write_file(self.stories(), |out| {
            stories.iter().try_for_each(|story| writeln!(out, "{}", json!({"text": story})))
        })?;
        let info = json!({"stories": {"file_name": "stories.jsonl", "columns": {"prompt": "text"}}});
        atomic::write_bytes(self.dataset_info(), format!("{info:#}\n").as_bytes())?;
        Ok(())
    }
}

/// Whether a folder holds weights in any form: one file, shards, other formats.
fn holds_weights(dir: &Path) -> bool {
    let weights =
        |p: &Path| p.extension().is_some_and(|e| ["safetensors", "bin", "gguf", "pt", "pth"].iter().any(|w| e == *w));
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.any(|e| e.is_ok_and(|e| weights(&e.path()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_someone_else_is_left_alone() {
        let dir = std::env::temp_dir().join(format!("phalanx-demo-folder-{}", std::process::id()));
        let folder = Folder::new(&dir);
        assert_eq!(folder.look().unwrap(), Contents::Nothing);
        folder.begin().unwrap();
        folder.write_stories(&["one".into(), "two\nlines".into()]).unwrap();
        assert_eq!(folder.look().unwrap(), Contents::Nothing);
        std::fs::write(dir.join("thesis.tex"), "years of work").unwrap();
        assert!(matches!(folder.look(), Err(DemoError::NotADemo { .. })));
        std::fs::write(folder.config(), "").unwrap();
        assert_eq!(folder.look().unwrap(), Contents::Nothing);
        std::fs::create_dir_all(folder.model()).unwrap();
        std::fs::write(folder.model().join("model.safetensors"), "").unwrap();
        assert_eq!(folder.look().unwrap(), Contents::Finished(0, None));
        folder.clear().unwrap();
        folder.clear().unwrap();
        assert!(dir.join("thesis.tex").exists() && !folder.model().exists() && !folder.stories().exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_folder_with_names_like_ours_is_not_taken_for_a_demo() {
        let dir = std::env::temp_dir().join(format!("phalanx-demo-alike-{}", std::process::id()));
        let folder = Folder::new(&dir);
        let not_ours = |what: &str| assert!(matches!(folder.look(), Err(DemoError::NotADemo { .. })), "{what}");
        std::fs::create_dir_all(&dir).unwrap();
        assert_eq!(folder.look().unwrap(), Contents::Nothing, "empty");
        std::fs::write(folder.dataset_info(), "{}").unwrap();
        not_ours("someone's data");
        std::fs::write(folder.config(), "stage: sft").unwrap();
        std::fs::create_dir_all(folder.model()).unwrap();
        std::fs::write(folder.model().join("config.json"), "{}").unwrap();
        not_ours("someone's configuration");
        // With weights it is told to be finished: removed with --overwrite only, whatever their form.
        for weights in ["model-00001-of-00002.safetensors", "pytorch_model.bin"] {
            let path = folder.model().join(weights);
            std::fs::write(&path, "").unwrap();
            for begun in [false, true] {
                if begun {
                    folder.begin().unwrap();
                }
                assert_eq!(folder.look().unwrap(), Contents::Finished(0, None), "{weights}");
            }
            std::fs::remove_file(path).unwrap();
            std::fs::remove_file(folder.mark()).unwrap();
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
