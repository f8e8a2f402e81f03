//! `phalanx eval`

use std::sync::atomic::AtomicBool;

use phalanx_config::{InferDtype, Purpose, Stage};
use phalanx_data::{prepare, prepare_eval};
use phalanx_nn::{Batch, Env};
use phalanx_train::evaluate::{evaluate, perplexity};
use phalanx_train::job::{Job, Use, data_options};
use serde_json::json;

use super::configured;
use super::preparing::Bar;
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(args: &[String]) -> Result<Outcome> {
    let c = configured::read(args, Purpose::Eval)?;
    configured::note_forgotten(&c.config);
    let mut config = c.config;
    if config.train.bf16 && !config.is_set("infer_dtype") {
        // As the evaluation inside a training run of this file.
        config.model.infer_dtype = InferDtype::Bfloat16;
    }
    let mut job = Job::prepare(config, Use::Infer)?;
    let tokenizer = job.tokenizer()?;
    let template = match job.config.method.stage {
        Stage::Pt => None,
        Stage::Sft => Some(job.template(&tokenizer)?.0),
    };
    let options = data_options(&job.config);
    let bar = Bar::new(c.json || c.plain);
    let (corpus, messages) = if options.eval_dataset.is_empty() {
        let data = prepare(&options, &tokenizer, template.as_ref(), &|p| bar.data(p))?;
        let mut messages = data.messages;
        if data.eval.is_none() {
            messages.push("note: neither eval_dataset nor val_size is set, so the training data is measured".into());
        }
        // The part held back where there is one, else all that was named.
        (data.eval.unwrap_or(data.train), messages)
    } else {
        prepare_eval(&options, &tokenizer, template.as_ref(), &|p| bar.data(p))?
    };
    drop(bar);
    messages.iter().for_each(|m| eprintln!("{m}"));
    job.load(None)?;
    let mut env = Env::new(job.rt.clone(), Batch::causal(&[]));
    env.adapters = job.adapters.clone();
    let rows = job.config.train.per_device_eval_batch_size;
    let Some(loss) = evaluate(&job.model, &env, &corpus, rows, &AtomicBool::new(false), None)? else {
        return Ok(Outcome::Interrupted);
    };
    let mean = loss.mean();
    if !mean.is_finite() {
        return Err(format!("the loss is {mean}: the weights are damaged or come from a run that diverged").into());
    }
    if c.json {
        out::line(
            json!({"eval_loss": mean, "eval_perplexity": perplexity(mean), "label_tokens": loss.count, "rows": corpus.rows_per_epoch()}),
        )?;
    } else {
        out::line(format_args!(
            "loss {mean:.4}, perplexity {:.3} over {} tokens in {} rows",
            perplexity(mean),
            loss.count,
            corpus.rows_per_epoch()
        ))?;
    }
    Ok(Outcome::Done)
}
