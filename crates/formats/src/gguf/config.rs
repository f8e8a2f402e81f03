//! What a GGUF file's metadata say about the model.

use serde_json::{Map, Value, json};

use super::dequant::dequantize;
use super::file::GgufFile;
use crate::error::{FormatError, Result};
use crate::hf_config::{Family, ModelConfig};

/// Larger than any dimension of a model.
const MAX_SIZE: usize = 1 << 30;

/// Reads what the metadata say about the model.
///
/// # Errors
/// An architecture or option that is not supported, a key that is missing or makes no sense.
pub fn read(file: &GgufFile) -> Result<ModelConfig> {
    let key = "general.architecture";
    let arch = file.require(key, file.opt_str(key)?)?;
    if !matches!(arch, "llama" | "qwen2" | "qwen3") {
        return Err(FormatError::unsupported(
            file.path(),
            format!("architecture `{arch}`"),
            "llama (with mistral), qwen2 and qwen3 can be imported",
        ));
    }
    refuse_what_is_not_supported(file, arch)?;
    let key = |name: &str| format!("{arch}.{name}");
    let number = |name: &str| file.opt_usize(&key(name));
    let positive = |name: &str| match number(name)? {
        // The upper bound keeps products of two from overflowing, whatever the file says.
        Some(n) if n == 0 || n > MAX_SIZE => Err(file.bad_key(&key(name), format!("is {n}"))),
        value => file.require(&key(name), value),
    };
    let hidden_size = positive("embedding_length")?;
    let num_heads = positive("attention.head_count")?;
    let num_kv_heads = number("attention.head_count_kv")?.unwrap_or(num_heads);
    if num_kv_heads == 0 || num_heads % num_kv_heads != 0 {
        let what = format!("is {num_kv_heads}, which does not divide the {num_heads} heads");
        return Err(file.bad_key(&key("attention.head_count_kv"), what));
    }
    let head_dim = number("attention.key_length")?.unwrap_or(hidden_size / num_heads);
    if head_dim == 0 || head_dim % 2 != 0 || head_dim > MAX_SIZE {
        return Err(file.bad_key(&key("attention.key_length"), format!("makes a head of {head_dim} numbers")));
    }
    for other in ["attention.value_length", "rope.dimension_count"] {
        if number(other)?.is_some_and(|n| n != head_dim) {
            let what = format!("`{}` is not the width of a head ({head_dim})", key(other));
            return Err(FormatError::unsupported(
                file.path(),
                what,
                "only models where they are equal can be imported",
            ));
        }
    }
    let num_layers = positive("block_count")?;
    if num_layers > file.tensors().len() {
        let what = format!("is {num_layers}, more than there are tensors ({})", file.tensors().len());
        return Err(file.bad_key(&key("block_count"), what));
    }
    let sliding_window = number("attention.sliding_window")?.filter(|&n| n > 0);
    let family = match arch {
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        _ if sliding_window.is_some() => Family::Mistral,
        _ => Family::Llama,
    };
    let eps = key("attention.layer_norm_rms_epsilon");
    let rope_theta = file.opt_f64(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    let embedding = "token_embd.weight";
    let vocab_size = match file.tensor(embedding).map(|t| t.shape.as_slice()) {
        Some(&[rows, _]) => rows,
        _ => {
            return Err(FormatError::malformed(file.path(), format!("no matrix `{embedding}`"), "take another file"));
        }
    };
    Ok(ModelConfig {
        family,
        hidden_size,
        intermediate_size: positive("feed_forward_length")?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        vocab_size,
        context_length: positive("context_length")?,
        rms_norm_eps: file.require(&eps, file.opt_f64(&eps)?)?,
        rope_theta,
        rope_scaling: rope_scaling(file, arch, rope_theta, head_dim)?,
        sliding_window,
        tied: file.tensor("output.weight").is_none(),
        attention_bias: family == Family::Qwen2 || file.tensor("blk.0.attn_q.bias").is_some(),
        mlp_bias: file.tensor("blk.0.ffn_gate.bias").is_some(),
    })
}

fn refuse_what_is_not_supported(file: &GgufFile, arch: &str) -> Result<()> {
    let refuse = |what: String, mend: &str| Err(FormatError::unsupported(file.path(), what, mend));
    if file.opt_usize("split.count")?.is_some_and(|n| n > 1) {
        return refuse(
            "the file is one part of a model in several files".into(),
            "join them first: llama-gguf-split --merge FIRST_PART OUT.gguf",
        );
    }
    if file.opt_usize(&format!("{arch}.expert_count"))?.is_some_and(|n| n > 0) {
        return refuse("a mixture of experts".into(), "only dense models can be imported");
    }
    if arch != "llama" && file.opt_usize(&format!("{arch}.attention.sliding_window"))?.is_some_and(|n| n > 0) {
        return refuse(format!("a sliding window in architecture `{arch}`"), "take a file without");
    }
    for option in ["attention.scale", "logit_scale", "embedding_scale", "residual_scale", "attention.clamp_kqv"] {
        if file.metadata().contains_key(&format!("{arch}.{option}")) {
            return refuse(format!("the option `{arch}.{option}`"), "only plain models of the family can be imported");
        }
    }
    Ok(())
}

/// `rope_scaling` of `config.json`.
fn rope_scaling(file: &GgufFile, arch: &str, theta: f64, head_dim: usize) -> Result<Value> {
    let key = |name: &str| format!("{arch}.rope.scaling.{name}");
    if file.tensor("rope_freqs.weight").is_some() {
        return llama3_scaling(file, theta, head_dim);
    }
    // Before there was a type, a factor alone meant linear scaling.
    let old_factor = file.opt_f64(&format!("{arch}.rope.scale_linear"))?;
    let factor = file.opt_f64(&key("factor"))?.or(old_factor);
    let kind = file.opt_str(&key("type"))?.unwrap_or(if factor.is_some() { "linear" } else { "none" });
    match kind {
        "none" => Ok(Value::Null),
        "linear" | "yarn" => {
            let factor = file.require(&key("factor"), factor)?;
            if factor == 1.0 {
                return Ok(Value::Null);
            }
            let mut scaling = Map::new();
            scaling.insert("rope_type".into(), kind.into());
            scaling.insert("factor".into(), factor.into());
            if let Some(n) = file.opt_usize(&key("original_context_length"))?.filter(|_| kind == "yarn") {
                scaling.insert("original_max_position_embeddings".into(), n.into());
            }
            Ok(scaling.into())
        }
        other => Err(FormatError::unsupported(
            file.path(),
            format!("rope scaling `{other}`"),
            "none, linear, yarn and llama3 can be imported",
        )),
    }
}

/// Llama 3.1's scaling. GGUF stores the divisor of every frequency (`rope_freqs.weight`) instead of the parameters that
/// Hugging Face has; so the published parameter sets are tried, and the one that gives these divisors is taken.
fn llama3_scaling(file: &GgufFile, theta: f64, head_dim: usize) -> Result<Value> {
    let name = "rope_freqs.weight";
    let Some(tensor) = file.tensor(name) else { return Ok(Value::Null) };
    if tensor.shape != [head_dim / 2] {
        return Err(FormatError::malformed(
            file.path(),
            format!("`{name}` has shape {:?}", tensor.shape),
            "take another file",
        ));
    }
    let mut found = vec![0f32; tensor.num_elements()];
    dequantize(tensor.ty, file.bytes(tensor)?, &mut found);
    // The slowest frequencies are divided by the whole factor.
    let factor = f64::from(found.iter().copied().fold(0.0, f32::max));
    for original in [8192usize, 4096, 2048, 16_384, 32_768] {
        let (low, high) = (1.0, 4.0);
        let want = llama3_divisors(theta, head_dim, factor, low, high, original as f64);
        let close = |(f, w): (&f32, &f64)| (f64::from(*f) - w).abs() <= 1e-3 * w;
        if found.iter().zip(&want).all(close) {
            return Ok(json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }));
        }
    }
    Err(FormatError::unsupported(
        file.path(),
        format!("`{name}` is not of Llama 3's scaling with low_freq_factor 1 and high_freq_factor 4"),
        "only that form can be imported",
    ))
}

/// What each frequency is divided by (`_compute_llama3_parameters` of transformers).
fn llama3_divisors(theta: f64, head_dim: usize, factor: f64, low: f64, high: f64, original: f64) -> Vec<f64> {
    (0..head_dim / 2)
        .map(|i| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * i as f64 / head_dim as f64);
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_divisors_run_from_one_to_the_factor() {
        let d = llama3_divisors(500_000.0, 128, 8.0, 1.0, 4.0, 8192.0);
        assert_eq!((d[0], d[63]), (1.0, 8.0));
        assert!(d.windows(2).all(|w| w[0] <= w[1]));
        assert!(d.iter().any(|&x| x > 1.0 && x < 8.0));
    }
}
