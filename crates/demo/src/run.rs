//! The demo itself, from an empty folder to a model that tells stories.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use phalanx_config::{Config, Purpose};
use phalanx_data::{Prepared, Tokenizer, prepare};
use phalanx_report::{curve, units};
use phalanx_train::job::{Job, Use, data_options};
use phalanx_train::resume::{Claim, Start as Begin, claim_folder};
use phalanx_train::trainer::{self, Finished};
use serde::Serialize;
use serde_json::json;

use crate::error::{DemoError, Result};
use crate::folder::{Contents, Folder};
use crate::settings::{Changes, DEMO_YAML};
use crate::{corpus, pace, sample, settings, tokenizer};

/// What to do with a demo that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Existing {
    /// Go on with one that was stopped; leave one that is done alone ([`DemoError::Finished`]).
    #[default]
    Keep,
    /// Train one that is done further: as many steps again, or [`Options::steps`].
    Continue,
    /// Remove it and start anew.
    Overwrite,
}

/// What can be chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Folder to write. Default `phalanx-demo`.
    pub output_dir: PathBuf,
    /// Train this many minutes instead of the steps of `demo.yaml`: a few steps are timed first.
    pub minutes: Option<f64>,
    /// Train this many steps.
    pub steps: Option<u64>,
    /// Seed of corpus, weights, order and samples. Default 42.
    pub seed: u64,
    /// Threads; all cores if left out. Changes nothing in the result.
    pub threads: Option<usize>,
    /// What to do with a demo that is there already.
    pub existing: Existing,
    /// Stories of the corpus. Default 3,000: 1.7 MB.
    pub stories: usize,
    /// Further changes of the configuration, for tests and experiments.
    pub changes: Changes,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            output_dir: "phalanx-demo".into(),
            minutes: None,
            steps: None,
            seed: 42,
            threads: None,
            existing: Existing::default(),
            stories: 3000,
            changes: Changes::default(),
        }
    }
}

/// Whoever watches the demo. Without methods of its own, everything comes as messages and steps.
pub trait Observer: trainer::Observer {
    /// A part begins.
    fn heading(&mut self, text: &str) {
        self.message(&format!("\n{text}"));
    }
    /// Lines to be shown as they are: a sample, the curve, a list of files.
    fn block(&mut self, text: &str) {
        self.message(text.trim_end_matches('\n'));
    }
    /// The stories are being read or tokenised.
    fn preparing(&mut self, _: phalanx_data::Progress<'_>) {}
    /// Training is over, the last step was shown: the place to close a progress bar.
    fn trained(&mut self) {}
}

/// What came out.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// The demo's folder.
    pub dir: PathBuf,
    /// How both samples begin.
    pub prompt: &'static str,
    /// What the model wrote before training (or before this run).
    pub before: String,
    /// What it writes now; none if the run was stopped.
    pub after: Option<String>,
    /// Parameters of the model.
    pub parameters: usize,
    /// Steps done.
    pub steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// First logged training loss.
    pub first_loss: Option<f64>,
    /// Last logged training loss.
    pub last_loss: Option<f64>,
    /// Last loss on stories that were held back.
    pub eval_loss: Option<f64>,
    /// The checkpoint to go on from, if the run was stopped.
    pub interrupted: Option<PathBuf>,
    /// What lies where.
    pub files: Vec<(String, PathBuf)>,
    /// Commands that make sense now: what for, and the command.
    pub next: Vec<(String, String)>,
}

/// Longest sample, in tokens.
const SAMPLE_TOKENS: usize = 280;
/// The sample of an untrained model is noise; a little is enough.
const NOISE_TOKENS: usize = 60;
/// Columns of a sample.
const WIDTH: usize = 76;

/// Runs the demo. `stop` is looked at after every step: once true, the run saves and ends.
///
/// # Errors
/// If the folder holds something else or a finished demo ([`Existing`]), an option cannot be, the disk refuses or memory runs out.
pub fn run(options: &Options, stop: &AtomicBool, watch: &mut dyn Observer) -> Result<Outcome> {
    options.check()?;
    let folder = Folder::new(&options.output_dir);
    let start = Start::find(options, &folder)?;
    let mut demo = match &start {
        Start::New => Demo::create(options, folder, watch)?,
        Start::From { step, .. } => Demo::open(options, folder, *step, &start, watch)?,
    };
    demo.introduce(watch);
    let checkpoint = start.checkpoint();
    demo.job.load(checkpoint)?;
    let before = demo.before(&start, options, watch)?;
    demo.time_steps(&start, options)?;
    watch.heading(&format!(
        "Training, {} steps (Ctrl-C saves and stops)",
        demo.job.config.train.max_steps().unwrap_or(0)
    ));
    let (train, eval) = (demo.data.train.clone(), demo.data.eval.clone());
    let finished =
        trainer::train(&mut demo.job, train, eval, &Begin::at(checkpoint.map(Path::to_path_buf)), stop, watch)?;
    watch.trained();
    demo.conclude(options, before, finished, watch)
}

impl Options {
    fn check(&self) -> Result<()> {
        let refuse = |key, why: &str| Err(DemoError::Option { key, why: why.into() });
        if self.minutes.is_some() && self.steps.is_some() {
            return refuse("minutes", "excludes steps; give one of the two");
        }
        if self.steps == Some(0) {
            return refuse("steps", "must be at least 1");
        }
        if self.threads == Some(0) {
            return refuse("threads", "must be at least 1; leave it out for all cores");
        }
        self.minutes.map_or(Ok(()), pace::check_minutes)
    }
}

/// Where a run begins.
enum Start {
    New,
    From { step: u64, checkpoint: PathBuf, done: bool },
}

impl Start {
    fn find(options: &Options, folder: &Folder) -> Result<Start> {
        let contents = folder.look()?;
        match (contents, options.existing) {
            (Contents::Nothing, Existing::Continue) => Err(DemoError::NothingToContinue { dir: folder.dir.clone() }),
            (Contents::Nothing, _) | (_, Existing::Overwrite) => Ok(Start::New),
            (Contents::Stopped(step, checkpoint), _) => Ok(Start::From { step, checkpoint, done: false }),
            (Contents::Finished(steps, _), Existing::Keep) => {
                Err(DemoError::Finished { dir: folder.dir.clone(), steps })
            }
            (Contents::Finished(step, Some(checkpoint)), _) => Ok(Start::From { step, checkpoint, done: true }),
            (Contents::Finished(_, None), _) => Err(DemoError::NothingToContinue { dir: folder.dir.clone() }),
        }
    }

    fn checkpoint(&self) -> Option<&Path> {
        match self {
            Start::New => None,
            Start::From { checkpoint, .. } => Some(checkpoint),
        }
    }
}

/// A demo whose data and model are there.
struct Demo {
    folder: Folder,
    job: Job,
    tokenizer: Tokenizer,
    data: Prepared,
    /// The configuration as text, as it stands in the folder.
    text: String,
    /// Two demos in one folder would write over each other.
    _claim: Option<Claim>,
}

impl Demo {
    /// Makes corpus, tokenizer and configuration.
    fn create(options: &Options, folder: Folder, watch: &mut dyn Observer) -> Result<Demo> {
        watch.heading("A small language model learns to tell stories, from nothing, on this machine");
        let mut changes = Changes::for_folder(&folder.dir);
        if options.seed != Options::default().seed {
            changes.set("seed", json!(options.seed));
        }
        let text = options.further(options.steps).apply(&changes.apply(DEMO_YAML));
        // Everything is checked before anything is removed or written.
        let config = settings::parse(&text, &folder.config())?;
        let shape = model_shape(&config)?;
        std::fs::create_dir_all(&folder.dir).map_err(DemoError::io(&folder.dir))?;
        let claim = claim_folder(&folder.dir)?;
        folder.clear()?;
        folder.begin()?;
        let stories = corpus::stories(options.seed, options.stories)?;
        folder.write_stories(&stories)?;
        tokenizer::write(&folder.tokenizer(), &stories, shape.vocab_size, shape.max_position_embeddings)?;
        Demo::with(folder, config, text, claim, watch)
    }

    /// Opens a demo to go on with.
    fn open(options: &Options, folder: Folder, step: u64, start: &Start, watch: &mut dyn Observer) -> Result<Demo> {
        watch.heading(&format!("Going on with the demo in {} after step {step}", folder.dir.display()));
        let claim = claim_folder(&folder.dir)?;
        let path = folder.config();
        let text = std::fs::read_to_string(&path).map_err(DemoError::io(&path))?;
        let done = matches!(start, Start::From { done: true, .. });
        let more = options.steps.or(settings::parse(DEMO_YAML, &path)?.train.max_steps());
        let text = options.further(if done { more.map(|m| step + m) } else { options.steps }).apply(&text);
        let config = settings::parse(&text, &path)?;
        Demo::with(folder, config, text, claim, watch)
    }

    fn with(
        folder: Folder,
        config: Config,
        text: String,
        claim: Option<Claim>,
        watch: &mut dyn Observer,
    ) -> Result<Demo> {
        config.check_for(Purpose::Train)?;
        let job = Job::prepare(config, Use::Train)?;
        let tokenizer = job.tokenizer()?;
        // Progress is told through a shared reference, in this thread.
        let watch = std::cell::RefCell::new(watch);
        let on_progress = |p: phalanx_data::Progress<'_>| watch.borrow_mut().preparing(p);
        let data = prepare(&data_options(&job.config), &tokenizer, None, &on_progress)?;
        let demo = Demo { folder, job, tokenizer, data, text, _claim: claim };
        demo.write_config()?;
        Ok(demo)
    }

    fn write_config(&self) -> Result<()> {
        Ok(phalanx_formats::atomic::write_bytes(self.folder.config(), self.text.as_bytes())?)
    }

    fn introduce(&self, watch: &mut dyn Observer) {
        let (shape, t) = (self.job.model.config(), &self.job.config.train);
        let held_back = self.data.eval.as_ref().map_or(0, |e| e.totals().documents);
        let totals = self.data.train.totals();
        let bytes = std::fs::metadata(self.folder.stories()).map_or(0, |m| m.len());
        let rows = t.per_device_train_batch_size * t.gradient_accumulation_steps;
        watch.block(&format!(
            "  corpus     {} stories written by a grammar, {}, {held_back} of them held back\n  \
               tokenizer  byte-level BPE trained on them, {} tokens\n  \
               model      {}, {} layers of width {}, {} parameters, all random\n  \
               data       {} tokens, packed in rows of up to {}; {rows} rows a step\n  \
               machine    {} threads; results do not depend on their number\n",
            units::grouped(totals.documents + held_back),
            units::bytes(bytes),
            units::grouped(shape.vocab_size as u64),
            shape.model_type,
            shape.num_hidden_layers,
            shape.hidden_size,
            units::count(shape.num_params() as f64),
            units::grouped(totals.tokens),
            self.job.config.data.cutoff_len,
            self.job.rt.device().team().threads(),
        ));
        self.data.messages.iter().for_each(|m| watch.message(m));
    }

    fn before(&self, start: &Start, options: &Options, watch: &mut dyn Observer) -> Result<String> {
        let (title, tokens) = match start {
            Start::New => ("Before training", NOISE_TOKENS),
            Start::From { .. } => ("So far", SAMPLE_TOKENS),
        };
        let text = sample::sample(&self.job, &self.tokenizer, options.seed, tokens)?;
        watch.heading(&format!("{title}, it continues \"{}\" like this", sample::PROMPT));
        watch.block(&sample::block(&text, WIDTH));
        Ok(text)
    }

    /// Turns `minutes` into steps.
    fn time_steps(&mut self, start: &Start, options: &Options) -> Result<()> {
        let Some(minutes) = options.minutes else { return Ok(()) };
        let steps = pace::steps_in(minutes, pace::seconds_per_step(&self.job, &self.data.train)?);
        let done = if let Start::From { step, .. } = start { *step } else { 0 };
        let mut changes = Changes::default();
        changes.set("max_steps", json!(done + steps));
        self.text = changes.apply(&self.text);
        self.job.config = settings::parse(&self.text, &self.folder.config())?;
        self.write_config()
    }

    fn conclude(self, options: &Options, before: String, f: Finished, watch: &mut dyn Observer) -> Result<Outcome> {
        let dir = &self.folder.dir;
        let mut outcome = Outcome {
            dir: dir.clone(),
            prompt: sample::PROMPT,
            before,
            after: None,
            parameters: self.job.model.config().num_params(),
            steps: f.state.step,
            total_steps: f.total_steps,
            tokens: f.state.tokens,
            seconds: f.state.seconds,
            first_loss: f.curve.train.first().map(|p| p.1),
            last_loss: f.curve.train.last().map(|p| p.1),
            eval_loss: f.eval_loss,
            interrupted: f.interrupted.clone(),
            files: vec![],
            next: vec![],
        };
        watch.heading(&format!("The loss over {} steps, {}", outcome.steps, units::duration(outcome.seconds)));
        watch.block(&curve::ascii(&f.curve, 64, 12));
        let again = again_command(options);
        if outcome.interrupted.is_some() {
            outcome.next.push(("go on".into(), again));
        } else {
            let text = sample::sample_folder(&self.folder.model(), options.threads, options.seed, SAMPLE_TOKENS)?;
            watch.heading(&format!("Now it continues \"{}\" like this", sample::PROMPT));
            watch.block(&sample::block(&text, WIDTH));
            outcome.after = Some(text);
            outcome.files = self.files(&f);
            outcome.next = next(dir, &again);
            watch.heading("What lies where");
            watch.block(&columns(
                &outcome.files.iter().map(|(w, p)| (&**w, p.display().to_string())).collect::<Vec<_>>(),
            ));
        }
        watch.heading("What to do next");
        watch.block(&columns(&outcome.next.iter().map(|(w, c)| (&**w, c.clone())).collect::<Vec<_>>()));
        Ok(outcome)
    }

    fn files(&self, f: &Finished) -> Vec<(String, PathBuf)> {
        let model = self.folder.model();
        let mut files = vec![("model (Hugging Face)".to_owned(), model.clone())];
        let curve = f.outputs.iter().find(|(name, _)| name.ends_with(".png"));
        files.extend(curve.map(|(_, path)| ("loss curve (and .svg)".to_owned(), path.clone())));
        files.push(("metrics, a JSON line each".into(), model.join("metrics.jsonl")));
        files.push(("TensorBoard".into(), model.join("runs")));
        files.push(("stories".into(), self.folder.stories()));
        files.push(("configuration".into(), self.folder.config()));
        files
    }
}

impl Options {
    /// The changes of the configuration that this run asks for.
    fn further(&self, steps: Option<u64>) -> Changes {
        let mut changes = self.changes.clone();
        if let Some(steps) = steps {
            changes.set("max_steps", json!(steps));
        }
        if let Some(threads) = self.threads {
            changes.set("threads", json!(threads));
        }
        changes
    }
}

fn model_shape(config: &Config) -> Result<phalanx_models::ModelConfig> {
    // Preparing a job reads no weights; the tokenizer is not there yet and is not looked at.
    Ok(Job::prepare(config.clone(), Use::Train)?.model.config().clone())
}

/// A path as a word of a shell command.
fn word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

fn again_command(options: &Options) -> String {
    let mut command = "phalanx demo".to_owned();
    if options.output_dir != Options::default().output_dir {
        command += &format!(" --output_dir {}", word(&options.output_dir));
    }
    command
}

fn next(dir: &Path, again: &str) -> Vec<(String, String)> {
    let (model, yaml) = (word(&dir.join("model")), word(&dir.join("demo.yaml")));
    vec![
        ("another story".into(), format!("phalanx generate {model} --prompt \"One sunny day, a fox named\" --seed 1")),
        ("train further".into(), format!("{again} --continue")),
        ("change something".into(), format!("phalanx train {yaml} learning_rate=1e-3 output_dir=second")),
        ("see the tokens".into(), format!("phalanx data check {yaml}")),
    ]
}

/// Two columns, indented.
fn columns(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(what, _)| what.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(what, value)| format!("  {what:<width$}  {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_can_be_copied_into_a_shell() {
        assert_eq!(word(Path::new("a/b-c.d")), "a/b-c.d");
        assert_eq!(word(Path::new("it's here")), r"'it'\''s here'");
        assert_eq!(columns(&[("a", "x".into()), ("long", "y".into())]), "  a     x\n  long  y\n");
        let options = Options { output_dir: "a b".into(), ..Options::default() };
        assert_eq!(again_command(&options), "phalanx demo --output_dir 'a b'");
    }

    #[test]
    fn options_that_cannot_be_are_named() {
        let refused = |o: Options| o.check().unwrap_err().to_string();
        let base = Options::default;
        assert!(refused(Options { steps: Some(0), ..base() }).starts_with("steps: "));
        assert!(refused(Options { minutes: Some(f64::NAN), ..base() }).starts_with("minutes: "));
        assert!(refused(Options { minutes: Some(1.0), steps: Some(1), ..base() }).contains("excludes"));
        assert!(refused(Options { threads: Some(0), ..base() }).starts_with("threads: "));
    }
}
