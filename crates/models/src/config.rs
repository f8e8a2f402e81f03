//! `config.json`, read into one plain struct that model code uses.

use std::path::Path;
use std::sync::Arc;

use phalanx_kernels::glu::Act;
use phalanx_nn::layers::{AttentionConfig, MlpConfig, RopeConfig, RopeScaling};
use serde_json::{Map, Value, json};

use crate::deepseek_v3::LatentConfig;
use crate::experts::ExpertsConfig;
use crate::{ModelError, Result, family, known_families};

/// Element type that a weights file was or will be stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDType {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16
    F16,
}

impl StoredDType {
    /// The name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            StoredDType::F32 => "float32",
            StoredDType::Bf16 => "bfloat16",
            StoredDType::F16 => "float16",
        }
    }

    /// From a name as configs and people write it.
    pub fn parse(s: &str) -> Option<StoredDType> {
        Some(match s.trim_start_matches("torch.") {
            "float32" | "f32" | "fp32" | "float" => StoredDType::F32,
            "bfloat16" | "bf16" => StoredDType::Bf16,
            "float16" | "f16" | "fp16" | "half" => StoredDType::F16,
            _ => return None,
        })
    }
}

/// A decoder-only model's configuration.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// `model_type`.
    pub model_type: String,
    /// Vocabulary V: rows of the embedding.
    pub vocab_size: usize,
    /// Hidden size H.
    pub hidden_size: usize,
    /// Feed-forward size I.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads N.
    pub num_attention_heads: usize,
    /// Key/value heads K.
    pub num_key_value_heads: usize,
    /// Head dimension D.
    pub head_dim: usize,
    /// Trained context, in tokens.
    pub max_position_embeddings: usize,
    /// ε of the norms.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: Arc<RopeConfig>,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases in the feed-forward.
    pub mlp_bias: bool,
    /// Norms over each query and key head.
    pub qk_norm: bool,
    /// Activation of the gate.
    pub act: Act,
    /// Sliding window of each block.
    pub windows: Vec<Option<usize>>,
    /// Experts, in families that have them.
    pub experts: Option<ExpertsConfig>,
    /// Latent attention, in families that have it; `head_dim` is then that of queries and keys.
    pub latent: Option<LatentConfig>,
    /// Standard deviation of initial weights.
    pub initializer_range: f32,
    /// Type the weights are stored in.
    pub dtype: StoredDType,
    /// Tokens that end a generation where `generation_config.json` names none.
    pub eos_token_ids: Vec<u32>,
    /// The file itself, for writing it back with every key it had.
    pub raw: Map<String, Value>,
}

impl ModelConfig {
    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// If the file cannot be read, the family is unknown, or a key is missing or unusable.
    pub fn from_folder(dir: impl AsRef<Path>) -> Result<ModelConfig> {
        let path = dir.as_ref().join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => ModelError::NoConfig { dir: dir.as_ref().to_path_buf() },
            _ => ModelError::Io { path: path.clone(), source },
        })?;
        let place = path.display().to_string();
        let value: Value = serde_json::from_str(text.strip_prefix('\u{feff}').unwrap_or(&text))
            .map_err(|e| ModelError::Config { place: place.clone(), key: "(whole file)".into(), why: e.to_string() })?;
        ModelConfig::from_json(&place, value)
    }

    /// Reads a config given as a JSON value; `place` names it in errors.
    ///
    /// # Errors
    /// As [`ModelConfig::from_folder`].
    pub fn from_json(place: &str, value: Value) -> Result<ModelConfig> {
        let Value::Object(raw) = value else {
            return Err(ModelError::Config {
                place: place.into(),
                key: "(whole file)".into(),
                why: "must be a JSON object".into(),
            });
        };
        let r = Reader { place, raw: &raw };
        let model_type = r.string("model_type")?;
        let Some(family) = family(&model_type) else {
            let known = known_families().iter().map(|f| f.model_type).collect::<Vec<_>>().join(", ");
            return Err(ModelError::UnknownFamily { place: place.into(), found: model_type, known });
        };
        let config = (family.read)(&r)?;
        config.check(&r)?;
        Ok(config)
    }

    fn check(&self, r: &Reader<'_>) -> Result<()> {
        for (key, n) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
        ] {
            if n == 0 {
                return r.refuse(key, "must be at least 1");
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return r.refuse(
                "num_key_value_heads",
                &format!(
                    "{} does not divide num_attention_heads {}",
                    self.num_key_value_heads, self.num_attention_heads
                ),
            );
        }
        // 2^40 numbers are beyond any machine; below that no sum over the weights overflows.
        let hidden = self.hidden_size;
        for (key, sizes) in [
            ("vocab_size", [self.vocab_size, 1, hidden]),
            ("intermediate_size", [self.intermediate_size, 1, hidden]),
            ("num_attention_heads", [self.num_attention_heads, self.head_dim, hidden]),
        ] {
            let product = sizes.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
            if product.is_none_or(|n| n > 1 << 40) {
                let sizes = sizes.iter().filter(|n| **n != 1).map(ToString::to_string).collect::<Vec<_>>().join(" × ");
                return r.refuse(
                    key,
                    &format!("makes a weight of {sizes} numbers, beyond any machine; is a size mistyped?"),
                );
            }
        }
        if !self.rope.dim.is_multiple_of(2) || self.rope.dim == 0 {
            return r.refuse("head_dim", &format!("rotary dimensions must be even, got {}", self.rope.dim));
        }
        if let Some(experts) = &self.experts {
            experts.check(r, hidden)?;
        }
        if self.windows.contains(&Some(0)) {
            return r.refuse("sliding_window", "must be at least 1, or null for none");
        }
        Ok(())
    }

    /// Number of parameters of a model of this shape (a tied head counted once).
    pub fn num_params(&self) -> usize {
        crate::Model::new(self)
            .map(|m| phalanx_nn::parameters(&m).iter().map(phalanx_nn::Parameter::len).sum())
            .unwrap_or(0)
    }

    /// Patterns of tensors that a file may hold for blocks that are not built: those for predicting further tokens.
    pub(crate) fn blocks_passed_over(&self) -> Vec<String> {
        let further = self.raw.get("num_nextn_predict_layers").and_then(Value::as_u64).unwrap_or(0).min(64) as usize;
        let further = if self.latent.is_some() { further } else { 0 };
        (0..further).map(|i| format!("model.layers.{}.*", self.num_hidden_layers + i)).collect()
    }

    /// Number of parameters that a token meets: of experts, those that are chosen for it.
    pub fn num_active_params(&self) -> usize {
        self.num_params() - self.experts.as_ref().map_or(0, |e| e.idle_params(self.hidden_size))
    }

    /// Floating-point operations a token costs in training: 6 a parameter that it meets, and causal attention forward and backward at
    /// sequence length `seq` (half of the full convention).
    pub fn train_flops_per_token(&self, seq: usize) -> f64 {
        let value_dim = self.latent.as_ref().map_or(self.head_dim, |l| l.value_dim);
        let width = self.num_attention_heads * (self.head_dim + value_dim);
        let attention = 3.0 * (self.num_hidden_layers * width) as f64 * seq as f64;
        6.0 * self.num_active_params() as f64 + attention
    }

    /// The attention of a block with this window.
    pub(crate) fn attention(&self, window: Option<usize>) -> AttentionConfig {
        AttentionConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            qkv_bias: self.qkv_bias,
            o_bias: self.o_bias,
            qk_norm: self.qk_norm.then_some(self.rms_norm_eps),
            window,
            rope: Arc::clone(&self.rope),
        }
    }

    /// The feed-forward of a block without experts.
    pub(crate) fn mlp(&self) -> MlpConfig {
        MlpConfig { hidden: self.hidden_size, intermediate: self.intermediate_size, bias: self.mlp_bias, act: self.act }
    }

    /// `config.json` for weights stored as `dtype`.
    pub fn to_json(&self, dtype: StoredDType) -> Value {
        let mut raw = self.raw.clone();
        // The older name and the newer one; a file that has both must not keep a stale one.
        if let Some(old) = raw.get_mut("torch_dtype") {
            *old = json!(dtype.name());
        }
        if raw.contains_key("dtype") || !raw.contains_key("torch_dtype") {
            raw.insert("dtype".into(), json!(dtype.name()));
        }
        Value::Object(raw)
    }
}

/// Reads keys of a `config.json` with errors that name file and key.
pub(crate) struct Reader<'a> {
    pub(crate) place: &'a str,
    pub(crate) raw: &'a Map<String, Value>,
}

impl Reader<'_> {
    pub(crate) fn refuse<T>(&self, key: &str, why: &str) -> Result<T> {
        Err(ModelError::Config { place: self.place.into(), key: key.into(), why: why.into() })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn string(&self, key: &str) -> Result<String> {
        match self.get(key) {
            Some(Value::String(s)) => Ok(s.clone()),
            Some(v) => self.refuse(key, &format!("must be a string, found {v}")),
            None => self.refuse(key, "is missing"),
        }
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        match self.opt_size(key)? {
            Some(n) => Ok(n),
            None => self.refuse(key, "is missing"),
        }
    }

    pub(crate) fn opt_size(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            // A size beyond any machine is a damaged file, and would overflow products of sizes.
            Some(v) => match v.as_u64().filter(|&n| n <= 1 << 32) {
                Some(n) => Ok(Some(n as usize)),
                None => self.refuse(key, &format!("must be a whole number from 0 to 2^32, found {v}")),
            },
        }
    }

    pub(crate) fn float(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => match v.as_f64() {
                Some(x) => Ok(x),
                None => self.refuse(key, &format!("must be a number, found {v}")),
            },
        }
    }

    pub(crate) fn bool(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => self.refuse(key, &format!("must be true or false, found {v}")),
        }
    }

    fn dtype(&self) -> Result<StoredDType> {
        for key in ["dtype", "torch_dtype"] {
            if let Some(v) = self.get(key) {
                return match v.as_str().and_then(StoredDType::parse) {
                    Some(d) => Ok(d),
                    None => self.refuse(key, &format!("{v} is not one of float32, bfloat16, float16")),
                };
            }
        }
        Ok(StoredDType::F32)
    }

    fn act(&self) -> Result<Act> {
        match self.get("hidden_act").map(|v| v.as_str().unwrap_or("?")) {
            None | Some("silu" | "swish") => Ok(Act::Silu),
            Some("gelu") => Ok(Act::Gelu),
            Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast") => Ok(Act::GeluTanh),
            Some(other) => {
                self.refuse("hidden_act", &format!("\"{other}\" is not one of silu, gelu, gelu_pytorch_tanh"))
            }
        }
    }

    fn eos(&self) -> Vec<u32> {
        match self.get("eos_token_id") {
            Some(Value::Array(a)) => a.iter().filter_map(Value::as_u64).map(|n| n as u32).collect(),
            Some(v) => v.as_u64().map(|n| n as u32).into_iter().collect(),
            None => vec![],
        }
    }

    /// Rotary settings in both forms: `rope_parameters` {rope_type, rope_theta, …}, or `rope_theta` and `rope_scaling`.
    fn rope(&self, head_dim: usize, max_position: usize) -> Result<RopeConfig> {
        let (key, section) = match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(v), _) => ("rope_parameters", Some(v)),
            (None, v) => ("rope_scaling", v),
        };
        let empty = Map::new();
        let section = match section {
            None => &empty,
            Some(Value::Object(m)) => m,
            Some(v) => return self.refuse(key, &format!("must be an object, found {v}")),
        };
        if section.values().any(Value::is_object) {
            return self.refuse(key, "settings by layer type are not supported by this family");
        }
        let place = format!("{}: {key}", self.place);
        let r = Reader { place: &place, raw: section };
        let default_theta = self.float("rope_theta", 10_000.0)?;
        let theta = r.float("rope_theta", default_theta)?;
        if theta.is_nan() || theta <= 1.0 {
            return self.refuse("rope_theta", &format!("must be above 1, found {theta}"));
        }
        let partial = r.float("partial_rotary_factor", self.float("partial_rotary_factor", 1.0)?)?;
        if !(partial > 0.0 && partial <= 1.0) {
            return self.refuse("partial_rotary_factor", &format!("must be above 0 and at most 1, found {partial}"));
        }
        let dim = (head_dim as f64 * partial) as usize;
        let kind = match r.get("rope_type").or_else(|| r.get("type")) {
            None => "default",
            Some(v) => v.as_str().unwrap_or("?"),
        };
        let need = |k: &str| -> Result<f64> {
            let x = r.float(k, f64::NAN)?;
            if x > 0.0 && x.is_finite() { Ok(x) } else { r.refuse(k, "is missing or not above 0") }
        };
        let original = |fallback: usize| r.float("original_max_position_embeddings", fallback as f64);
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: need("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: need("original_max_position_embeddings")?,
            },
            "yarn" => {
                let factor = need("factor")?;
                let opt = |k: &str| r.float(k, f64::NAN).map(|x| (!x.is_nan()).then_some(x));
                let by_factor = RopeConfig::yarn_attention_factor(factor, opt("mscale")?, opt("mscale_all_dim")?);
                RopeScaling::Yarn {
                    factor,
                    beta_fast: r.float("beta_fast", 32.0)?,
                    beta_slow: r.float("beta_slow", 1.0)?,
                    original_max_position: original(max_position)?,
                    attention_factor: r.float("attention_factor", by_factor)?,
                    truncate: r.bool("truncate", true)?,
                }
            }
            other => {
                return self.refuse(key, &format!("rope_type \"{other}\" is not one of default, linear, llama3, yarn"));
            }
        };
        Ok(RopeConfig { theta, dim, scaling })
    }

    /// What all families here share; each family's `read` then sets its own switches.
    pub(crate) fn decoder(&self) -> Result<ModelConfig> {
        let (hidden_size, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let head_dim = match self.opt_size("head_dim")? {
            Some(d) => d,
            None if heads > 0 && hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return self.refuse("head_dim", "is missing, and hidden_size is no multiple of num_attention_heads");
            }
        };
        self.decoder_of(head_dim, head_dim)
    }

    /// As [`Reader::decoder`], for a family with its own way to write heads of D values, of which up to `rotary` have positions.
    pub(crate) fn decoder_of(&self, head_dim: usize, rotary: usize) -> Result<ModelConfig> {
        let (hidden_size, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        if self.get("quantization_config").is_some_and(|q| !q.is_null()) {
            return self.refuse("quantization_config", "is not supported; give the weights as they were before");
        }
        if self.float("attention_dropout", 0.0)? != 0.0 {
            return self.refuse("attention_dropout", "is not supported; set it to 0.0");
        }
        let layers = self.size("num_hidden_layers")?;
        if layers > 10_000 {
            return self.refuse("num_hidden_layers", &format!("{layers} is beyond any model"));
        }
        let rms_norm_eps = self.float("rms_norm_eps", 1e-6)?;
        if !(rms_norm_eps >= 0.0 && rms_norm_eps.is_finite()) {
            return self.refuse("rms_norm_eps", &format!("must be 0 or more, found {rms_norm_eps}; 1e-6 is usual"));
        }
        let max_position_embeddings = self.opt_size("max_position_embeddings")?.unwrap_or(2048);
        Ok(ModelConfig {
            model_type: self.string("model_type")?,
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: self.opt_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            max_position_embeddings,
            rms_norm_eps: rms_norm_eps as f32,
            rope: Arc::new(self.rope(rotary, max_position_embeddings)?),
            tie_word_embeddings: self.bool("tie_word_embeddings", false)?,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            act: self.act()?,
            windows: vec![None; layers],
            experts: None,
            latent: None,
            initializer_range: self.float("initializer_range", 0.02)? as f32,
            dtype: self.dtype()?,
            eos_token_ids: self.eos(),
            raw: self.raw.clone(),
        })
    }

    /// `sliding_window` as transformers reads it: null is none, and a file that leaves the key out means 4096.
    pub(crate) fn window(&self) -> Result<Option<usize>> {
        if self.raw.contains_key("sliding_window") { self.opt_size("sliding_window") } else { Ok(Some(4096)) }
    }

    /// Which blocks slide, in qwen's way: `layer_types`, or `use_sliding_window` with `max_window_layers`.
    pub(crate) fn qwen_windows(&self, layers: usize) -> Result<Vec<Option<usize>>> {
        let window = self.opt_size("sliding_window")?;
        if let Some(Value::Array(types)) = self.get("layer_types") {
            if types.len() != layers {
                return self
                    .refuse("layer_types", &format!("lists {} blocks, num_hidden_layers is {layers}", types.len()));
            }
            return types
                .iter()
                .map(|t| match t.as_str() {
                    Some("full_attention") => Ok(None),
                    Some("sliding_attention") if window.is_some() => Ok(window),
                    Some("sliding_attention") => self.refuse("sliding_window", "is missing, layer_types asks for it"),
                    _ => self.refuse("layer_types", &format!("{t} is not full_attention or sliding_attention")),
                })
                .collect();
        }
        if !self.bool("use_sliding_window", false)? {
            return Ok(vec![None; layers]);
        }
        let (full, window) = (self.opt_size("max_window_layers")?.unwrap_or(28), self.window()?);
        Ok((0..layers).map(|i| if i >= full { window } else { None }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(model_type: &str, more: Value) -> Result<ModelConfig> {
        let mut c = json!({
            "model_type": model_type, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        });
        for (key, value) in more.as_object().unwrap() {
            c[key] = value.clone();
        }
        ModelConfig::from_json("config.json", c)
    }

    /// As transformers 5.24 reads them: MistralConfig, Qwen2Config and Qwen3Config default to a window of 4096.
    #[test]
    fn a_window_that_is_left_out_is_the_families_default() {
        let windows = |family: &str, more: Value| read(family, more).unwrap().windows;
        assert_eq!(windows("mistral", json!({})), [Some(4096); 2]);
        assert_eq!(windows("mistral", json!({"sliding_window": null})), [None; 2]);
        assert_eq!(windows("mistral", json!({"sliding_window": 9})), [Some(9); 2]);
        for family in ["qwen2", "qwen3"] {
            assert_eq!(windows(family, json!({})), [None; 2]);
            let on = json!({"use_sliding_window": true, "max_window_layers": 1});
            assert_eq!(windows(family, on), [None, Some(4096)]);
            let none = json!({"use_sliding_window": true, "max_window_layers": 1, "sliding_window": null});
            assert_eq!(windows(family, none), [None; 2]);
        }
        assert_eq!(windows("llama", json!({})), [None; 2]);
    }

    #[test]
    fn sizes_whose_products_overflow_are_refused() {
        let big = 1u64 << 32;
        for (more, key) in [
            (json!({"num_attention_heads": big, "num_key_value_heads": 1, "head_dim": big}), "num_attention_heads"),
            (json!({"vocab_size": big, "hidden_size": big, "head_dim": 16}), "vocab_size"),
            (json!({"intermediate_size": big, "hidden_size": 1024, "head_dim": 16}), "intermediate_size"),
        ] {
            let e = read("qwen3", more).unwrap_err().to_string();
            assert!(e.starts_with("config.json") && e.contains(key) && e.contains("beyond any machine"), "{e}");
        }
        // The largest that is accepted can be counted.
        let most = json!({"vocab_size": 1u64 << 32, "hidden_size": 256, "num_hidden_layers": 10_000});
        let config = read("qwen3", most).unwrap();
        assert!(config.num_params() > 1 << 40);
        assert!(config.train_flops_per_token(usize::MAX).is_finite());
    }

    #[test]
    fn no_name_of_the_stored_type_goes_stale() {
        for (keys, want) in [
            (json!({}), &["dtype"][..]),
            (json!({"torch_dtype": "float16"}), &["torch_dtype"]),
            (json!({"dtype": "float16"}), &["dtype"]),
            (json!({"dtype": "float32", "torch_dtype": "float16"}), &["dtype", "torch_dtype"]),
        ] {
            let written = read("llama", keys).unwrap().to_json(StoredDType::Bf16);
            for key in ["dtype", "torch_dtype"] {
                let value = want.contains(&key).then_some("bfloat16");
                assert_eq!(written.get(key).and_then(Value::as_str), value, "{key}");
            }
        }
    }

    #[test]
    fn a_folder_that_is_no_models_is_told_what_one_holds() {
        let e = ModelConfig::from_folder("no/such/folder").unwrap_err().to_string();
        assert!(e.contains("no/such/folder") && e.contains("config.json is missing: give a Hugging Face model"), "{e}");
    }
}
