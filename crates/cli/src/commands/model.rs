//! Loading a model to generate with, for `generate` and `chat`.

use phalanx_config::{Config, InferDtype, Purpose, parse_overrides};
use phalanx_generate::{GenerationDefaults, SamplingChoice, SamplingParams, TextOptions};
use phalanx_nn::{Batch, Env};
use phalanx_train::job::{Job, Use};

use crate::args::{Dtype, ModelChoice, Sampling};
use crate::outcome::Result;

/// A loaded model, ready to generate.
pub struct Loaded {
    pub job: Job,
    pub env: Env,
    pub defaults: GenerationDefaults,
}

pub fn load(choice: &ModelChoice) -> Result<Loaded> {
    let is_gguf = choice.model.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let mut config = if choice.model.is_file() && !is_gguf {
        Config::load(&choice.model, &[])?
    } else {
        Config::from_overrides(&parse_overrides(&[format!("model_name_or_path={}", choice.model.display())])?)?
    };
    if !choice.adapter.is_empty() {
        config.model.adapter_name_or_path.clone_from(&choice.adapter);
    }
    // A folder that `train` wrote adapters into names its base model.
    if config.model.adapter_name_or_path.is_empty() && choice.model.join("adapter_config.json").is_file() {
        let path = choice.model.join("adapter_config.json");
        let text = std::fs::read_to_string(&path)?;
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
        let Some(base) = value["base_model_name_or_path"].as_str().filter(|b| !b.is_empty()) else {
            return Err(format!(
                "{}: base_model_name_or_path is missing; name the base model and give this folder with --adapter",
                path.display()
            )
            .into());
        };
        config.model.model_name_or_path = Some(base.to_owned());
        config.model.adapter_name_or_path = vec![choice.model.clone()];
    }
    if let Some(t) = &choice.template {
        config.data.template = Some(t.clone());
    }
    match choice.dtype {
        Some(Dtype::F32) => config.model.infer_dtype = InferDtype::Float32,
        Some(Dtype::Bf16) => config.model.infer_dtype = InferDtype::Bfloat16,
        None => {}
    }
    config.run.threads = choice.threads.or(config.run.threads);
    config.check_for(Purpose::Generate)?;
    super::configured::note_forgotten(&config);
    let mut job = Job::prepare(config, Use::Infer)?;
    let defaults = GenerationDefaults::from_folder(&job.tokenizer_dir)?;
    job.load_to_generate(choice.weights.map(Into::into).unwrap_or_default())?;
    let mut env = Env::new(job.rt.clone(), Batch::causal(&[]));
    env.adapters = job.adapters.clone();
    Ok(Loaded { job, env, defaults })
}

impl Loaded {
    /// Sampling parameters: command line, then configuration file, then the model's own, then `transformers`'.
    pub fn sampling(&self, s: &Sampling) -> Result<SamplingParams> {
        let typed = SamplingChoice {
            do_sample: s.greedy.then_some(false),
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
        };
        let g = &self.job.config.generation;
        let written = SamplingChoice {
            do_sample: g.do_sample,
            temperature: g.temperature,
            top_k: g.top_k,
            top_p: g.top_p,
            min_p: g.min_p,
            repetition_penalty: g.repetition_penalty,
        };
        Ok(typed.or(written).or(self.defaults.sampling).params()?)
    }

    /// Stop strings: those of the command line, else those of the configuration file. And whether special tokens show.
    pub fn text(&self, s: &Sampling) -> TextOptions {
        let g = &self.job.config.generation;
        let stop = if s.stop.is_empty() { &g.stop.0 } else { &s.stop };
        TextOptions { stop: stop.clone(), skip_special_tokens: g.skip_special_tokens }
    }

    /// Tokens that end an answer: those of `generation_config.json` (of `config.json` if it names none) and of the configuration
    /// file.
    pub fn stop_token_ids(&self) -> Result<Vec<u32>> {
        let mut ids = self.defaults.eos_token_ids.clone();
        if ids.is_empty() {
            ids.clone_from(&self.job.model.config().eos_token_ids);
        }
        for &id in &self.job.config.generation.stop_token_ids {
            let rows = self.job.model.config().vocab_size;
            match u32::try_from(id) {
                Ok(id) if (id as usize) < rows => ids.push(id),
                _ => return Err(format!("stop_token_ids: {id} is no token of this model; it has {rows}").into()),
            }
        }
        Ok(ids)
    }

    /// Longest answer.
    pub fn max_new_tokens(&self, s: &Sampling, fallback: usize) -> usize {
        let written = self.job.config.generation.max_new_tokens;
        s.max_new_tokens.or(written).or(self.defaults.max_new_tokens).unwrap_or(fallback)
    }
}
