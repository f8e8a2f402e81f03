//! From a configuration to everything a run needs, all checks first: nothing is written and no weight is read before the
//! configuration, the plan, the tokenizer, the data and the output folder have been found sound.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use phalanx_comm::{Communicator, Mesh, MeshShape};
use phalanx_config::{Config, FinetuningType, MAX_THREADS};
use phalanx_data::{ChatTemplate, DataOptions, Tokenizer};
use phalanx_models::{Model, ModelConfig, WeightForm, check_weights, initialise, lay_out, load_gguf, load_weights};
use phalanx_nn::{AdapterSet, Arithmetic, Parameter, Recipe, ResolvedPlan};
use phalanx_parallel::{Distributed, ParallelPlan, Site};
use phalanx_tensor::{Category, DType, Runtime};

use crate::adapter::{self, LoraOptions};
use crate::gguf::Gguf;
use crate::{Result, TrainError, method};

/// A model with what was found out about it, before or after its weights are there.
pub struct Job {
    /// The configuration.
    pub config: Config,
    /// Device and memory.
    pub rt: Runtime,
    /// The model.
    pub model: Model,
    /// Its modules.
    pub sites: Vec<Site>,
    /// What is done to each.
    pub plan: Arc<ResolvedPlan>,
    /// The mesh that it trains on.
    pub mesh: MeshShape,
    /// How the model lies on it.
    pub parallel: ParallelPlan,
    /// The model on the mesh, as this rank sees it; none on one rank, and none before [`Job::place`].
    pub distributed: Option<Arc<Distributed>>,
    /// Low-rank adapters in force (none before [`Job::load`]).
    pub adapters: Arc<AdapterSet>,
    /// Settings of the adapters, where there are any.
    pub lora: Option<LoraOptions>,
    /// Adapters that were merged into the base model before the one that trains (none before [`Job::load`]).
    pub merged_adapters: Vec<PathBuf>,
    /// Where tokenizer files come from.
    pub tokenizer_dir: PathBuf,
    /// The chat template trained with, once [`Job::template`] has chosen it; it is written beside the model, so that talking to the
    /// result uses the same.
    pub chat_template: std::sync::OnceLock<String>,
    /// The file that weights come from, if `model_name_or_path` names a GGUF file. What else a folder would hold lies in a temporary one as long as
    /// the job lives, and the configuration names that.
    gguf: Option<Gguf>,
}

/// Whether a job will train or only use the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Train: the plan of `finetuning_type` applies.
    Train,
    /// Evaluate, generate, export: everything is frozen, adapters as they were saved.
    Infer,
}

impl Job {
    /// Reads configs and resolves the plan. No weights yet.
    ///
    /// # Errors
    /// Everything that is wrong with the model's config or the plan.
    pub fn prepare(mut config: Config, purpose: Use) -> Result<Job> {
        let threads = config.run.threads.unwrap_or_else(|| phalanx_report::System::read().threads);
        if !(1..=MAX_THREADS).contains(&threads) {
            let why = format!("is {threads}; give 1 to {MAX_THREADS}, or leave it out for one a core");
            return Err(TrainError::setting("threads", why));
        }
        if purpose == Use::Infer && config.model.train_from_scratch {
            let trained =
                config.train.output_dir.as_ref().map_or_else(|| "DIR".to_owned(), |d| d.display().to_string());
            return Err(TrainError::setting(
                "train_from_scratch",
                format!(
                    "random weights are of no use here; name the trained model: train_from_scratch=false model_name_or_path={trained}"
                ),
            ));
        }
        let mesh = match purpose {
            Use::Train => mesh(&config)?,
            Use::Infer => MeshShape::default(),
        };
        let world = mesh.num_ranks()?;
        let gguf = Gguf::of(&mut config, purpose)?;
        let model_config = model_config(&config)?;
        let model = Model::new(&model_config)?;
        let sites = phalanx_parallel::sites(&model);
        let mut parallel = ParallelPlan::default();
        let plan = match purpose {
            Use::Train => {
                let plan = method::plan(&config, &model_config, &sites)?;
                parallel = plan.parallel.clone();
                phalanx_parallel::resolve(&sites, &plan).map_err(TrainError::Plan)?
            }
            Use::Infer => inference_plan(&config, &model_config, &sites),
        };
        // Damaged weights are found before the data is encoded.
        if let Some(dir) =
            config.model.model_name_or_path.as_ref().filter(|_| !config.model.train_from_scratch && gguf.is_none())
        {
            check_weights(&model, dir)?;
        }
        let m = &config.method;
        let lora = (purpose == Use::Train && plan.modules.values().any(|s| s.adapter)).then(|| LoraOptions {
            rank: m.lora_rank,
            alpha: m.lora_alpha(),
            dropout: m.lora_dropout as f32,
            rslora: m.use_rslora,
        });
        if world > 1 {
            check_on_ranks(&config, &model_config, &plan, mesh, gguf.is_some())?;
        }
        let tokenizer_dir = tokenizer_dir(&config)?;
        let job = Job {
            rt: Runtime::try_new((threads / world).max(1))?,
            mesh,
            parallel,
            distributed: None,
            model,
            sites,
            plan: Arc::new(plan),
            adapters: Arc::default(),
            lora,
            merged_adapters: vec![],
            tokenizer_dir,
            chat_template: std::sync::OnceLock::new(),
            gguf,
            config,
        };
        job.apply_trainable(purpose);
        Ok(job)
    }

    /// Lays the model over the mesh, before it is loaded.
    ///
    /// # Errors
    /// If the plan does not fit.
    pub fn place(&mut self, comm: &Communicator) -> Result<()> {
        let mesh = Mesh::new(comm, self.mesh)?;
        self.distributed = Some(Distributed::new(&self.model, mesh, self.parallel.clone())?);
        Ok(())
    }

    fn apply_trainable(&self, purpose: Use) {
        let params = self.model.parameters();
        let by_name: HashMap<&str, &Parameter> = params.iter().map(|p| (p.name(), p)).collect();
        for site in &self.sites {
            let trainable = purpose == Use::Train && self.plan.modules.get(&site.path).is_none_or(|m| m.trainable);
            for name in &site.parameters {
                if let Some(p) = by_name.get(name.as_str()) {
                    p.set_trainable(trainable);
                }
            }
        }
    }

    /// The tokenizer, checked against the rows of the embedding.
    ///
    /// # Errors
    /// If a file is missing or damaged, or an id has no row.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let mut tokenizer = Tokenizer::from_dir(&self.tokenizer_dir)?;
        tokenizer.check_rows(self.model.config().vocab_size)?;
        if let Some(path) = self.adapter_template() {
            let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
            tokenizer.set_chat_template(path.display().to_string(), text);
        }
        Ok(tokenizer)
    }

    /// The template that the adapter in use was trained with: it goes before the base model's own.
    fn adapter_template(&self) -> Option<PathBuf> {
        let dirs = self.config.model.adapter_name_or_path.iter().rev();
        dirs.map(|dir| dir.join("chat_template.jinja")).find(|path| path.is_file())
    }

    /// Puts the files of the tokenizer, and the template that belongs to the weights, beside them.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn write_companions(&self, dir: &Path) -> Result<()> {
        crate::checkpoint::copy_companions(&self.tokenizer_dir, dir)?;
        let template = match (self.chat_template.get(), self.adapter_template()) {
            (Some(source), _) => source.clone(),
            (None, Some(path)) => std::fs::read_to_string(&path).map_err(TrainError::io(&path))?,
            (None, None) => return Ok(()),
        };
        Ok(phalanx_formats::atomic::write_bytes(dir.join("chat_template.jinja"), template.as_bytes())?)
    }

    /// The chat template, with what was assumed in sentences.
    ///
    /// # Errors
    /// If the name is unknown or the template is not valid.
    pub fn template(&self, tokenizer: &Tokenizer) -> Result<(ChatTemplate, Vec<String>)> {
        self.template_of(tokenizer, &data_options(&self.config))
    }

    /// As [`Job::template`], with options that a resumed run has changed (its day).
    ///
    /// # Errors
    /// As [`Job::template`].
    pub fn template_of(&self, tokenizer: &Tokenizer, options: &DataOptions) -> Result<(ChatTemplate, Vec<String>)> {
        let chosen = ChatTemplate::choose(tokenizer, options)?;
        // Only the first choice counts; there is one configuration.
        let _ = self.chat_template.set(chosen.0.source().to_owned());
        Ok(chosen)
    }

    /// Type that a parameter is computed with.
    pub fn dtype_of(&self, name: &str) -> DType {
        let module = name.rsplit_once('.').map_or(name, |(m, _)| m);
        self.plan.modules.get(module).map_or(DType::F32, |s| s.precision)
    }

    /// Shape of a parameter of the model.
    pub fn shape_of(&self, name: &str) -> Option<Vec<usize>> {
        self.model.parameters().iter().find(|p| p.name() == name).map(|p| p.shape().to_vec())
    }

    /// Loads or draws the weights, and the adapters of the configuration or new ones. `checkpoint` is a folder of an earlier moment
    /// of this run, which then stands for the weights that train.
    ///
    /// # Errors
    /// If a file is missing, damaged or does not fit, or memory runs out.
    pub fn load(&mut self, checkpoint: Option<&Path>) -> Result<()> {
        // What trains is loaded exactly; the optimizer rounds it where the plan says so.
        let trained: std::collections::HashSet<String> =
            self.model.parameters().iter().filter(|p| p.trainable()).map(|p| p.name().to_owned()).collect();
        let dtype = |name: &str| if trained.contains(name) { DType::F32 } else { self.dtype_of(name) };
        let adapted = self.lora.is_some() || !self.config.model.adapter_name_or_path.is_empty();
        let weights = match checkpoint.filter(|_| self.lora.is_none()) {
            Some(dir) => Some(dir.to_path_buf()),
            None if self.config.model.train_from_scratch => None,
            None => self.config.model.model_name_or_path.as_ref().map(PathBuf::from),
        };
        match weights {
            Some(dir) => match &self.gguf {
                Some(gguf) => load_gguf(&self.rt, &self.model, &gguf.file, None, &dtype)?,
                None => load_weights(&self.rt, &self.model, dir, &dtype)?,
            },
            None => {
                initialise(&self.rt, &self.model, self.config.train.seed)?;
                for p in self.model.parameters() {
                    if dtype(p.name()) != DType::F32 {
                        p.set(self.rt.cast(&p.kept()?, dtype(p.name()), Category::Weights)?)?;
                    }
                }
            }
        }
        if adapted {
            self.load_adapters(checkpoint)?;
        }
        Ok(())
    }

    /// As [`Job::load`], with the matrices laid out for inference: from then on the model generates, and nothing else. Where the instruction set has
    /// another layout for exact weights, those stay as they are.
    ///
    /// # Errors
    /// As [`Job::load`].
    pub fn load_to_generate(&mut self, form: WeightForm) -> Result<()> {
        match &self.gguf {
            Some(gguf) => {
                load_gguf(&self.rt, &self.model, &gguf.file, Some(form), &|name| self.dtype_of(name))?;
                if !self.config.model.adapter_name_or_path.is_empty() {
                    self.load_adapters(None)?;
                }
            }
            None => {
                self.load(None)?;
                lay_out(&self.rt, &self.model, form)?;
            }
        }
        Ok(())
    }

    fn load_adapters(&mut self, checkpoint: Option<&Path>) -> Result<()> {
        let training = self.lora.is_some();
        let named = with_what_they_stand_on(&self.config.model.adapter_name_or_path)?;
        // Only the last adapter stays an adapter; those before it, or all when a new one is made, are merged first. A checkpoint
        // stands for the one that trains, on the same merged base.
        let (last, merged) = match named.split_last() {
            Some((last, before)) if !(training && self.config.method.create_new_adapter) => (Some(last), before),
            _ => (None, &named[..]),
        };
        let resumed = checkpoint.filter(|_| training).map(Path::to_path_buf);
        let last = resumed.as_ref().or(last);
        for dir in merged {
            self.merge_adapter(dir)?;
        }
        let whole = |dir: &PathBuf| std::fs::canonicalize(dir).map_err(TrainError::io(dir));
        self.merged_adapters = merged.iter().map(whole).collect::<Result<_>>()?;
        let shapes = |name: &str| self.shape_of(name);
        match last {
            Some(dir) => {
                let loaded = adapter::load(&self.rt, dir, &shapes)?;
                self.replace(&loaded.replaced)?;
                if training {
                    let planned = self.plan.modules.iter().filter(|(_, m)| m.adapter).map(|(p, _)| p);
                    let frozen =
                        |name: &str| !self.model.parameters().iter().any(|p| p.name() == name && p.trainable());
                    if let Some(name) = loaded.replaced.keys().find(|name| frozen(name)) {
                        return Err(TrainError::Adapter {
                            path: dir.clone(),
                            why: format!(
                                "holds {name} (modules_to_save), which would be frozen and not saved again; name its module in additional_target"
                            ),
                        });
                    }
                    if !planned.eq(loaded.adapters.by_path.keys()) {
                        return Err(TrainError::Adapter {
                            path: dir.clone(),
                            why: "its layers are not those of lora_target; set lora_target to the adapter's target_modules, or create_new_adapter: true".into(),
                        });
                    }
                }
                if training && resumed.is_none() {
                    self.refuse_other_settings(dir, &loaded.options)?;
                }
                self.lora = Some(loaded.options);
                self.adapters = Arc::new(loaded.adapters);
            }
            None => {
                if let Some(o) = self.lora {
                    let new = adapter::create(&self.rt, &self.sites, &shapes, &self.plan, o, self.config.train.seed)?;
                    self.adapters = Arc::new(new);
                }
            }
        }
        let training = self.plan.modules.values().any(|m| m.adapter);
        self.adapters.parameters().iter().for_each(|p| p.set_trainable(training));
        if let Some(d) = &self.distributed {
            d.replicate(self.adapters.parameters());
        }
        Ok(())
    }

    /// Training goes on with the adapter as it is; a setting that somebody wrote and that is not the adapter's would be ignored.
    fn refuse_other_settings(&self, dir: &Path, found: &LoraOptions) -> Result<()> {
        let m = &self.config.method;
        let differs = [
            ("lora_rank", m.lora_rank as f64, found.rank as f64),
            ("lora_alpha", m.lora_alpha(), found.alpha),
            ("use_rslora", f64::from(u8::from(m.use_rslora)), f64::from(u8::from(found.rslora))),
        ];
        match differs.iter().find(|(key, asked, found)| self.config.is_set(key) && asked != found) {
            None => Ok(()),
            Some((key, asked, found)) => Err(TrainError::setting(
                key,
                format!(
                    "is {asked}, but the adapter in {} has {found}, and training goes on with it as it is; remove {key}, or set create_new_adapter: true to merge it and begin a new one",
                    dir.display()
                ),
            )),
        }
    }

    fn merge_adapter(&self, dir: &Path) -> Result<()> {
        if self.distributed.is_some() {
            let why = "would have to be merged into a model that lies on several ranks; merge it first with `phalanx export`, and name the result as model_name_or_path";
            return Err(TrainError::Adapter { path: dir.to_path_buf(), why: why.into() });
        }
        let loaded = adapter::load(&self.rt, dir, &|name| self.shape_of(name))?;
        self.replace(&loaded.replaced)?;
        let params = self.model.parameters();
        let (mut asked, mut changed) = (false, false);
        for (path, lora) in &loaded.adapters.by_path {
            let name = format!("{path}.weight");
            let Some(p) = params.iter().find(|p| p.name() == name) else { continue };
            let values = adapter::merged(&self.rt, p, lora)?;
            let before = self.rt.to_vec(&p.value()?)?;
            self.set_value(p, &values)?;
            asked |= self.rt.to_vec(&lora.b.value()?)?.iter().any(|&x| x != 0.0);
            changed |= before != self.rt.to_vec(&p.value()?)?;
        }
        if asked && !changed {
            return Err(TrainError::Adapter {
                path: dir.to_path_buf(),
                why: "is smaller than a rounding step of the bf16 weights it would be merged into, and would be lost; use float32 (bf16: false, or infer_dtype: float32)".into(),
            });
        }
        Ok(())
    }

    fn replace(&self, values: &std::collections::BTreeMap<String, Vec<f32>>) -> Result<()> {
        for p in self.model.parameters() {
            if let Some(v) = values.get(p.name()) {
                self.set_value(&p, v)?;
            }
        }
        Ok(())
    }

    fn set_value(&self, p: &Parameter, values: &[f32]) -> Result<()> {
        if self.distributed.is_some() {
            let why =
                format!("an adapter that brings {} cannot be trained on several ranks yet; leave `mesh` out", p.name());
            return Err(TrainError::setting("mesh", why));
        }
        let t = self.rt.from_f32(p.shape(), values, Category::Weights)?;
        let dtype = p.value().map_or(DType::F32, |v| v.dtype());
        p.set(if dtype == DType::F32 { t } else { self.rt.cast(&t, dtype, Category::Weights)? })?;
        Ok(())
    }

    /// What is trained: parameters of the model in order, then adapters.
    pub fn trained(&self) -> Vec<Parameter> {
        let mut all: Vec<Parameter> = self.model.parameters().into_iter().filter(Parameter::trainable).collect();
        all.extend(self.adapters.parameters().into_iter().filter(Parameter::trainable));
        all
    }
}

/// Adapters in the order of their use, each after those that had been merged when it was trained.
fn with_what_they_stand_on(named: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all: Vec<PathBuf> = Vec::new();
    for dir in named {
        for needed in adapter::merged_before(dir)?.into_iter().chain([dir.clone()]) {
            if !all.iter().any(|have| crate::resume::same(have, &needed)) {
                all.push(needed);
            }
        }
    }
    Ok(all)
}

/// The architecture that a configuration names.
///
/// # Errors
/// If there is none, or it cannot be read.
pub fn model_config(config: &Config) -> Result<ModelConfig> {
    let m = &config.model;
    if let Some(map) = &m.model {
        return Ok(ModelConfig::from_json("model", map.0.to_json())?);
    }
    if let Some(shape) = &m.shape {
        return Ok(ModelConfig::from_json("shape", crate::bench::shape_config(shape, 2048)?)?);
    }
    if let Some(path) = &m.config_name_or_path {
        return Ok(ModelConfig::from_folder(folder_of("config_name_or_path", path, "config.json")?)?);
    }
    match &m.model_name_or_path {
        Some(dir) => Ok(ModelConfig::from_folder(dir)?),
        None => Err(TrainError::setting("model_name_or_path", "is missing: name a model folder")),
    }
}

/// The folder that tokenizer files come from.
///
/// # Errors
/// If the configuration names none.
pub fn tokenizer_dir(config: &Config) -> Result<PathBuf> {
    let m = &config.model;
    match (&m.tokenizer_name_or_path, &m.model_name_or_path) {
        (Some(path), _) => folder_of("tokenizer_name_or_path", path, "tokenizer.json"),
        (None, Some(dir)) => Ok(dir.into()),
        (None, None) => Err(TrainError::setting(
            "tokenizer_name_or_path",
            "is missing: a model that starts from scratch needs a folder with tokenizer.json",
        )),
    }
}

/// The folder that `path` is, or whose `file` it is. Another file would be passed over for that one.
fn folder_of(key: &str, path: &Path, file: &str) -> Result<PathBuf> {
    if !path.is_file() {
        return Ok(path.to_path_buf());
    }
    if path.file_name().is_none_or(|name| name != file) {
        return Err(TrainError::setting(
            key,
            format!(
                "{} is a file of another name than {file}, which is what is read; name a {file}, or the folder that holds it",
                path.display()
            ),
        ));
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    Ok(folder.unwrap_or(Path::new(".")).to_path_buf())
}

/// The mesh of a configuration.
fn mesh(config: &Config) -> Result<MeshShape> {
    let Some(written) = &config.run.mesh else { return Ok(MeshShape::default()) };
    let mesh: MeshShape = serde_json::from_value(written.0.to_json())
        .map_err(|e| TrainError::setting("mesh", format!("{e}; write for instance {{dp_shard: 2, pp: 2}}")))?;
    mesh.num_ranks()?;
    Ok(mesh)
}

/// What cannot be trained on several ranks (yet), before anything is started.
fn check_on_ranks(
    config: &Config,
    model: &ModelConfig,
    plan: &ResolvedPlan,
    mesh: MeshShape,
    gguf: bool,
) -> Result<()> {
    let refuse = |why: &str| Err(TrainError::setting("mesh", why));
    if gguf {
        return refuse(
            "a GGUF file is trained on one rank; import it first (`phalanx import gguf FILE OUT`), or leave `mesh` out",
        );
    }
    if plan.modules.values().any(|m| m.adapter) && mesh.pp > 1 {
        return refuse("adapters are not cut into pipeline stages yet; use dp_shard instead of pp");
    }
    let delayed = |m: &phalanx_nn::ModuleSettings| m.arithmetic == Arithmetic::Simulated(Recipe::Fp8Delayed);
    if plan.modules.values().any(delayed) {
        return refuse("the scales of fp8_delayed would differ between ranks; use fp8_tensorwise or another recipe");
    }
    if mesh.ep > 1 {
        return refuse("experts are not dealt to ranks (ep) yet; shard them with dp_shard");
    }
    if plan.modules.values().any(|m| m.adapter) && mesh.tp > 1 {
        return refuse(
            "adapters are not cut over tensor-parallel ranks by this command yet; use dp_shard instead of tp",
        );
    }
    let routing = crate::experts::routing(config, model)?;
    if routing.balance.is_some() || routing.capacity.is_some() || config.experts.moe_bias_update_speed > 0.0 {
        return refuse(
            "balancing losses, biases and capacities of experts are not summed over ranks yet; set moe_aux_loss_coef, moe_bias_update_speed and moe_capacity_factor to nothing",
        );
    }
    if config.run.profile {
        return refuse("profile records one rank; leave `mesh` out to profile");
    }
    Ok(())
}

/// Everything frozen, weights as `infer_dtype` says.
fn inference_plan(config: &Config, model: &ModelConfig, sites: &[Site]) -> ResolvedPlan {
    use phalanx_config::InferDtype;
    let low = match config.model.infer_dtype {
        InferDtype::Auto => model.dtype == phalanx_models::StoredDType::Bf16,
        InferDtype::Float32 => false,
        InferDtype::Bfloat16 => true,
    };
    let modules = sites.iter().map(|s| {
        let precision = if low && !method::stays_f32(s) { DType::Bf16 } else { DType::F32 };
        (s.path.clone(), phalanx_nn::ModuleSettings { trainable: false, precision, ..Default::default() })
    });
    ResolvedPlan { modules: modules.collect() }
}

/// The data crate's options of a configuration.
pub fn data_options(config: &Config) -> DataOptions {
    use phalanx_config as written;
    use phalanx_data as data;
    let d = &config.data;
    let kwargs = d.template_kwargs.as_ref().map(|map| map.0.to_json());
    DataOptions {
        stage: match config.method.stage {
            written::Stage::Pt => data::Stage::Pt,
            written::Stage::Sft => data::Stage::Sft,
        },
        dataset: d.dataset.clone(),
        eval_dataset: d.eval_dataset.clone(),
        dataset_dir: d.dataset_dir.clone(),
        template: d.template.clone(),
        default_system: d.default_system.clone(),
        enable_thinking: d.enable_thinking,
        template_kwargs: kwargs.and_then(|v| v.as_object().cloned()).unwrap_or_default(),
        template_date: d.template_date.clone(),
        cutoff_len: d.cutoff_len,
        packing: d.packing(config.method.stage),
        train_on_prompt: d.train_on_prompt,
        mask_history: d.mask_history,
        rewritten_history: match d.rewritten_history {
            written::RewrittenHistory::Split => data::RewrittenHistory::Split,
            written::RewrittenHistory::LastTurn => data::RewrittenHistory::LastTurn,
        },
        train_on_chosen: d.train_on_chosen,
        text_unit: match d.text_unit {
            written::TextUnit::File => data::TextUnit::File,
            written::TextUnit::Paragraph => data::TextUnit::Paragraph,
            written::TextUnit::Line => data::TextUnit::Line,
        },
        skip_bad_samples: d.skip_bad_samples,
        mix_strategy: match d.mix_strategy {
            written::MixStrategy::Concat => data::MixStrategy::Concat,
            written::MixStrategy::InterleaveUnder => data::MixStrategy::InterleaveUnder,
            written::MixStrategy::InterleaveOver => data::MixStrategy::InterleaveOver,
        },
        // Noted as without effect by the config crate; the data crate takes no idle weights.
        interleave_probs: (d.mix_strategy != written::MixStrategy::Concat && !d.interleave_probs.is_empty())
            .then(|| d.interleave_probs.clone()),
        max_samples: d.max_samples.map(|n| n as usize),
        val_size: d.val_size,
        shuffle: !d.disable_shuffling,
        seed: config.train.data_seed(),
        cache_dir: d.tokenized_path.clone().or_else(|| config.train.output_dir.as_ref().map(|o| o.join(".cache"))),
        overwrite_cache: d.overwrite_cache,
        preprocessing_num_workers: d.preprocessing_num_workers.unwrap_or(0),
    }
}

/// Whether only adapters train, for messages.
pub fn method_name(config: &Config) -> &'static str {
    match config.method.finetuning_type {
        FinetuningType::Full => "full",
        FinetuningType::Freeze => "freeze",
        FinetuningType::Lora => "lora",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_about_the_data_reaches_the_data_crate() {
        let text = "stage: pt\ntext_unit: line\nskip_bad_samples: true\nrewritten_history: last_turn\n\
                    template_date: 2024-07-26\ntemplate_kwargs: {date_string: \"26 Jul 2024\", thinking: false}\n\
                    data_seed: 7\nneat_packing: true\n";
        let o = data_options(&Config::parse(text, "run.yaml", &[]).unwrap());
        assert_eq!(o.text_unit, phalanx_data::TextUnit::Line);
        assert_eq!(o.rewritten_history, phalanx_data::RewrittenHistory::LastTurn);
        assert_eq!(o.template_date.as_deref(), Some("2024-07-26"));
        assert_eq!(
            serde_json::Value::from(o.template_kwargs),
            serde_json::json!({"date_string": "26 Jul 2024", "thinking": false})
        );
        assert!(o.skip_bad_samples && o.packing && o.seed == 7);
        assert!(data_options(&Config::parse("train_on_chosen: true\n", "run.yaml", &[]).unwrap()).train_on_chosen);
    }

    #[test]
    fn quoted_text_stays_text() {
        let text = "template_kwargs: {version: \"1.10\", flag: 'true', none: 'null', year: 2024, deep: [\"7\", 7]}\n";
        let o = data_options(&Config::parse(text, "run.yaml", &[]).unwrap());
        assert_eq!(
            serde_json::Value::from(o.template_kwargs),
            serde_json::json!({"version": "1.10", "flag": "true", "none": "null", "year": 2024, "deep": ["7", 7]})
        );
    }

    #[test]
    fn idle_weights_of_data_sets_do_not_reach_the_data_crate() {
        let probs = |mix: &str| {
            let text = format!("dataset: a, b\ninterleave_probs: 0.5, 0.5\nmix_strategy: {mix}\n");
            data_options(&Config::parse(&text, "run.yaml", &[]).unwrap()).interleave_probs
        };
        assert_eq!(probs("concat"), None);
        assert_eq!(probs("interleave_under"), Some(vec![0.5, 0.5]));
    }

    #[test]
    fn a_file_of_another_name_is_not_taken_for_the_one_beside_it() {
        let dir = std::env::temp_dir().join(format!("phalanx-job-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for name in ["config.json", "tokenizer.json", "other.json"] {
            std::fs::write(dir.join(name), "{}").unwrap();
        }
        let config = |key: &str, name: &str| {
            let text =
                format!("train_from_scratch: true\nfinetuning_type: full\n{key}: {}\n", dir.join(name).display());
            Config::parse(&text, "run.yaml", &[]).unwrap()
        };
        let tokenizer = |name: &str| tokenizer_dir(&config("tokenizer_name_or_path", name)).map_err(|e| e.to_string());
        assert_eq!(tokenizer("tokenizer.json"), Ok(dir.clone()));
        assert_eq!(tokenizer(""), Ok(dir.join("")));
        let model = |name: &str| model_config(&config("config_name_or_path", name)).unwrap_err().to_string();
        assert!(model("config.json").contains("model_type"), "read, and found wanting: {}", model("config.json"));
        for (key, wanted, e) in [
            ("tokenizer_name_or_path: ", "tokenizer.json", tokenizer("other.json").unwrap_err()),
            ("config_name_or_path: ", "config.json", model("other.json")),
        ] {
            assert!(e.starts_with(key) && e.contains("other.json") && e.contains(&format!("name a {wanted}")), "{e}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
