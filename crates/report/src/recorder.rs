//! [`Recorder`]: everything a run writes about itself while it runs, in one hand.

use std::path::{Path, PathBuf};

use crate::curve::{self, Curve};
use crate::entry::Entry;
use crate::error::{ReportError, Result};
use crate::metrics::MetricsWriter;
use crate::tensorboard::EventWriter;

/// What a [`Recorder`] writes and where it begins.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RecorderOptions {
    /// Folder of the TensorBoard events; none where they are not wanted.
    pub events_dir: Option<PathBuf>,
    /// The step of the checkpoint this run goes on from; `None` begins anew.
    pub resume_step: Option<u64>,
    /// Seconds since 1970 ([`crate::system::wall_time`]).
    pub wall_time: f64,
    /// This process' id: tells event files of the same second apart.
    pub process: u32,
}

/// Writes `metrics.jsonl` and TensorBoard events, and keeps the log for `trainer_state.json` and the loss curve.
#[derive(Debug)]
pub struct Recorder {
    dir: PathBuf,
    metrics: MetricsWriter,
    events: Option<EventWriter>,
    log: Vec<Entry>,
}

impl Recorder {
    /// Begins (or goes on) in the output folder `dir`, which is created if need be.
    ///
    /// # Errors
    /// A file cannot be read, created or written.
    pub fn open(dir: &Path, options: &RecorderOptions) -> Result<Self> {
        std::fs::create_dir_all(dir).map_err(|e| ReportError::io(dir, "create the folder", e))?;
        let path = dir.join("metrics.jsonl");
        let (metrics, log) = match options.resume_step {
            Some(step) => MetricsWriter::resume(path, step)?,
            None => (MetricsWriter::create(path)?, vec![]),
        };
        let begin =
            |folder: &PathBuf| EventWriter::create(folder, options.wall_time, options.process, options.resume_step);
        let events = options.events_dir.as_ref().map(begin).transpose()?;
        Ok(Recorder { dir: dir.into(), metrics, events, log })
    }

    /// Writes an entry everywhere.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn log(&mut self, entry: Entry, wall_time: f64) -> Result<()> {
        self.metrics.write(&entry)?;
        if let Some(events) = &mut self.events {
            events.entry(&entry, wall_time)?;
        }
        self.log.push(entry);
        Ok(())
    }

    /// All entries so far, those of earlier parts of a resumed run included: the `log_history` of
    /// [`TrainerState`](crate::TrainerState).
    pub fn entries(&self) -> &[Entry] {
        &self.log
    }

    /// The loss curve so far.
    pub fn curve(&self, title: &str) -> Curve {
        Curve::from_entries(title, &self.log)
    }

    /// Draws the loss curve so far as `training_loss.svg` and `training_loss.png`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn plot(&self, title: &str) -> Result<[PathBuf; 2]> {
        curve::write(&self.curve(title), &self.dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn two_kills_and_every_step_once() {
        let scratch = Scratch::new("recorder");
        let dir = scratch.path("out");
        let mut options =
            RecorderOptions { events_dir: Some(dir.join("runs")), wall_time: 1.8e9, ..Default::default() };
        // Killed after step 5 and after step 8; checkpoints at 4 and 6.
        for (resume, last) in [(None, 5), (Some(4), 8), (Some(6), 10)] {
            options.resume_step = resume;
            let mut recorder = Recorder::open(&dir, &options).unwrap();
            for step in resume.unwrap_or(0) + 1..=last {
                recorder.log(Entry::new(step, 0.0).with("loss", step as f64 / 3.0), 1.8e9 + step as f64).unwrap();
            }
            assert_eq!(recorder.entries().len() as u64, last);
        }
        let steps: Vec<_> = crate::metrics::read(&dir.join("metrics.jsonl")).unwrap().iter().map(|e| e.step).collect();
        assert_eq!(steps, (1..=10).collect::<Vec<_>>());
        assert_eq!(std::fs::read_dir(dir.join("runs")).unwrap().count(), 3);

        // Anew in the same folder: the metrics of the old run are gone.
        options.resume_step = None;
        let recorder = Recorder::open(&dir, &options).unwrap();
        assert!(recorder.entries().is_empty());
        assert!(recorder.plot("nothing yet").unwrap()[1].exists());
    }
}
