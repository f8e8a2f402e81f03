//! The training loop: batches → gradients → clip → update → log → evaluate → save.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use phalanx_comm::World;
use phalanx_config::{Config, DecayType, LrSchedulerType, Steps, Strategy, WarmupType};
use phalanx_data::{Corpus, Stream, StreamOptions};
use phalanx_formats::atomic;
use phalanx_models::{StoredDType, save_weights};
use phalanx_nn::{Batch, DelayedScales, Env, NnError, Parameter, RouterStep};
use phalanx_report::{Entry, Pace, ProcessMemory, Profile, Step as ProgressStep};
use phalanx_tensor::DType;

use crate::checkpoint::{self, Interval, RunState};
use crate::evaluate::{agreed, evaluate, perplexity};
use crate::job::{Job, data_options};
use crate::optimizer::{AdamW, AdamWOptions, clip_factor};
use crate::ranks::{Gathering, What};
use crate::resume::{Start, same};
use crate::run_files::RunFiles;
use crate::schedule::{Schedule, Shape, Slope};
use crate::step::LossCount;
use crate::step_clock::StepClock;
use crate::window::{MicroBatch, env_on, gradients, norm};
use crate::{Result, TrainError, adapter, experts, model_output, profiling, ranks};

/// What a run tells whoever watches it.
pub trait Observer {
    /// A sentence.
    fn message(&mut self, text: &str);
    /// Training begins: so many of so many steps are done.
    fn begins(&mut self, _step: u64, _total: u64) {}
    /// A step was done; `logged` when it also went into the metrics.
    fn step(&mut self, step: &ProgressStep, logged: bool);
    /// A micro-batch was read: the numbers of its documents ([`phalanx_data::Batch::sample_ids`]).
    fn samples(&mut self, _ids: &[u64]) {}
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Counters at the end.
    pub state: RunState,
    /// All steps of the run.
    pub total_steps: u64,
    /// Epochs done.
    pub epochs: f64,
    /// Where training stands if the user stopped it.
    pub interrupted: Option<PathBuf>,
    /// Curve of the run.
    pub curve: phalanx_report::Curve,
    /// Files left.
    pub outputs: Vec<(String, PathBuf)>,
    /// Last evaluation loss.
    pub eval_loss: Option<f64>,
    /// Peaks of the tensor pool by category, bytes; on a mesh those of the first rank.
    pub memory: BTreeMap<&'static str, usize>,
    /// What kernels took, with `profile`.
    pub profile: Option<Profile>,
}

/// Steps of a run over `rows` rows an epoch.
fn total_steps(job: &Job, rows: u64) -> (u64, u64) {
    let t = &job.config.train;
    let per_batch = rows.div_ceil(t.per_device_train_batch_size as u64);
    let shares = (job.mesh.dp_replicate * job.mesh.dp_shard) as u64;
    let per_epoch = per_batch.div_ceil(t.gradient_accumulation_steps as u64 * shares).max(1);
    let total = match t.max_steps() {
        Some(n) => n,
        None => (t.num_train_epochs * per_epoch as f64).ceil() as u64,
    };
    (total.max(1), per_epoch)
}

/// The learning rate of a configuration over a run of `total` steps.
pub fn schedule(config: &Config, total: u64) -> Schedule {
    let t = &config.train;
    let k = &t.lr_scheduler_kwargs;
    let warmup = t.warmup_steps(total);
    let floor = k.min_lr_rate.or(k.min_lr.map(|m| m / t.learning_rate)).unwrap_or(0.0);
    let (shape, warmup) = match t.lr_scheduler_type {
        LrSchedulerType::Linear => (Shape::Linear, warmup),
        LrSchedulerType::Constant => (Shape::Constant, 0),
        LrSchedulerType::ConstantWithWarmup => (Shape::Constant, warmup),
        LrSchedulerType::Cosine => (Shape::Cosine { cycles: k.num_cycles, min_ratio: 0.0 }, warmup),
        LrSchedulerType::CosineWithMinLr => (Shape::Cosine { cycles: k.num_cycles, min_ratio: floor }, warmup),
        LrSchedulerType::WarmupStableDecay => {
            let left = total.saturating_sub(warmup);
            let (stable_steps, decay_steps) = match (k.num_stable_steps, k.num_decay_steps) {
                (Some(s), Some(d)) => (s.of(total), d.of(total)),
                (Some(s), None) => (s.of(total), left.saturating_sub(s.of(total))),
                (None, d) => {
                    let decay = d.map_or(total.div_ceil(10), |d| d.of(total));
                    (left.saturating_sub(decay), decay)
                }
            };
            let rise = match k.warmup_type {
                WarmupType::Linear => Slope::Linear,
                WarmupType::Cosine => Slope::Cosine,
                WarmupType::OneMinusSqrt => Slope::OneMinusSqrt,
            };
            let fall = match k.decay_type {
                DecayType::Linear => Slope::Linear,
                DecayType::Cosine => Slope::Cosine,
                DecayType::OneMinusSqrt => Slope::OneMinusSqrt,
            };
            (
                Shape::Wsd { rise, stable_steps, decay_steps, fall, cycles: k.num_cycles, min_ratio: k.min_lr_ratio },
                warmup,
            )
        }
    };
    Schedule { lr: t.learning_rate, warmup_steps: warmup, total_steps: total, shape }
}

/// A run in progress.
struct Run<'a> {
    job: &'a Job,
    env: Env,
    optimizer: AdamW,
    schedule: Schedule,
    stream: Stream,
    eval: Option<Corpus>,
    /// On the rank that writes.
    files: Option<RunFiles>,
    state: RunState,
    total: u64,
    per_epoch: u64,
    dir: PathBuf,
    started: Instant,
    seconds_before: f64,
    /// A save was due at a step that was skipped; it is made up for after the next good one.
    save_owed: bool,
    /// Last evaluation loss, and the step it was measured at.
    last_eval: Option<(f64, u64)>,
    /// Seconds of this process that were spent evaluating and saving.
    paused: f64,
    /// What the routers of experts did in the last step that made an update, and the targets that it counted.
    routers: (RouterStep, u64),
    /// Steps before which the profiler starts and stops; the same where there is none.
    profiled: std::ops::Range<u64>,
}

/// Trains. `start` says where the run begins; what it replaces is removed only when weights, adapters, data and optimizer state have
/// been found sound. `stop` is looked at after every step.
///
/// # Errors
/// Whatever is wrong with weights, data or disk; losses that stop being numbers.
pub fn train(
    job: &mut Job,
    corpus: Corpus,
    eval: Option<Corpus>,
    start: &Start,
    stop: &AtomicBool,
    watch: &mut dyn Observer,
) -> Result<Finished> {
    match job.mesh.num_ranks()? {
        1 => train_rank(job, corpus, eval, start, stop, watch),
        world => ranks::train(world, job, (corpus, eval), start, stop, watch),
    }
}

/// The run, as one rank sees it.
pub(crate) fn train_rank(
    job: &mut Job,
    corpus: Corpus,
    eval: Option<Corpus>,
    start: &Start,
    stop: &AtomicBool,
    watch: &mut dyn Observer,
) -> Result<Finished> {
    let Some(dir) = job.config.train.output_dir.clone() else {
        return Err(TrainError::setting("output_dir", "is missing: name a folder for checkpoints and metrics"));
    };
    let resume = start.checkpoint.as_deref();
    let mut resumed = resume.map(checkpoint::read_state).transpose()?;
    if let Some((state, from)) = resumed.as_mut().zip(resume)
        && !from.parent().is_some_and(|p| same(p, &dir))
    {
        // The best of another folder is not there to be kept or shipped.
        state.best = None;
    }
    let mut stream = Stream::new(corpus, StreamOptions::of(&data_options(&job.config)));
    if let Some(s) = &resumed {
        stream.resume(&s.stream)?;
    }
    job.load(resume)?;
    let t = &job.config.train;
    let options = AdamWOptions {
        beta1: t.adam_beta1 as f32,
        beta2: t.adam_beta2 as f32,
        eps: t.adam_epsilon as f32,
        weight_decay: t.weight_decay as f32,
        decay_norms_and_biases: job.config.run.decay_norms_and_biases,
    };
    let mut optimizer = AdamW::new(
        &job.rt,
        &job.trained(),
        // Adapters and whatever else is not the model's own stay f32.
        &|p| if job.shape_of(p.name()).is_some() { job.dtype_of(p.name()) } else { DType::F32 },
        options,
    )?;
    if let (Some(s), Some(from)) = (&resumed, resume) {
        checkpoint::read_optimizer(from, &mut optimizer)?;
        optimizer.set_updates(s.updates);
    }
    let scales = DelayedScales::new(&job.model, &job.plan);
    if let Some(from) = resume {
        let (without, all) = (checkpoint::read_scales(from, &scales)?, scales.by_path.len());
        if without > 0 {
            watch.message(&format!(
                "note: the checkpoint holds no delayed scales for {without} of {all} layers; their first step goes by its own magnitudes"
            ));
        }
    }
    let routing = experts::routing(&job.config, job.model.config())?;
    for key in experts::idle_keys(&job.config, job.model.config()) {
        watch.message(&format!("note: {key} has no effect: the model has no experts"));
    }
    let (total, per_epoch) = total_steps(job, stream.rows_per_epoch());
    if let Some(d) = &job.distributed {
        // Every rank has found everything sound and read what it needs.
        d.mesh().group::<World>().barrier()?;
    }
    let mut files = None;
    if leads(job) {
        start.clear()?;
        std::fs::create_dir_all(&dir).map_err(TrainError::io(&dir))?;
        atomic::clean_stale(&dir)?;
        files = Some(RunFiles::open(&dir, &job.config, resumed.as_ref().map(|s| s.step))?);
    }
    let mut state = resumed.unwrap_or_else(|| RunState {
        version: checkpoint::VERSION,
        step: 0,
        updates: 0,
        moment: 0,
        tokens: 0,
        label_tokens: 0,
        skipped: 0,
        seconds: 0.0,
        best: None,
        stream: stream.state(),
        interval: Interval::default(),
        skipped_in_a_row: 0,
        eval_owed: false,
        config: serde_json::Map::new(),
    });
    // From here on the run is the one that the present configuration describes.
    state.config = crate::same_run::recorded(&job.config)?;
    let mut env = Env::new(job.rt.clone(), Batch::causal(&[]));
    env.plan = job.plan.clone();
    env.adapters = job.adapters.clone();
    env.scales = scales.into();
    env.routing = routing;
    env.training = true;
    env.seed = t.seed;
    if let Some(d) = &job.distributed {
        env = env_on(&env, d);
    }
    let profiled = match job.config.run.profile {
        true => profiling::window(total.saturating_sub(state.step), job.config.run.profile_steps),
        false => 0..0,
    };
    let profiled = state.step + profiled.start..state.step + profiled.end;
    let run = Run {
        env,
        optimizer,
        schedule: schedule(&job.config, total),
        stream,
        eval,
        files,
        total,
        per_epoch,
        dir,
        started: Instant::now(),
        seconds_before: state.seconds,
        save_owed: false,
        last_eval: None,
        paused: 0.0,
        routers: Default::default(),
        profiled,
        state,
        job,
    };
    run.go(stop, watch)
}

/// Whether this rank writes files and talks.
fn leads(job: &Job) -> bool {
    job.distributed.as_ref().is_none_or(|d| d.mesh().group::<World>().rank() == 0)
}

impl Run<'_> {
    fn go(mut self, stop: &AtomicBool, watch: &mut dyn Observer) -> Result<Finished> {
        let t = &self.job.config.train;
        let logging = t.logging_steps.of(self.total).max(1);
        let mut pace = Pace::new(0.0, self.state.step, self.state.tokens);
        let mut interrupted = None;
        let every = t.eval_every().of(self.total);
        if t.eval_strategy == Strategy::Steps && every > self.total && self.eval.is_some() {
            watch.message(&format!(
                "note: eval_steps is {every} and the run has {} steps, so nothing is evaluated while training",
                self.total
            ));
        }
        watch.begins(self.state.step, self.total);
        let pause = Instant::now();
        if t.eval_on_start && self.state.step == 0 {
            self.evaluate(stop, watch)?;
        }
        if std::mem::take(&mut self.state.eval_owed) {
            // The run was stopped in the midst of this evaluation; its step is saved already.
            self.evaluate(stop, watch)?;
            if due(t.save_strategy, t.save_steps, self.state.step, self.total, self.epoch_ends()) {
                self.note_best();
            }
        }
        self.paused += pause.elapsed().as_secs_f64();
        while self.state.step < self.total {
            let lr = self.schedule.at(self.state.step);
            self.profile(watch);
            let (loss, grad_norm, updated) = self.step(lr, watch)?;
            self.state.interval.add(loss, grad_norm, updated);
            self.state.step += 1;
            let seconds = self.started.elapsed().as_secs_f64() - self.paused;
            self.state.seconds = self.seconds_before + seconds;
            pace.update(seconds, self.state.step, self.state.tokens);
            let (step, last) = (self.state.step, self.state.step == self.total);
            let logged = step.is_multiple_of(logging) || last || (step == 1 && t.logging_first_step);
            let memory = ProcessMemory::read();
            let progress = ProgressStep {
                step,
                total: self.total,
                epoch: self.epoch(),
                loss: loss.mean(),
                learning_rate: lr,
                grad_norm,
                tokens_per_second: pace.tokens_per_second(),
                memory: memory.resident,
                peak_memory: memory.peak,
                seconds_left: pace.seconds_left(self.total),
            };
            if logged {
                self.log(&progress)?;
            }
            watch.step(&progress, logged);
            if !updated {
                watch.message(&format!(
                    "step {step}: no update (loss {}, gradient norm {grad_norm}, {} counted targets)",
                    loss.mean(),
                    loss.count
                ));
            }
            let epoch_ends = self.epoch_ends();
            let pause = Instant::now();
            if due(t.eval_strategy, t.eval_every(), step, self.total, epoch_ends) {
                // After the last step there is no going on that could make up for it.
                let never = AtomicBool::new(false);
                self.evaluate(if last { &never } else { stop }, watch)?;
            }
            // After a broken step there is nothing new to keep, and a good checkpoint must not make room for it.
            self.save_owed |= due(t.save_strategy, t.save_steps, step, self.total, epoch_ends);
            let saves = self.save_owed && self.state.skipped_in_a_row == 0;
            let stopping = agreed(stop, self.job.distributed.as_ref())?;
            if saves || (last && t.save_strategy != Strategy::No) || stopping {
                self.save_owed = false;
                let path = self.save(stopping, watch)?;
                if stopping && !last {
                    interrupted = Some(path);
                    break;
                }
            }
            self.paused += pause.elapsed().as_secs_f64();
        }
        if interrupted.is_none() && self.state.skipped_in_a_row > 0 {
            // The end of the run changed nothing any more: that is no success.
            return Err(self.not_finite());
        }
        let evaluated = self.last_eval.is_some_and(|(_, step)| step == self.state.step);
        if interrupted.is_none() && self.job.config.method.do_eval && !evaluated {
            self.evaluate(stop, watch)?;
        }
        self.finish(interrupted, watch)
    }

    /// Starts and stops the profiler between steps.
    fn profile(&mut self, watch: &mut dyn Observer) {
        let (step, profiler) = (self.state.step, self.job.rt.device().profiler());
        if self.profiled.is_empty() {
            return;
        }
        if step == self.profiled.start {
            watch.message(&format!("profiling steps {} to {}", step + 1, self.profiled.end));
            profiler.start(0);
        } else if step == self.profiled.end {
            profiler.pause();
        }
    }

    /// One step: a window of micro-batches, then an update unless a value is not finite.
    fn step(&mut self, lr: f64, watch: &mut dyn Observer) -> Result<(LossCount, f64, bool)> {
        let t = &self.job.config.train;
        let profiler = self.job.rt.device().profiler();
        let _step = profiler.region("step");
        let distributed = self.job.distributed.as_ref();
        let mut clock = distributed.map(|d| StepClock::start(d));
        let (share, shares) = distributed.map_or((0, 1), |d| d.data_share());
        let (mut batches, mut ended) = (Vec::with_capacity(t.gradient_accumulation_steps), false);
        // A window never reaches into the next epoch: the last one is short, and is divided by what it counted.
        while batches.len() < t.gradient_accumulation_steps && !ended {
            let _data = profiler.phase("data");
            let (mut own, reading) = (MicroBatch::default(), Instant::now());
            // Every rank reads the whole stream and keeps its share, so the stream stands at one place for all of them.
            for s in 0..shares {
                if ended {
                    break;
                }
                let tokens = self.stream.next_batch(t.per_device_train_batch_size)?;
                watch.samples(&tokens.sample_ids);
                self.state.tokens += tokens.ids.len() as u64;
                self.state.label_tokens += tokens.num_targets as u64;
                let moment = self.state.moment;
                self.state.moment += 1;
                if s == share {
                    own = MicroBatch { tokens, moment };
                }
                ended = self.epoch_ends();
            }
            if let Some(clock) = &mut clock {
                clock.data(reading.elapsed(), own.tokens.ids.len() as u64);
            }
            batches.push(own);
        }
        if distributed.is_some_and(|d| d.stages().is_some()) {
            // A schedule is made for so many micro-batches.
            batches.resize_with(t.gradient_accumulation_steps, MicroBatch::default);
        }
        let mut env = self.env.clone();
        env.routing.window = experts::count_window(&self.job.model, &env, &batches)?;
        let (window, _) = gradients(&self.job.model, &env, &batches, distributed)?;
        if let Some((clock, d)) = clock.zip(distributed) {
            let ranks = clock.finish(self.state.step + 1, d)?;
            self.files.as_mut().map_or(Ok(()), |files| files.ranks(&ranks))?;
        }
        let routers = self.env.routers.take();
        let _optimizer = profiler.phase("optimizer");
        let n = window.count.max(1) as f64;
        let norm = norm(&self.job.rt, &self.optimizer, distributed)? / n;
        let finite = window.sum.is_finite() && norm.is_finite();
        if window.count == 0 || (!finite && self.job.config.run.nan_guard) {
            self.optimizer.zero_grad();
            self.env.scales.discard();
            self.state.skipped += 1;
            self.state.skipped_in_a_row += u64::from(!finite);
            if !finite && self.state.skipped_in_a_row >= self.job.config.run.max_skipped_steps {
                self.state.step += 1;
                return Err(self.not_finite());
            }
            return Ok((window, norm, false));
        }
        self.state.skipped_in_a_row = 0;
        self.optimizer.step(&self.job.rt, lr as f32, (clip_factor(norm, t.max_grad_norm) / n) as f32)?;
        if let Some(d) = distributed {
            d.parameters_changed();
        }
        self.env.scales.commit();
        experts::move_biases(&self.job.model, &routers, self.job.config.experts.moe_bias_update_speed)?;
        self.routers = (routers, window.count);
        self.state.updates = self.optimizer.updates();
        Ok((window, norm, true))
    }

    fn not_finite(&self) -> TrainError {
        let last = checkpoint::list(&self.dir).pop().map_or("none".into(), |(_, p)| p.display().to_string());
        TrainError::NotFinite { step: self.state.step, skipped: self.state.skipped_in_a_row, checkpoint: last }
    }

    /// Whether the stream stands between two epochs.
    fn epoch_ends(&self) -> bool {
        self.stream.rows_left() == self.stream.rows_per_epoch()
    }

    fn epoch(&self) -> f64 {
        self.stream.position() as f64 / self.stream.rows_per_epoch() as f64
    }

    fn log(&mut self, p: &ProgressStep) -> Result<()> {
        let interval = std::mem::take(&mut self.state.interval);
        let mut entry = Entry::new(p.step, p.epoch);
        // Where every step was skipped there is no loss; a 0 would be a lie.
        if interval.loss.count > 0 {
            entry = entry.with("loss", interval.loss.mean()).with("grad_norm", interval.last_norm);
        }
        let entry = entry
            .with("learning_rate", p.learning_rate)
            .with("tokens_per_second", p.tokens_per_second)
            .with("num_input_tokens_seen", self.state.tokens)
            .with("num_label_tokens_seen", self.state.label_tokens)
            .with("skipped_steps", self.state.skipped)
            .with("memory_bytes", p.memory)
            .with("peak_memory_bytes", p.peak_memory);
        // On a mesh a rank knows the choices of its own tokens only; that would be no number of the step.
        let entry = match self.job.distributed {
            None => experts::log(entry, &self.routers.0, self.routers.1),
            Some(_) => entry,
        };
        self.write_entry(entry)
    }

    fn write_entry(&mut self, entry: Entry) -> Result<()> {
        self.files.as_mut().map_or(Ok(()), |files| files.log(entry))
    }

    fn evaluate(&mut self, stop: &AtomicBool, watch: &mut dyn Observer) -> Result<()> {
        let Some(eval) = &self.eval else { return Ok(()) };
        let _span = self.job.rt.device().profiler().scope(|| "evaluate".into());
        let started = Instant::now();
        let rows = self.job.config.train.per_device_eval_batch_size;
        // Someone who stops the run wants it saved, not evaluated to the end: the run that goes on makes up for it.
        let Some(loss) = evaluate(&self.job.model, &self.env, eval, rows, stop, self.job.distributed.as_ref())? else {
            self.state.eval_owed = self.state.step > 0;
            return Ok(());
        };
        let mean = loss.mean();
        let entry = Entry::new(self.state.step, self.epoch())
            .with("eval_loss", mean)
            .with("eval_perplexity", perplexity(mean))
            .with("eval_label_tokens", loss.count)
            .with("eval_runtime", started.elapsed().as_secs_f64());
        self.write_entry(entry)?;
        watch.message(&format!("step {}: eval loss {mean:.4}, perplexity {:.3}", self.state.step, perplexity(mean)));
        self.last_eval = Some((mean, self.state.step));
        Ok(())
    }

    /// The best is the best that is kept: an evaluation counts where its step is saved too.
    fn note_best(&mut self) {
        if let Some((mean, step)) = self.last_eval
            && step == self.state.step
            && mean.is_finite()
            && self.state.best.is_none_or(|(b, _)| mean < b)
        {
            self.state.best = Some((mean, step));
        }
    }

    /// Writes `checkpoint-STEP`, whole or not at all. `interrupted`: the run is to go on from it, whatever `save_only_model` says.
    fn save(&mut self, interrupted: bool, watch: &mut dyn Observer) -> Result<PathBuf> {
        let t = &self.job.config.train;
        let _span = self.job.rt.device().profiler().scope(|| "save".into());
        self.note_best();
        self.state.stream = self.stream.state();
        self.trainer_state();
        let path = self.dir.join(format!("checkpoint-{}", self.state.step));
        let optimizer = !t.save_only_model || interrupted;
        let mut files = self.files.take();
        let written = self.write_with_peers(&path, optimizer, files.as_mut());
        self.files = files;
        written?;
        if leads(self.job) { self.saved(path, watch) } else { Ok(path) }
    }

    /// The leader writes, the others give it what it needs.
    fn write_with_peers(&self, path: &Path, optimizer: bool, files: Option<&mut RunFiles>) -> Result<()> {
        let gathering = self.gathering()?;
        match &gathering {
            Some(gathering) if !leads(self.job) => gathering.serve(),
            _ => {
                self.write_checkpoint(path, optimizer, files, gathering.as_ref())?;
                gathering.map_or(Ok(()), |gathering| gathering.end())
            }
        }
    }

    /// Whole tensors from all ranks, where there are several. All of them call it.
    fn gathering(&self) -> Result<Option<Gathering<'_>>> {
        let Some(d) = &self.job.distributed else { return Ok(None) };
        let mut parameters = self.job.model.parameters();
        parameters.extend(self.job.adapters.parameters());
        Ok(Some(Gathering::new(d, parameters, &self.optimizer)?))
    }

    fn write_checkpoint(
        &self,
        path: &Path,
        optimizer: bool,
        files: Option<&mut RunFiles>,
        whole: Option<&Gathering<'_>>,
    ) -> Result<()> {
        atomic::replace_folder(path, |tmp| -> Result<()> {
            self.write_model(tmp, whole)?;
            if let Some(files) = files {
                files.write_state(&tmp.join("trainer_state.json"))?;
            }
            if !optimizer {
                return Ok(());
            }
            checkpoint::write_optimizer(tmp, &self.optimizer, whole)?;
            checkpoint::write_scales(tmp, &self.env.scales)?;
            let json =
                serde_json::to_vec_pretty(&self.state).map_err(|e| TrainError::setting("checkpoint", e.to_string()))?;
            Ok(atomic::write_bytes(tmp.join("phalanx_state.json"), &json)?)
        })
    }

    /// Removes what the new checkpoint makes superfluous, and says what was saved.
    fn saved(&self, path: PathBuf, watch: &mut dyn Observer) -> Result<PathBuf> {
        let t = &self.job.config.train;
        let best = self.state.best.map(|(_, step)| step);
        let removed = checkpoint::prune(&self.dir, t.save_total_limit, best)?;
        let gone = if removed.is_empty() { String::new() } else { format!(", {} older removed", removed.len()) };
        watch.message(&format!("saved {}{gone}", path.display()));
        Ok(path)
    }

    fn trainer_state(&mut self) {
        let t = &self.job.config.train;
        let epoch = self.epoch();
        let Some(s) = self.files.as_mut().map(|files| &mut files.state) else { return };
        s.global_step = self.state.step;
        s.max_steps = self.total;
        s.epoch = epoch;
        s.num_train_epochs = self.total.div_ceil(self.per_epoch);
        s.logging_steps = t.logging_steps.of(self.total);
        s.save_steps = t.save_steps.of(self.total);
        s.eval_steps = t.eval_steps.unwrap_or(Steps::Count(0)).of(self.total);
        s.train_batch_size = t.per_device_train_batch_size as u64;
        s.num_input_tokens_seen = self.state.tokens;
        s.total_flos =
            self.job.model.config().train_flops_per_token(self.job.config.data.cutoff_len) * self.state.tokens as f64;
        s.best_metric = self.state.best.map(|(b, _)| b);
        s.best_global_step = self.state.best.map(|(_, step)| step);
        s.best_model_checkpoint =
            self.state.best.map(|(_, step)| self.dir.join(format!("checkpoint-{step}")).display().to_string());
    }

    /// The trained model into `dir`: exact f32 weights, or the adapter; with tokenizer and templates.
    fn write_model(&self, dir: &Path, whole: Option<&Gathering<'_>>) -> Result<()> {
        let (job, rt) = (self.job, &self.job.rt);
        let exact = |p: &Parameter| match whole {
            Some(whole) => whole.fetch(What::Value, p),
            None => checkpoint::exact_values(rt, Some(&self.optimizer), p),
        };
        match &job.lora {
            Some(options) => {
                let beside: Vec<_> = job.model.parameters().into_iter().filter(Parameter::trainable).collect();
                let saved = beside.into_iter().map(|p| Ok((p.clone(), exact(&p)?))).collect::<Result<Vec<_>>>()?;
                let base = job.config.model.model_name_or_path.clone().unwrap_or_default();
                let stands_on = adapter::StandsOn { model: &base, merged: &job.merged_adapters };
                adapter::save(rt, dir, &job.adapters, options, &saved, &stands_on, &job.model)?;
            }
            None => {
                let dtype = StoredDType::F32;
                let value_of = |p: &Parameter| match (whole, self.optimizer.exact(p)) {
                    (Some(_), _) => exact(p).map(Some).map_err(|e| NnError::Parallel(e.to_string()).into()),
                    (None, Some(m)) => Ok(Some(rt.to_vec(m)?)),
                    (None, None) => Ok(None),
                };
                save_weights(rt, &job.model, dir, dtype, 5_000_000_000, &value_of)?;
                let config = job.model.config().to_json(dtype);
                atomic::write_bytes(dir.join("config.json"), format!("{config:#}\n").as_bytes())?;
            }
        }
        job.write_companions(dir)
    }

    fn finish(mut self, interrupted: Option<PathBuf>, watch: &mut dyn Observer) -> Result<Finished> {
        let t = &self.job.config.train;
        // Before the model is written: that is no part of a step.
        let profile = profiling::finish(&self.job.rt);
        self.trainer_state();
        let mut outputs = Vec::new();
        if interrupted.is_none() && !leads(self.job) {
            self.gathering()?.map_or(Ok(()), |gathering| gathering.serve())?;
        } else if interrupted.is_none() {
            let gathering = self.gathering()?;
            model_output::clear(&self.dir)?;
            let best = self.state.best.map(|(_, s)| self.dir.join(format!("checkpoint-{s}"))).filter(|b| b.exists());
            match best.filter(|_| t.load_best_model_at_end) {
                Some(best) => model_output::copy(&best, &self.dir)?,
                None => {
                    if t.load_best_model_at_end {
                        watch.message("load_best_model_at_end: no step was both evaluated and saved here, so the last model is the result; let eval_steps divide save_steps");
                    }
                    self.write_model(&self.dir, gathering.as_ref())?;
                }
            }
            gathering.map_or(Ok(()), |gathering| gathering.end())?;
            outputs.push(("model".to_owned(), self.dir.clone()));
        }
        for path in self.files.as_mut().map_or(Ok(vec![]), RunFiles::finish)? {
            let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            outputs.push((name, path));
        }
        if let Some(profile) = &profile {
            let [table, trace] = profiling::write(profile, &self.dir)?;
            outputs.extend([("profile".to_owned(), table), ("trace".to_owned(), trace)]);
        }
        Ok(Finished {
            profile,
            total_steps: self.total,
            epochs: self.epoch(),
            interrupted,
            curve: self.files.as_ref().map(RunFiles::curve).unwrap_or_default(),
            memory: self.job.rt.pool().stats().peak,
            outputs,
            eval_loss: self.last_eval.map(|(mean, _)| mean),
            state: self.state,
        })
    }
}

fn due(strategy: Strategy, every: Steps, step: u64, total: u64, epoch_ends: bool) -> bool {
    match strategy {
        Strategy::No => false,
        // The end of a run is the end of its last epoch, as in `transformers`.
        Strategy::Epoch => epoch_ends || step == total,
        Strategy::Steps => step.is_multiple_of(every.of(total).max(1)),
    }
}
