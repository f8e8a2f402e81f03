//! Models of llama2.c (format 0: `model.bin` and `tokenizer.bin`) into Hugging Face folders.
//!
//! A teaching project, but its models ("tinyllamas") are the smallest real language models there are: stories260K has
//! 260 thousand parameters and tells a story. Source of the format: `export.py` (`legacy_export`), `tokenizer.py` and
//! `run.c` of <https://github.com/karpathy/llama2.c>.
//!
//! `model.bin` is seven i32 (dim, hidden_dim, layers, heads, kv heads, vocab, longest sequence; a negative vocab means an
//! output matrix of its own) and then f32 arrays, each over all layers, in the order of `layout`. `tokenizer.bin` is
//! an i32 (longest token) and, for each token, an f32 score, an i32 length and the bytes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde_json::{Map, Value, json};

use crate::atomic;
use crate::convert::{self, FloatType};
use crate::error::{FormatError, Result};
use crate::hf_config::{Family, ModelConfig};
use crate::hf_tokenizer::{
    AddedToken, SPACE_MARK, TokenizerConfig, Wrapping, merges_from_scores, sentencepiece_bpe, tokenizer_config_json,
    tokenizer_json,
};
use crate::import::{ImportOptions, ImportReport, Progress, write_json, write_model_folder, write_rows};
use crate::safetensors_file::map_file;
use crate::safetensors_writer::{SafetensorsWriter, TensorSpec};

const HEADER_BYTES: usize = 28;
const UNK: (usize, &str) = (0, "<unk>");
const BOS: (usize, &str) = (1, "<s>");
const EOS: (usize, &str) = (2, "</s>");
/// Tokens 3..259 are the 256 bytes.
const FIRST_BYTE: usize = 3;
const NUM_BYTES: usize = 256;

/// Imports `model` and `tokenizer` into the new folder `out`.
///
/// The tokenizer gives the ids that `run.c` gives: a space before the text, the best-scored joint of two neighbours
/// first, unknown characters as bytes.
///
/// # Errors
/// A file is not of format 0, is truncated, or does not fit the other; `out` is taken or the disk is full. Nothing is left
/// of a failed import.
pub fn import(
    model: impl AsRef<Path>,
    tokenizer: impl AsRef<Path>,
    out: impl AsRef<Path>,
    options: ImportOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<ImportReport> {
    let model = Model::open(model.as_ref())?;
    let config = &model.config;
    let pieces = read_tokenizer(tokenizer.as_ref(), config.vocab_size)?;
    let specs: Vec<TensorSpec> = config
        .expected_tensors()
        .into_iter()
        .map(|(name, shape)| TensorSpec::new(name, options.dtype.dtype(), shape))
        .collect();
    let tensors = specs.len();
    let writer = SafetensorsWriter::new(specs)?.max_shard_bytes(options.max_shard_bytes);
    let bytes = writer.total_bytes();
    let written = write_model_folder(out.as_ref(), options.overwrite, |dir| {
        write_json(&dir.join("config.json"), &config.to_json(options.dtype, Some(BOS.0), Some(EOS.0), None))?;
        write_tokenizer(dir, &pieces, config.context_length)?;
        let (mut tensors_done, mut bytes_done) = (0, 0);
        writer.write(dir, |spec, sink| {
            let rows = spec.shape[0];
            let is_qk = spec.name.contains(".q_proj.") || spec.name.contains(".k_proj.");
            let head_dim = is_qk.then_some(config.head_dim);
            let row_len = spec.num_elements() / rows.max(1);
            let source = model.tensor(spec);
            write_rows(sink, rows, row_len, head_dim, |range, values| {
                convert::to_f32(FloatType::F32, &source[range.start * row_len * 4..range.end * row_len * 4], values);
                if values.iter().all(|v| v.is_finite()) {
                    return Ok(());
                }
                let what = format!("the values of `{}` hold NaN or infinity", spec.name);
                Err(FormatError::malformed(&model.path, what, "copy or download the file again"))
            })?;
            tensors_done += 1;
            bytes_done += spec.num_bytes();
            progress(Progress { tensor: &spec.name, tensors_done, tensors, bytes_done, bytes });
            Ok(())
        })
    })?;
    Ok(ImportReport {
        model_type: config.family.hf_names().0.to_string(),
        tensors,
        parameters: written.total_elements,
        bytes,
        source_types: vec![("F32".into(), tensors)],
        notes: vec![],
    })
}

/// A checked `model.bin`.
struct Model {
    path: PathBuf,
    map: Mmap,
    config: ModelConfig,
    /// Where each tensor (by Hugging Face name) begins in the file.
    starts: HashMap<String, usize>,
}

impl Model {
    fn open(path: &Path) -> Result<Self> {
        let map = map_file(path)?;
        let config = read_config(path, &map)?;
        let parts = layout(&config);
        let bytes: u128 = parts.iter().map(|(name, n)| 4 * n * repeats(name, &config) as u128).sum();
        let expected = HEADER_BYTES as u128 + bytes;
        if expected != map.len() as u128 {
            let expected = u64::try_from(expected).unwrap_or(u64::MAX);
            return Err(FormatError::WrongFileSize { path: path.to_path_buf(), expected, actual: map.len() as u64 });
        }
        let mut starts = HashMap::new();
        let mut at = HEADER_BYTES;
        for (name, elements) in parts {
            for layer in 0..repeats(name, &config) {
                starts.insert(name.replace("{}", &layer.to_string()), at);
                // In range, now that the sum is known to be the file's length.
                at += elements as usize * 4;
            }
        }
        Ok(Self { path: path.to_path_buf(), map, config, starts })
    }

    /// The bytes of an expected tensor.
    fn tensor(&self, spec: &TensorSpec) -> &[u8] {
        let start = self.starts[&spec.name];
        &self.map[start..start + spec.num_elements() * 4]
    }
}

fn read_config(path: &Path, bytes: &[u8]) -> Result<ModelConfig> {
    let malformed = |what: String| FormatError::malformed(path, what, "give the model.bin of llama2.c, format 0");
    if bytes.starts_with(b"24ka") {
        return Err(FormatError::unsupported(
            path,
            "llama2.c format 1 or later",
            "format 0 can be imported: python export.py --version 0 ...",
        ));
    }
    let Some(header) = bytes.get(..HEADER_BYTES) else {
        return Err(malformed(format!("{} bytes are too few for a header", bytes.len())));
    };
    let numbers: Vec<i64> = header.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect();
    let names = ["dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len"];
    let mut sizes = [0usize; 7];
    for (i, (&n, name)) in numbers.iter().zip(names).enumerate() {
        let size = if name == "vocab_size" { n.abs() } else { n };
        // The bound keeps later products from overflowing.
        if !(1..=1 << 30).contains(&size) {
            return Err(malformed(format!("{name} is {n}")));
        }
        sizes[i] = size as usize;
    }
    let [dim, hidden, layers, heads, kv_heads, vocab, seq_len] = sizes;
    if !dim.is_multiple_of(2 * heads) || !heads.is_multiple_of(kv_heads) {
        return Err(malformed(format!("{dim} numbers, {heads} heads and {kv_heads} kv heads do not go together")));
    }
    Ok(ModelConfig {
        family: Family::Llama,
        hidden_size: dim,
        intermediate_size: hidden,
        num_layers: layers,
        num_heads: heads,
        num_kv_heads: kv_heads,
        head_dim: dim / heads,
        vocab_size: vocab,
        context_length: seq_len,
        // Constants of run.c.
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: Value::Null,
        sliding_window: None,
        tied: numbers[5] > 0,
        attention_bias: false,
        mlp_bias: false,
    })
}

/// The parts of the file in order: the name (with `{}` for the layer, if there is one a layer), and the elements of one.
/// (Wide numbers: a header may claim anything.)
fn layout(c: &ModelConfig) -> Vec<(&'static str, u128)> {
    let wide = |n: usize| n as u128;
    let (h, f, v) = (wide(c.hidden_size), wide(c.intermediate_size), wide(c.vocab_size));
    let kv = wide(c.num_kv_heads) * wide(c.head_dim);
    let mut parts = vec![
        ("model.embed_tokens.weight", v * h),
        ("model.layers.{}.input_layernorm.weight", h),
        ("model.layers.{}.self_attn.q_proj.weight", h * h),
        ("model.layers.{}.self_attn.k_proj.weight", kv * h),
        ("model.layers.{}.self_attn.v_proj.weight", kv * h),
        ("model.layers.{}.self_attn.o_proj.weight", h * h),
        ("model.layers.{}.post_attention_layernorm.weight", h),
        ("model.layers.{}.mlp.gate_proj.weight", f * h),
        ("model.layers.{}.mlp.down_proj.weight", h * f),
        ("model.layers.{}.mlp.up_proj.weight", f * h),
        ("model.norm.weight", h),
        // Tables that nobody reads any more.
        ("cosines and sines", 2 * wide(c.context_length) * wide(c.head_dim / 2)),
    ];
    if !c.tied {
        parts.push(("lm_head.weight", v * h));
    }
    parts
}

/// How many times a part of [`layout`] is there.
fn repeats(name: &str, c: &ModelConfig) -> usize {
    if name.contains("{}") { c.num_layers } else { 1 }
}

/// Text and score of every token, as SentencePiece writes them.
fn read_tokenizer(path: &Path, vocab_size: usize) -> Result<Vec<(String, f32)>> {
    let malformed =
        |what: String| FormatError::malformed(path, what, "give the tokenizer.bin that belongs to the model");
    let map = map_file(path)?;
    let mut rest: &[u8] = &map;
    let mut take = |n: usize, token: usize| {
        let (part, after) = rest.split_at_checked(n).ok_or_else(|| malformed(format!("ends within token {token}")))?;
        rest = after;
        Ok::<&[u8], FormatError>(part)
    };
    let number = |b: &[u8]| b.first_chunk::<4>().copied().unwrap_or_default();
    take(4, 0)?;
    let mut pieces = Vec::new();
    for id in 0..vocab_size {
        let score = f32::from_le_bytes(number(take(4, id)?));
        let len = i32::from_le_bytes(number(take(4, id)?));
        let len = usize::try_from(len).map_err(|_| malformed(format!("token {id} has the length {len}")))?;
        let text =
            std::str::from_utf8(take(len, id)?).map_err(|e| malformed(format!("token {id} is not UTF-8 ({e})")))?;
        pieces.push((text.replace(' ', &SPACE_MARK.to_string()), score));
    }
    if !rest.is_empty() {
        return Err(malformed(format!("holds more than the {vocab_size} tokens of the model")));
    }
    if vocab_size < FIRST_BYTE + NUM_BYTES {
        return Err(malformed(format!("has {vocab_size} tokens, not even one a byte")));
    }
    // The exporter writes begin and end as they are to be printed.
    for (id, text) in [UNK, BOS, EOS] {
        pieces[id].0 = text.to_string();
    }
    for byte in 0..NUM_BYTES {
        let id = FIRST_BYTE + byte;
        if pieces[id].0 != format!("<0x{byte:02X}>") {
            return Err(malformed(format!("token {id} is `{}`, not byte {byte:#04X}", pieces[id].0)));
        }
    }
    Ok(pieces)
}

fn write_tokenizer(dir: &Path, pieces: &[(String, f32)], context_length: usize) -> Result<()> {
    let vocab: Map<String, Value> = pieces.iter().enumerate().map(|(id, (t, _))| (t.clone(), id.into())).collect();
    // Begin, end and bytes are never the result of a merge.
    let mergeable: Vec<(&str, f32)> = pieces[FIRST_BYTE + NUM_BYTES..].iter().map(|(t, s)| (t.as_str(), *s)).collect();
    let merges = merges_from_scores(&mergeable);
    let added = [UNK, BOS, EOS].map(|(id, text)| AddedToken { id, content: text.to_string(), special: true });
    let wrapping = Wrapping { bos: Some((BOS.0, BOS.1.to_string())), eos: None };
    let tokenizer = tokenizer_json(sentencepiece_bpe(vocab, merges, UNK.1, true), &added, &wrapping);
    atomic::write_bytes(dir.join("tokenizer.json"), tokenizer.to_string().as_bytes())?;
    let text = |t: (usize, &str)| Some(t.1.to_string());
    let config = TokenizerConfig {
        bos: text(BOS),
        eos: text(EOS),
        pad: None,
        unk: text(UNK),
        model_max_length: Some(context_length),
        chat_template: None,
    };
    write_json(&dir.join("tokenizer_config.json"), &tokenizer_config_json(&config, &wrapping))?;
    // Its stories follow one another with a begin token between: run.c stops there.
    let generation = json!({ "bos_token_id": BOS.0, "eos_token_id": [EOS.0, BOS.0] });
    write_json(&dir.join("generation_config.json"), &generation)
}
