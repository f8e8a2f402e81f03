//! The few facts that define a decoder of the llama and qwen families, and what follows from them: `config.json` and the
//! list of tensors.

use serde_json::{Map, Value, json};

use crate::convert::FloatType;

/// The model families that can be imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `llama`; Mistral models come under this name too.
    Llama,
    /// `llama` with a sliding window.
    Mistral,
    /// `qwen2`: biases on query, key, value.
    Qwen2,
    /// `qwen3`: norms on query and key.
    Qwen3,
}

impl Family {
    /// `model_type` and the class in `architectures`.
    pub const fn hf_names(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("llama", "LlamaForCausalLM"),
            Self::Mistral => ("mistral", "MistralForCausalLM"),
            Self::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        }
    }

    /// Whether llama.cpp rotates neighbouring pairs, so that its query and key rows are in another order.
    pub const fn rows_interleaved(self) -> bool {
        matches!(self, Self::Llama | Self::Mistral)
    }
}

/// What the metadata say about the model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// Its family.
    pub family: Family,
    /// H, the width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// N, query heads.
    pub num_heads: usize,
    /// K, key and value heads.
    pub num_kv_heads: usize,
    /// D, width of a head.
    pub head_dim: usize,
    /// V, rows of the embedding.
    pub vocab_size: usize,
    /// Longest sequence.
    pub context_length: usize,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// `rope_scaling` of `config.json`, or null.
    pub rope_scaling: Value,
    /// Window of attention, if limited.
    pub sliding_window: Option<usize>,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// Whether q, k, v (and for llama o) have biases.
    pub attention_bias: bool,
    /// Whether the MLP has biases.
    pub mlp_bias: bool,
}

impl ModelConfig {
    /// Names and shapes of all tensors of the model, as Hugging Face has them, in the order of the layers.
    pub fn expected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (h, f) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let mut out = vec![("model.embed_tokens.weight".to_string(), vec![self.vocab_size, h])];
        for layer in 0..self.num_layers {
            let mut add =
                |part: &str, shape: &[usize]| out.push((format!("model.layers.{layer}.{part}"), shape.to_vec()));
            add("input_layernorm.weight", &[h]);
            let o_bias = self.attention_bias && self.family != Family::Qwen2;
            for (name, rows, cols, bias) in [
                ("q_proj", q, h, self.attention_bias),
                ("k_proj", kv, h, self.attention_bias),
                ("v_proj", kv, h, self.attention_bias),
                ("o_proj", h, q, o_bias),
            ] {
                add(&format!("self_attn.{name}.weight"), &[rows, cols]);
                if bias {
                    add(&format!("self_attn.{name}.bias"), &[rows]);
                }
            }
            if self.family == Family::Qwen3 {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            add("post_attention_layernorm.weight", &[h]);
            for (name, rows, cols) in [("gate_proj", f, h), ("up_proj", f, h), ("down_proj", h, f)] {
                add(&format!("mlp.{name}.weight"), &[rows, cols]);
                if self.mlp_bias {
                    add(&format!("mlp.{name}.bias"), &[rows]);
                }
            }
        }
        out.push(("model.norm.weight".into(), vec![h]));
        if !self.tied {
            out.push(("lm_head.weight".into(), vec![self.vocab_size, h]));
        }
        out
    }

    /// `config.json`, in the older form (`rope_theta`, `rope_scaling`, `torch_dtype`), which every version reads.
    pub fn to_json(&self, dtype: FloatType, bos: Option<usize>, eos: Option<usize>, pad: Option<usize>) -> Value {
        let (model_type, class) = self.family.hf_names();
        let mut out = Map::new();
        let mut put = |key: &str, value: Value| drop(out.insert(key.to_string(), value));
        put("architectures", json!([class]));
        put("attention_bias", self.attention_bias.into());
        put("attention_dropout", 0.0.into());
        put("bos_token_id", json!(bos));
        put("eos_token_id", json!(eos));
        if pad.is_some() {
            put("pad_token_id", json!(pad));
        }
        put("head_dim", self.head_dim.into());
        put("hidden_act", "silu".into());
        put("hidden_size", self.hidden_size.into());
        put("initializer_range", 0.02.into());
        put("intermediate_size", self.intermediate_size.into());
        put("max_position_embeddings", self.context_length.into());
        if self.family == Family::Llama {
            put("mlp_bias", self.mlp_bias.into());
        }
        put("model_type", model_type.into());
        put("num_attention_heads", self.num_heads.into());
        put("num_hidden_layers", self.num_layers.into());
        put("num_key_value_heads", self.num_kv_heads.into());
        put("rms_norm_eps", self.rms_norm_eps.into());
        put("rope_scaling", self.rope_scaling.clone());
        put("rope_theta", self.rope_theta.into());
        match self.family {
            Family::Llama => {}
            Family::Mistral => put("sliding_window", json!(self.sliding_window)),
            Family::Qwen2 | Family::Qwen3 => {
                put("sliding_window", Value::Null);
                put("use_sliding_window", false.into());
            }
        }
        put("tie_word_embeddings", self.tied.into());
        put("torch_dtype", dtype.torch_name().into());
        put("use_cache", true.into());
        put("vocab_size", self.vocab_size.into());
        out.into()
    }
}
