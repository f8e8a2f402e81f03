//! A GGUF file as a model: its configuration, tokenizer and tensors under the names of a Hugging Face folder.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use super::config;
use super::dequant::{GgmlType, dequantize};
use super::file::{GgufFile, GgufTensor};
use super::tensor_names::hf_name;
use super::tokenizer::{self, Tokenizer};
use crate::atomic;
use crate::convert::FloatType;
use crate::error::{FormatError, Result};
use crate::hf_config::ModelConfig;
use crate::import::{interleaved_row, write_json};
use crate::names::{compare, matches_pattern};

/// An open GGUF file that was found to hold a whole model.
pub struct GgufModel {
    file: GgufFile,
    config: ModelConfig,
    tokenizer: Tokenizer,
    plans: HashMap<String, Plan>,
}

/// Where a tensor comes from.
struct Plan {
    source: GgufTensor,
    /// Width of a head if the rows have to be put into Hugging Face's order.
    reorder: Option<usize>,
}

impl GgufModel {
    /// Maps the file, reads its metadata and checks that it holds every tensor of the model, of a readable type and the right shape, and no other.
    ///
    /// # Errors
    /// The file cannot be read, or holds something that is not supported.
    pub fn open(file: impl AsRef<Path>) -> Result<GgufModel> {
        let file = GgufFile::open(file)?;
        let config = config::read(&file)?;
        let tokenizer = tokenizer::convert(&file)?;
        if tokenizer.num_tokens > config.vocab_size {
            return Err(FormatError::malformed(
                file.path(),
                format!("{} tokens, but the embedding has {} rows only", tokenizer.num_tokens, config.vocab_size),
                "take another file",
            ));
        }
        let plans = plan(&file, &config)?;
        Ok(GgufModel { file, config, tokenizer, plans })
    }

    /// The file.
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What a person should know about the tokenizer.
    pub fn notes(&self) -> &[String] {
        &self.tokenizer.notes
    }

    /// Writes everything but the weights into the folder `dir`: `config.json` (which says `dtype`), `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`,
    /// and `chat_template.jinja` if there is a template.
    ///
    /// # Errors
    /// The disk's.
    pub fn write_metadata(&self, dir: &Path, dtype: FloatType) -> Result<()> {
        let t = &self.tokenizer;
        write_json(&dir.join("config.json"), &self.config.to_json(dtype, t.bos_id, t.eos_id, t.pad_id))?;
        write_tokenizer(dir, t)
    }

    /// The tensor of that Hugging Face name.
    ///
    /// # Errors
    /// There is none.
    pub fn tensor(&self, name: &str) -> Result<Source<'_>> {
        let Some(plan) = self.plans.get(name) else {
            return Err(FormatError::malformed(self.file.path(), format!("no tensor `{name}`"), "take another file"));
        };
        Ok(Source { path: self.file.path(), bytes: self.file.bytes(&plan.source)?, plan })
    }
}

/// A tensor of a [`GgufModel`], its rows in Hugging Face's order.
pub struct Source<'a> {
    path: &'a Path,
    plan: &'a Plan,
    bytes: &'a [u8],
}

impl Source<'_> {
    /// The file.
    pub fn path(&self) -> &Path {
        self.path
    }

    /// Its name in the file.
    pub fn name(&self) -> &str {
        &self.plan.source.name
    }

    /// Its element or block type.
    pub fn ty(&self) -> GgmlType {
        self.plan.source.ty
    }

    /// Elements of a row. A vector that is to be reordered is a column of rows of one element.
    pub fn row_len(&self) -> usize {
        match (self.plan.source.shape.as_slice(), self.plan.reorder) {
            ([_], Some(_)) => 1,
            (shape, _) => shape.last().copied().unwrap_or(1),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.plan.source.num_elements() / self.row_len().max(1)
    }

    /// The data of row `i` as they lie in the file: whole blocks of [`Source::ty`].
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, i: usize) -> &[u8] {
        let row_bytes = self.bytes.len() / self.rows().max(1);
        let i = self.plan.reorder.map_or(i, |head_dim| interleaved_row(i, head_dim));
        &self.bytes[i * row_bytes..(i + 1) * row_bytes]
    }

    /// Widens rows into `out`, one after another.
    ///
    /// # Panics
    /// If `out` has not the elements of these rows.
    pub fn read_rows(&self, range: Range<usize>, out: &mut [f32]) {
        for (i, out) in range.zip(out.chunks_exact_mut(self.row_len().max(1))) {
            dequantize(self.ty(), self.row(i), out);
        }
    }
}

/// Finds the source of every tensor that the model has, and checks that nothing is missing or left over.
fn plan(file: &GgufFile, config: &ModelConfig) -> Result<HashMap<String, Plan>> {
    let mut plans = HashMap::new();
    let mut found: BTreeMap<&str, &[usize]> = BTreeMap::new();
    let names: Vec<String> =
        file.tensors().iter().map(|t| hf_name(&t.name).unwrap_or_else(|| t.name.clone())).collect();
    for (source, name) in file.tensors().iter().zip(&names) {
        // Refuse unreadable types before anything is written.
        file.bytes(source)?;
        let is_qk = [".self_attn.q_proj.", ".self_attn.k_proj."].iter().any(|p| name.contains(p));
        let reorder = (is_qk && config.family.rows_interleaved()).then_some(config.head_dim);
        found.insert(name, &source.shape);
        plans.insert(name.clone(), Plan { source: source.clone(), reorder });
    }
    // Llama 3's frequency divisors have become `rope_scaling`; files from before have a copy a layer of plain ones.
    let consumed = ["rope_freqs.weight", "blk.*.attn_rot_embd.weight"];
    compare(file.path().to_path_buf(), &found, &config.expected_tensors(), &consumed)?;
    plans.retain(|name, _| !consumed.iter().any(|p| matches_pattern(p, name)));
    Ok(plans)
}

fn write_tokenizer(dir: &Path, tokenizer: &Tokenizer) -> Result<()> {
    // Not indented: a vocabulary is long.
    atomic::write_bytes(dir.join("tokenizer.json"), tokenizer.tokenizer.to_string().as_bytes())?;
    write_json(&dir.join("tokenizer_config.json"), &tokenizer.tokenizer_config)?;
    write_json(&dir.join("generation_config.json"), &tokenizer.generation_config)?;
    if let Some(template) = &tokenizer.chat_template {
        atomic::write_bytes(dir.join("chat_template.jinja"), template.as_bytes())?;
    }
    if !tokenizer.named_templates.is_empty() {
        let named = dir.join("additional_chat_templates");
        std::fs::create_dir(&named).map_err(|e| FormatError::io(&named, "create the folder", e))?;
        for (name, template) in &tokenizer.named_templates {
            atomic::write_bytes(named.join(format!("{name}.jinja")), template.as_bytes())?;
        }
    }
    Ok(())
}
