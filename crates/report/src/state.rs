//! `trainer_state.json`, as transformers writes it: other tools draw curves and find the best checkpoint from it.

use std::path::Path;

use serde_json::{Value, json};

use crate::entry::Entry;
use crate::error::{ReportError, Result};

/// What `trainer_state.json` holds. Field names are those of transformers' `TrainerState`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TrainerState {
    /// Optimizer steps done.
    pub global_step: u64,
    /// Optimizer steps of the whole run.
    pub max_steps: u64,
    /// Passes over the data done.
    pub epoch: f64,
    /// Passes over the data of the whole run, rounded up.
    pub num_train_epochs: u64,
    /// Steps between log entries.
    pub logging_steps: u64,
    /// Steps between evaluations.
    pub eval_steps: u64,
    /// Steps between checkpoints.
    pub save_steps: u64,
    /// Sequences of one micro-batch.
    pub train_batch_size: u64,
    /// Tokens read so far.
    pub num_input_tokens_seen: u64,
    /// Floating-point operations so far.
    pub total_flos: f64,
    /// The best value of the metric that decides.
    pub best_metric: Option<f64>,
    /// The step that had it.
    pub best_global_step: Option<u64>,
    /// The checkpoint of that step.
    pub best_model_checkpoint: Option<String>,
    /// Everything that was logged.
    pub log_history: Vec<Entry>,
}

impl TrainerState {
    /// The file's content.
    pub fn to_json(&self) -> Value {
        json!({
            "best_global_step": self.best_global_step,
            "best_metric": self.best_metric,
            "best_model_checkpoint": self.best_model_checkpoint,
            "epoch": self.epoch,
            "eval_steps": self.eval_steps,
            "global_step": self.global_step,
            "is_hyper_param_search": false,
            "is_local_process_zero": true,
            "is_world_process_zero": true,
            "log_history": self.log_history.iter().map(Entry::to_json).collect::<Vec<_>>(),
            "logging_steps": self.logging_steps,
            "max_steps": self.max_steps,
            "num_input_tokens_seen": self.num_input_tokens_seen,
            "num_train_epochs": self.num_train_epochs,
            "save_steps": self.save_steps,
            "stateful_callbacks": {},
            "total_flos": self.total_flos,
            "train_batch_size": self.train_batch_size,
            "trial_name": null,
            "trial_params": null,
        })
    }

    /// Writes the file, as a whole or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = format!("{:#}\n", self.to_json());
        phalanx_formats::atomic::write_bytes(path, text.as_bytes())?;
        Ok(())
    }

    /// Reads a file of this program or of transformers. Keys that are missing keep their default.
    ///
    /// # Errors
    /// The file cannot be read or is no JSON object.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| ReportError::io(path, "read the file", e))?;
        let malformed = |line, what| ReportError::Malformed {
            path: path.into(),
            line,
            what,
            mend: "choose another checkpoint, or remove the file",
        };
        let json: Value = serde_json::from_str(&text).map_err(|e| malformed(e.line(), e.to_string()))?;
        if !json.is_object() {
            return Err(malformed(1, "not a JSON object".into()));
        }
        let whole = |key: &str| json[key].as_u64().unwrap_or(0);
        Ok(TrainerState {
            global_step: whole("global_step"),
            max_steps: whole("max_steps"),
            epoch: json["epoch"].as_f64().unwrap_or(0.0),
            num_train_epochs: whole("num_train_epochs"),
            logging_steps: whole("logging_steps"),
            eval_steps: whole("eval_steps"),
            save_steps: whole("save_steps"),
            train_batch_size: whole("train_batch_size"),
            num_input_tokens_seen: whole("num_input_tokens_seen"),
            total_flos: json["total_flos"].as_f64().unwrap_or(0.0),
            best_metric: json["best_metric"].as_f64(),
            best_global_step: json["best_global_step"].as_u64(),
            best_model_checkpoint: json["best_model_checkpoint"].as_str().map(str::to_owned),
            log_history: json["log_history"].as_array().into_iter().flatten().filter_map(Entry::from_json).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn there_and_back() {
        let scratch = Scratch::new("state");
        let path = scratch.path("trainer_state.json");
        let state = TrainerState {
            global_step: 20,
            max_steps: 60,
            epoch: 0.5,
            num_train_epochs: 2,
            best_metric: Some(1.25),
            best_global_step: Some(10),
            best_model_checkpoint: Some("out/checkpoint-10".into()),
            log_history: vec![Entry::new(10, 0.25).with("loss", 2.0), Entry::new(10, 0.25).with("eval_loss", 1.25)],
            ..TrainerState::default()
        };
        state.write(&path).unwrap();
        assert_eq!(TrainerState::read(&path).unwrap(), state);
        std::fs::write(&path, "{\n\"epoch\": }").unwrap();
        assert!(TrainerState::read(&path).unwrap_err().to_string().contains("trainer_state.json:2"));
    }
}
