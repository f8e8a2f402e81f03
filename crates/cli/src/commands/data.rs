//! `phalanx data check`

use phalanx_config::{Purpose, Stage};
use phalanx_data::check::{CheckOptions, check};
use phalanx_data::{ChatTemplate, Tokenizer};
use phalanx_models::ModelConfig;
use phalanx_train::job::{data_options, tokenizer_dir};

use super::configured;
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
    // Where the folder holds a model too, ids are held against its rows, lengths against its positions.
    let model = dir.join("config.json").is_file().then(|| ModelConfig::from_folder(&dir)).transpose()?;
    let template = match c.config.method.stage {
        Stage::Pt => None,
        Stage::Sft => Some(ChatTemplate::choose(&tokenizer, &options)?.0),
    };
    let look = CheckOptions {
        embedding_rows: model.as_ref().map(|m| m.vocab_size),
        positions: model.as_ref().map(|m| m.max_position_embeddings),
        ..CheckOptions::default()
    };
    let report = check(&options, &tokenizer, template.as_ref(), &look, &|_| {})?;
    if c.json {
        out::line(serde_json::to_string(&report)?)?;
    } else {
        out::text(report.render(super::style().has_colour()))?;
    }
    Ok(if report.ok { Outcome::Done } else { Outcome::Failed })
}
