//! `phalanx train`

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use phalanx_config::{Purpose, Stage};
use phalanx_data::check::beyond_positions;
use phalanx_data::prepare;
use phalanx_report::{Ending, ProcessMemory, Summary, units};
use phalanx_train::checkpoint::read_state;
use phalanx_train::job::{Job, Use, data_options, method_name};
use phalanx_train::resume::{claim, starting_point};
use phalanx_train::trainer::{self, Finished, Observer};
use serde_json::json;

use super::configured;
use super::preparing::Bar;
use super::shell::command;
use super::watch::{Watch, interrupts};
use crate::outcome::{Outcome, Result};

pub fn run(args: &[String]) -> Result<Outcome> {
    let c = configured::read(args, Purpose::Train)?;
    // Looked at before it is claimed: a folder that is refused stays as it is.
    starting_point(&c.config)?;
    let mut job = Job::prepare(c.config, Use::Train)?;
    let tokenizer = job.tokenizer()?;
    let _claim = claim(&job.config)?;
    let start = starting_point(&job.config)?;
    phalanx_train::disk::check_space(&job)?;
    let stop = Arc::new(AtomicBool::new(false));
    let plain = c.plain || job.config.train.disable_tqdm == Some(true);
    let mut watch = Watch::new(c.json, plain, Arc::clone(&stop));
    start.notes.iter().for_each(|n| watch.message(n));
    let mut options = data_options(&job.config);
    if let Some(checkpoint) = &start.checkpoint {
        options = options.of_run(&read_state(checkpoint)?.stream);
    }
    let template = match job.config.method.stage {
        Stage::Pt => None,
        Stage::Sft => {
            let (template, notes) = job.template_of(&tokenizer, &options)?;
            notes.iter().for_each(|n| watch.message(n));
            Some(template)
        }
    };
    let bar = Bar::new(c.json || plain);
    let data = prepare(&options, &tokenizer, template.as_ref(), &|p| bar.data(p))?;
    drop(bar);
    data.messages.iter().for_each(|m| watch.message(m));
    describe(&job, &data, &mut watch);
    interrupts(&stop)?;
    let finished = trainer::train(&mut job, data.train, data.eval, &start, &stop, &mut watch)?;
    watch.finish();
    let interrupted = finished.interrupted.is_some();
    conclude(&job, finished, args, &mut watch);
    Ok(if interrupted { Outcome::Interrupted } else { Outcome::Done })
}

fn describe(job: &Job, data: &phalanx_data::Prepared, watch: &mut Watch) {
    let trained: usize = job.model.parameters().iter().filter(|p| p.trainable()).map(|p| p.len()).sum();
    let all = job.model.config().num_params();
    let method = method_name(&job.config);
    let t = &job.config.train;
    let what = if let Some(o) = &job.lora {
        let adapted = job.plan.modules.iter().filter(|(_, m)| m.adapter);
        let shapes = adapted.filter_map(|(path, _)| job.shape_of(&format!("{path}.weight")));
        let adapters: usize = shapes.map(|s| s.iter().sum::<usize>().saturating_mul(o.rank)).sum();
        format!("{method}, {} trained beside {}", count(trained + adapters), count(all))
    } else {
        format!("{method}, {} of {}", count(trained), count(all))
    };
    let threads = match job.rt.device().team().threads() {
        1 => "1 thread".to_owned(),
        n => format!("{n} threads"),
    };
    let on = match job.mesh.num_ranks() {
        Ok(world) if world > 1 => format!("{world} ranks of {threads} ({})", job.mesh),
        _ => threads,
    };
    watch.message(&format!("{} {what} parameters, {on}", job.model.config().model_type));
    let totals = data.train.totals();
    watch.message(&format!(
        "{} rows, {} tokens, {} of them trained on; {} rows a step",
        data.train.rows_per_epoch(),
        totals.tokens,
        totals.targets,
        t.per_device_train_batch_size * t.gradient_accumulation_steps * job.mesh.dp_replicate * job.mesh.dp_shard
    ));
    if let Some(text) = beyond_positions(totals.longest, job.model.config().max_position_embeddings) {
        watch.message(&text);
    }
}

fn count(n: usize) -> String {
    match n {
        0..=9_999 => n.to_string(),
        10_000..=9_999_999 => format!("{:.1} k", n as f64 / 1e3),
        _ => format!("{:.1} M", n as f64 / 1e6),
    }
}

fn conclude(job: &Job, f: Finished, args: &[String], watch: &mut Watch) {
    let dir = job.config.train.output_dir.clone().unwrap_or_else(|| PathBuf::from("."));
    // Without a slash at the end, so that a name beside it can be made of it.
    let dir = dir.components().as_path().display().to_string();
    let mut next = Vec::new();
    let base = job.config.model.model_name_or_path.clone().unwrap_or_default();
    if f.interrupted.is_some() {
        // Said outright, so that overwrite_output_dir in the file does not mean this run.
        let words = ["phalanx", "train"].into_iter().chain(args.iter().map(String::as_str));
        next.push(("go on".to_owned(), command(words.chain(["resume_from_checkpoint=true"]))));
    } else if job.lora.is_some() {
        next.push(("talk to it".into(), command(["phalanx", "chat", &base, "--adapter", &dir])));
        let keys = [
            format!("model_name_or_path={base}"),
            format!("adapter_name_or_path={dir}"),
            format!("export_dir={dir}-merged"),
        ];
        let words = ["phalanx", "export"].into_iter().chain(keys.iter().map(String::as_str));
        next.push(("merge".into(), command(words)));
    } else if job.config.method.stage == Stage::Sft {
        next.push(("try it".into(), command(["phalanx", "chat", &dir])));
    } else {
        next.push(("try it".into(), command(["phalanx", "generate", &dir, "--prompt", "Once upon a time"])));
    }
    let ending = if f.interrupted.is_some() { Ending::Interrupted } else { Ending::Finished };
    let summary = Summary {
        ending,
        steps: f.state.step,
        total_steps: f.total_steps,
        epochs: f.epochs,
        tokens: f.state.tokens,
        label_tokens: f.state.label_tokens,
        seconds: f.state.seconds,
        skipped_steps: f.state.skipped,
        curve: f.curve,
        peak_memory: ProcessMemory::read().peak,
        predicted_memory: None,
        outputs: f.outputs,
        next,
    };
    if watch.is_json() {
        watch.event(&json!({"event": "summary", "summary": summary.to_json()}));
        for mut line in f.profile.iter().flat_map(phalanx_report::Profile::json_lines) {
            line["event"] = json!("profile");
            watch.event(&line);
        }
        return;
    }
    let mut text = summary.render(super::style()) + "\n";
    for (category, bytes) in f.memory.iter().filter(|(_, b)| **b > 0) {
        text += &format!("  peak {category:<14} {}\n", units::bytes(*bytes as u64));
    }
    if let Some(profile) = &f.profile {
        text += &format!("\n{}", profile.render(super::style()));
    }
    // Everything is saved; whether anybody reads the summary changes nothing.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
