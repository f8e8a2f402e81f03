//! The files a run leaves beside its checkpoints: metrics, TensorBoard events, `trainer_state.json`, loss curve.

use std::path::{Path, PathBuf};

use phalanx_config::Config;
use phalanx_report::{Curve, Entry, EventWriter, MetricsWriter, TrainerState, curve, system};

use crate::Result;

/// Writers of a run's files.
pub struct RunFiles {
    dir: PathBuf,
    metrics: MetricsWriter,
    events: Option<EventWriter>,
    plot: bool,
    /// `trainer_state.json` as it stands.
    pub state: TrainerState,
}

impl RunFiles {
    /// Opens them; `resumed` is the step that the run goes on from.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn open(dir: &Path, config: &Config, resumed: Option<u64>) -> Result<RunFiles> {
        let path = dir.join("metrics.jsonl");
        let (metrics, history) = match resumed {
            Some(step) => MetricsWriter::resume(path, step)?,
            None => (MetricsWriter::create(path)?, vec![]),
        };
        let events = if config.train.tensorboard() {
            let logs = config.train.logging_dir.clone().unwrap_or_else(|| dir.join("runs"));
            Some(EventWriter::create(&logs, system::wall_time(), std::process::id(), resumed)?)
        } else {
            None
        };
        let state = TrainerState { log_history: history, ..TrainerState::default() };
        Ok(RunFiles { dir: dir.to_path_buf(), metrics, events, plot: config.train.plot_loss, state })
    }

    /// Adds an entry to all of them.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn log(&mut self, entry: Entry) -> Result<()> {
        self.metrics.write(&entry)?;
        if let Some(e) = &mut self.events {
            e.entry(&entry, system::wall_time())?;
        }
        self.state.log_history.push(entry);
        Ok(())
    }

    /// The loss curve so far.
    pub fn curve(&self) -> Curve {
        let title = self.dir.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Curve::from_entries(&title, &self.state.log_history)
    }

    /// Writes `trainer_state.json` and, if asked for, the curve as SVG and PNG.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn finish(&self) -> Result<Vec<PathBuf>> {
        let path = self.dir.join("trainer_state.json");
        self.state.write(&path)?;
        let mut out = vec![path, self.dir.join("metrics.jsonl")];
        if self.plot {
            out.extend(curve::write(&self.curve(), &self.dir)?);
        }
        Ok(out)
    }
}
