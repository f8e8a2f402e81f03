//! The tokenizer inside a GGUF file (`tokenizer.*` keys) as the files of a Hugging Face folder.

use serde_json::{Map, Value, json};

use super::file::GgufFile;
use super::pre_tokenizer::{KNOWN, PreTokenizer, pre_tokenizer};
use super::value::{Array, Value as GgufValue};
use crate::error::{FormatError, Result};
use crate::hf_tokenizer::{
    AddedToken, TokenizerConfig, TokenizerParts, Wrapping, byte_level_bpe, merges_from_scores, sentencepiece_bpe,
    tokenizer_config_json, tokenizer_json,
};

/// The files that make up a tokenizer.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// `tokenizer.json`
    pub tokenizer: Value,
    /// `tokenizer_config.json`
    pub tokenizer_config: Value,
    /// `generation_config.json`: begin, end and padding ids.
    pub generation_config: Value,
    /// `chat_template.jinja`
    pub chat_template: Option<String>,
    /// Further templates by name, for `additional_chat_templates/NAME.jinja`.
    pub named_templates: Vec<(String, String)>,
    /// Number of ids; no more than the embedding has rows.
    pub num_tokens: usize,
    /// Id that sequences begin with.
    pub bos_id: Option<usize>,
    /// Id that ends a text or an answer.
    pub eos_id: Option<usize>,
    /// Id for padding.
    pub pad_id: Option<usize>,
    /// What a person should know about this conversion.
    pub notes: Vec<String>,
}

/// llama.cpp's `token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

struct Vocabulary<'a> {
    file: &'a GgufFile,
    tokens: &'a [String],
    kinds: Vec<Kind>,
    notes: Vec<String>,
}

/// Converts the tokenizer of `file`.
///
/// # Errors
/// A key is missing or wrong, or the tokenizer is of a kind that is not supported.
pub fn convert(file: &GgufFile) -> Result<Tokenizer> {
    let key = "tokenizer.ggml.model";
    let model = file.require(key, file.opt_str(key)?)?;
    let mut vocab = Vocabulary::read(file)?;
    let id = |name: &str| vocab.id(&format!("tokenizer.ggml.{name}_token_id"));
    let (mut bos, mut eos, mut unk, pad) = (id("bos")?, id("eos")?, id("unknown")?, id("padding")?);
    let flag = |name: &str| file.opt_bool(&format!("tokenizer.ggml.{name}"));
    let add_bos = flag("add_bos_token")?;
    let add_eos = flag("add_eos_token")?.unwrap_or(false);
    let (parts, add_bos) = match model {
        "gpt2" => {
            let pre = pre_by_name(file, &mut vocab.notes)?;
            let add_bos = add_bos.unwrap_or(pre.add_bos);
            (vocab.byte_level(pre)?, add_bos)
        }
        "llama" => {
            let existing = |id: usize| (id < vocab.tokens.len()).then_some(id);
            (bos, eos, unk) = (bos.or(existing(1)), eos.or(existing(2)), unk.or(existing(0)));
            let prefix = flag("add_space_prefix")?.unwrap_or(true);
            (vocab.sentencepiece(unk, prefix)?, add_bos.unwrap_or(true))
        }
        other => {
            return Err(FormatError::unsupported(
                file.path(),
                format!("tokenizer model `{other}`"),
                "`gpt2` (byte-level BPE) and `llama` (SentencePiece) are supported",
            ));
        }
    };
    let text = |id: Option<usize>| id.map(|id| vocab.tokens[id].clone());
    let wrapping =
        Wrapping { bos: bos.filter(|_| add_bos).zip(text(bos)), eos: eos.filter(|_| add_eos).zip(text(eos)) };
    let chat_template = file.opt_str("tokenizer.chat_template")?.map(str::to_string);
    let config = TokenizerConfig {
        bos: text(bos),
        eos: text(eos),
        pad: text(pad),
        unk: if model == "llama" { text(unk) } else { None },
        model_max_length: context_length(file)?,
        chat_template: chat_template.clone(),
    };
    let generation_config = generation_config(&vocab, bos, eos, pad)?;
    Ok(Tokenizer {
        tokenizer: tokenizer_json(parts, &vocab.added(), &wrapping),
        tokenizer_config: tokenizer_config_json(&config, &wrapping),
        generation_config,
        chat_template,
        named_templates: named_templates(file)?,
        num_tokens: vocab.tokens.len(),
        bos_id: bos,
        eos_id: eos,
        pad_id: pad,
        notes: vocab.notes,
    })
}

fn pre_by_name(file: &GgufFile, notes: &mut Vec<String>) -> Result<PreTokenizer> {
    let name = file.opt_str("tokenizer.ggml.pre")?.unwrap_or_else(|| {
        notes.push(
            "the file does not say how text is cut before merging (tokenizer.ggml.pre): `default` is assumed, as \
             llama.cpp does; token ids may differ from the original model's"
                .into(),
        );
        "default"
    });
    pre_tokenizer(name).ok_or_else(|| {
        let mend = format!("supported: {KNOWN}");
        FormatError::unsupported(file.path(), format!("`tokenizer.ggml.pre` is `{name}`"), mend)
    })
}

fn context_length(file: &GgufFile) -> Result<Option<usize>> {
    let Some(arch) = file.opt_str("general.architecture")? else { return Ok(None) };
    file.opt_usize(&format!("{arch}.context_length"))
}

/// Templates beside the main one: `tokenizer.chat_template.NAME`.
fn named_templates(file: &GgufFile) -> Result<Vec<(String, String)>> {
    let mut out = Vec::new();
    for key in file.metadata().keys() {
        let Some(name) = key.strip_prefix("tokenizer.chat_template.") else { continue };
        // The name becomes a file name.
        let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        if let (true, Some(text)) = (plain && !name.is_empty(), file.opt_str(key)?) {
            out.push((name.to_string(), text.to_string()));
        }
    }
    Ok(out)
}

fn generation_config(
    vocab: &Vocabulary<'_>,
    bos: Option<usize>,
    eos: Option<usize>,
    pad: Option<usize>,
) -> Result<Value> {
    // A model may end an answer, a message or a text with different tokens: generation stops at any of them.
    let mut stops: Vec<usize> = eos.into_iter().collect();
    for name in ["eot", "eom"] {
        let id = vocab.id(&format!("tokenizer.ggml.{name}_token_id"))?;
        stops.extend(id.filter(|id| !stops.contains(id)));
    }
    let mut out = Map::new();
    if let Some(bos) = bos {
        out.insert("bos_token_id".into(), bos.into());
    }
    match stops.as_slice() {
        [] => {}
        [one] => drop(out.insert("eos_token_id".into(), (*one).into())),
        many => drop(out.insert("eos_token_id".into(), json!(many))),
    }
    if let Some(pad) = pad {
        out.insert("pad_token_id".into(), pad.into());
    }
    Ok(out.into())
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a GgufFile) -> Result<Self> {
        let key = "tokenizer.ggml.tokens";
        let tokens = file.require(key, file.opt_strings(key)?)?;
        let key = "tokenizer.ggml.token_type";
        let kinds = match file.metadata().get(key) {
            None => vec![Kind::Normal; tokens.len()],
            Some(GgufValue::Array(Array::I32(v))) => v.iter().map(|&k| kind(k)).collect(),
            Some(GgufValue::Array(Array::U32(v))) => v.iter().map(|&k| kind(k as i32)).collect(),
            Some(_) => return Err(file.bad_key(key, "is not a list of 32-bit numbers")),
        };
        if kinds.len() != tokens.len() {
            let what = format!("has {} entries for {} tokens", kinds.len(), tokens.len());
            return Err(file.bad_key(key, what));
        }
        Ok(Self { file, tokens, kinds, notes: vec![] })
    }

    /// The token id at `key`, checked to be one.
    fn id(&self, key: &str) -> Result<Option<usize>> {
        // -1, and its unsigned form, mean "none" in some files.
        let Some(value) = self.file.metadata().get(key) else { return Ok(None) };
        if matches!(value, GgufValue::I32(-1) | GgufValue::U32(u32::MAX)) {
            return Ok(None);
        }
        match self.file.opt_usize(key)? {
            Some(id) if id >= self.tokens.len() => {
                Err(self.file.bad_key(key, format!("is {id}, but there are {} tokens only", self.tokens.len())))
            }
            id => Ok(id),
        }
    }

    /// Placeholders that converters put in to fill up the embedding's rows.
    fn is_filler(&self, id: usize) -> bool {
        self.kinds[id] == Kind::Unused && self.tokens[id].starts_with("[PAD")
    }

    /// Text -> id. A text that stands for two ids keeps the first.
    fn vocab(&mut self) -> Map<String, Value> {
        let mut vocab = Map::new();
        let mut repeated = 0;
        for (id, token) in self.tokens.iter().enumerate().filter(|(id, _)| !self.is_filler(*id)) {
            if vocab.contains_key(token) {
                repeated += 1;
            } else {
                vocab.insert(token.clone(), id.into());
            }
        }
        if repeated > 0 {
            self.notes.push(format!("{repeated} tokens have the text of an earlier one and can never be produced"));
        }
        vocab
    }

    fn added(&self) -> Vec<AddedToken> {
        let special = |id: usize| matches!(self.kinds[id], Kind::Control | Kind::Unknown);
        (0..self.tokens.len())
            .filter(|&id| special(id) || self.kinds[id] == Kind::UserDefined)
            .filter(|&id| !self.tokens[id].is_empty())
            .map(|id| AddedToken { id, content: self.tokens[id].clone(), special: special(id) })
            .collect()
    }

    fn byte_level(&mut self, pre: PreTokenizer) -> Result<TokenizerParts> {
        let key = "tokenizer.ggml.merges";
        let lines = self.file.require(key, self.file.opt_strings(key)?)?;
        let vocab = self.vocab();
        let mut merges = Vec::with_capacity(lines.len());
        let mut useless = 0;
        for line in lines {
            // The first part may itself be a space in files of other tokenizers, hence from the second character on.
            let cut = line.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
            let Some((left, right)) = cut.map(|at| (&line[..at], &line[at + 1..])) else {
                return Err(self.file.bad_key(key, format!("holds `{line}`, which is not two parts")));
            };
            // `tokenizers` refuses to load merges of or into unknown tokens; they could never take part.
            let known = |text: &str| vocab.contains_key(text);
            if known(left) && known(right) && known(&format!("{left}{right}")) {
                merges.push([left.to_string(), right.to_string()]);
            } else {
                useless += 1;
            }
        }
        if useless > 0 {
            self.notes.push(format!("{useless} merges of tokens that are not in the vocabulary were left out"));
        }
        Ok(byte_level_bpe(vocab, merges, pre.split, pre.gpt2_split, pre.nfc, pre.ignore_merges))
    }

    fn sentencepiece(&mut self, unk: Option<usize>, space_prefix: bool) -> Result<TokenizerParts> {
        let key = "tokenizer.ggml.scores";
        let scores = match self.file.metadata().get(key) {
            Some(GgufValue::Array(Array::F32(v))) if v.len() == self.tokens.len() => v,
            Some(_) => return Err(self.file.bad_key(key, "is not one f32 a token")),
            None => return Err(self.file.bad_key(key, "is missing")),
        };
        let pieces: Vec<(&str, f32)> = self
            .tokens
            .iter()
            .zip(scores)
            .zip(&self.kinds)
            .filter(|(_, kind)| **kind == Kind::Normal)
            .map(|((t, s), _)| (t.as_str(), *s))
            .collect();
        let merges = merges_from_scores(&pieces);
        let unk = unk.map_or("<unk>", |id| self.tokens[id].as_str());
        Ok(sentencepiece_bpe(self.vocab(), merges, unk, space_prefix))
    }
}

fn kind(code: i32) -> Kind {
    match code {
        2 => Kind::Unknown,
        3 => Kind::Control,
        4 => Kind::UserDefined,
        5 => Kind::Unused,
        6 => Kind::Byte,
        _ => Kind::Normal,
    }
}
