//! The files a run leaves beside its checkpoints: metrics, TensorBoard events, `trainer_state.json`, loss curve.

use std::io::Write;
use std::path::{Path, PathBuf};

use phalanx_config::Config;
use phalanx_report::stragglers::RankStep;
use phalanx_report::{Curve, Entry, Recorder, RecorderOptions, TrainerState, system};

use crate::{Result, TrainError};

/// How the ranks of a run spent their steps, a line for each.
pub const RANKS_FILE: &str = "ranks.jsonl";

/// Writers of a run's files.
pub struct RunFiles {
    dir: PathBuf,
    recorder: Recorder,
    plot: bool,
    /// Counters of `trainer_state.json`; its log is the recorder's.
    pub state: TrainerState,
}

impl RunFiles {
    /// Opens them; `resumed` is the step that the run goes on from.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn open(dir: &Path, config: &Config, resumed: Option<u64>) -> Result<RunFiles> {
        let logs = || config.train.logging_dir.clone().unwrap_or_else(|| dir.join("runs"));
        let options = RecorderOptions {
            events_dir: config.train.tensorboard().then(logs),
            resume_step: resumed,
            wall_time: system::wall_time(),
            process: std::process::id(),
        };
        let recorder = Recorder::open(dir, &options)?;
        Ok(RunFiles { dir: dir.to_path_buf(), recorder, plot: config.train.plot_loss, state: TrainerState::default() })
    }

    /// Adds an entry to all of them.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn log(&mut self, entry: Entry) -> Result<()> {
        Ok(self.recorder.log(entry, system::wall_time())?)
    }

    /// Adds how the ranks spent a step to `ranks.jsonl`.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn ranks(&mut self, steps: &[RankStep]) -> Result<()> {
        let path = self.dir.join(RANKS_FILE);
        let lines: String = steps.iter().map(|s| format!("{}\n", s.to_json())).collect();
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut f| f.write_all(lines.as_bytes())).map_err(TrainError::io(&path))
    }

    fn title(&self) -> String {
        self.dir.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
    }

    /// The loss curve so far.
    pub fn curve(&self) -> Curve {
        self.recorder.curve(&self.title())
    }

    /// Writes `trainer_state.json` as `path`, log included.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn write_state(&mut self, path: &Path) -> Result<()> {
        self.state.log_history = self.recorder.entries().to_vec();
        Ok(self.state.write(path)?)
    }

    /// Writes `trainer_state.json` and, if asked for, the curve as SVG and PNG.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn finish(&mut self) -> Result<Vec<PathBuf>> {
        let path = self.dir.join("trainer_state.json");
        self.write_state(&path)?;
        let mut out = vec![path, self.dir.join("metrics.jsonl")];
        if self.plot {
            out.extend(self.recorder.plot(&self.title())?);
        }
        Ok(out)
    }
}
