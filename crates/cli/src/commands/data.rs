//! `phalanx data check`

use std::path::Path;

use phalanx_config::{Config, Purpose, Stage};
use phalanx_data::check::{CheckOptions, check};
use phalanx_data::{ChatTemplate, Tokenizer};
use phalanx_models::ModelConfig;
use phalanx_train::job::{data_options, model_config, tokenizer_dir};

use super::configured;
use super::preparing::Bar;
use crate::args::Data;
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(what: Data) -> Result<Outcome> {
    let Data::Check(args) = what;
    let c = configured::read(&args.args, Purpose::Data)?;
    let mut options = data_options(&c.config);
    if options.dataset.is_empty() {
        options.dataset = std::mem::take(&mut options.eval_dataset);
    }
    let dir = tokenizer_dir(&c.config)?;
    let tokenizer = Tokenizer::from_dir(&dir)?;
    // Ids are held against the rows of the model, lengths against its positions.
    let model = match names_a_model(&c.config) {
        true => Some(model_config(&c.config)?),
        false => dir.join("config.json").is_file().then(|| ModelConfig::from_folder(&dir)).transpose()?,
    };
    let template = match c.config.method.stage {
        Stage::Pt => None,
        Stage::Sft => Some(ChatTemplate::choose(&tokenizer, &options)?.0),
    };
    let look = CheckOptions {
        embedding_rows: model.as_ref().map(|m| m.vocab_size),
        positions: model.as_ref().map(|m| m.max_position_embeddings),
        ..CheckOptions::default()
    };
    let bar = Bar::new(c.json || c.plain);
    let report = check(&options, &tokenizer, template.as_ref(), &look, &|p| bar.data(p))?;
    drop(bar);
    if c.json {
        out::line(serde_json::to_string(&report)?)?;
    } else {
        out::text(report.render(super::style().has_colour()))?;
    }
    Ok(if report.ok { Outcome::Done } else { Outcome::Failed })
}

/// Whether the configuration names the model that will be trained; for looking at data, a tokenizer alone is enough.
fn names_a_model(config: &Config) -> bool {
    let m = &config.model;
    let folder = |dir: &String| Path::new(dir).join("config.json").is_file();
    m.model.is_some()
        || m.shape.is_some()
        || m.config_name_or_path.is_some()
        || m.model_name_or_path.as_ref().is_some_and(folder)
}
