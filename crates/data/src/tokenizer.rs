//! The tokenizer of a Hugging Face model folder, with what the other files say about its special tokens.
//!
//! Wraps the `tokenizers` crate. Two things differ from a plain load. Its post-processor is taken off: it would add
//! BOS where a chat template has already written one, and it trims spaces off the token offsets that the loss mask
//! is made from. And tokens that end a generation are collected from all the files that may name them.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{DataError, Result};

/// Ids with the byte range of the text that each stands for.
pub(crate) type IdsAndOffsets = (Vec<u32>, Vec<(usize, usize)>);

/// A tokenizer with its special tokens; shared freely between threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    hash: blake3::Hash,
    named: Map<String, Value>,
    bos: Option<u32>,
    eos: Option<u32>,
    pad: Option<u32>,
    stops: Vec<u32>,
    special: HashSet<u32>,
    adds_bos: bool,
    rows: usize,
    chat_template: Option<(String, String)>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` of a model folder and reads `tokenizer_config.json`, `special_tokens_map.json`,
    /// `generation_config.json`, `config.json` and `chat_template.jinja` beside it, as far as they exist.
    ///
    /// # Errors
    /// If `tokenizer.json` is missing or one of the files is broken.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && dir.join("tokenizer.model").exists() => {
                return Err(DataError::file(
                    dir,
                    "holds tokenizer.model but no tokenizer.json; make one with transformers' \
                     AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)",
                ));
            }
            Err(e) => return Err(DataError::io("read", &path, e)),
        };
        let config = read_object(&dir.join("tokenizer_config.json"))?;
        let special_map = read_object(&dir.join("special_tokens_map.json"))?;
        let generation = read_object(&dir.join("generation_config.json"))?;
        let model = read_object(&dir.join("config.json"))?;
        let hash = blake3::hash(&bytes);
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| DataError::file(&path, format!("not a tokenizer.json that can be used: {e}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| DataError::file(&path, e.to_string()))?;

        let mut named = Map::new();
        let mut find = |key: &str| -> Option<u32> {
            let text = [&config, &special_map].into_iter().find_map(|m| token_text(m.get(&format!("{key}_token"))?));
            let id = text.as_deref().and_then(|t| inner.token_to_id(t)).or_else(|| {
                let id_key = format!("{key}_token_id");
                [&generation, &model].into_iter().find_map(|m| ids_of(m.get(&id_key)?).first().copied())
            });
            if let Some(text) = text.or_else(|| id.and_then(|id| inner.id_to_token(id))) {
                named.insert(format!("{key}_token"), text.into());
            }
            id
        };
        let (bos, eos, pad) = (find("bos"), find("eos"), find("pad"));
        find("unk");
        let mut stops: Vec<u32> = eos.into_iter().collect();
        let listed = generation.get("eos_token_id").or_else(|| model.get("eos_token_id"));
        for id in listed.map(ids_of).unwrap_or_default() {
            if !stops.contains(&id) {
                stops.push(id);
            }
        }
        let special = inner.get_added_tokens_decoder().iter().filter(|(_, t)| t.special).map(|(id, _)| *id).collect();
        let rows = inner.get_vocab(true).values().max().map_or(0, |max| *max as usize + 1);
        let adds_bos = match config.get("add_bos_token").and_then(Value::as_bool) {
            Some(adds) => adds,
            None => {
                let probe = inner.encode_fast("a", true).map_err(|e| DataError::file(&path, e.to_string()))?;
                bos.is_some() && probe.get_ids().first().copied() == bos
            }
        };
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let chat_template = find_template(dir, &config)?;
        Ok(Self { inner, path, hash, named, bos, eos, pad, stops, special, adds_bos, rows, chat_template })
    }

    /// Ids of a text. Nothing is added; special tokens written in the text are recognised.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text (an unknown piece without an unknown token).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| self.wrong(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids of a plain text as the model expects it at the head of a context: with BOS if the tokenizer adds one and
    /// the text does not begin with it.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        if let (true, Some(bos)) = (self.adds_bos, self.bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    pub(crate) fn encode_offsets(&self, text: &str) -> Result<IdsAndOffsets> {
        let encoding = self.inner.encode(text, false).map_err(|e| self.wrong(e))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    /// Text of ids.
    ///
    /// # Errors
    /// If the decoder fails. Unknown ids are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|e| self.wrong(e))
    }

    /// A decoder for tokens that come one by one.
    pub fn stream_decoder(&self, skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, skip_special, ids: Vec::new(), context: 0, read: 0, shown: 0 }
    }

    /// The id of a token by its exact text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token text of an id, as the vocabulary has it (byte-level pieces are not decoded).
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// End-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Padding token. Nothing here pads; generation and export may want it.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Every id that ends a generation by the model's files: EOS and the list of `generation_config.json`. The chat
    /// template may add one: [`crate::ChatTemplate::stop_ids`].
    pub fn stop_ids(&self) -> &[u32] {
        &self.stops
    }

    /// Whether an id is marked special.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether plain texts get BOS in front.
    pub fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// The number of embedding rows that the ids need: the greatest id + 1.
    pub fn vocab_rows(&self) -> usize {
        self.rows
    }

    /// Refuses an embedding that has no row for some id. More rows than ids are fine (padded vocabularies).
    ///
    /// # Errors
    /// Names the first token without a row.
    pub fn check_rows(&self, embedding_rows: usize) -> Result<()> {
        if self.rows <= embedding_rows {
            return Ok(());
        }
        let first = (embedding_rows..self.rows).find_map(|id| Some((id, self.inner.id_to_token(id as u32)?)));
        let example = first.map_or(String::new(), |(id, token)| format!(" (the first is {token:?} with id {id})"));
        Err(DataError::file(
            &self.path,
            format!(
                "has ids up to {}, but the model's embedding has {embedding_rows} rows{example}; \
                 use the tokenizer that belongs to the model, or a model with enough rows",
                self.rows - 1
            ),
        ))
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hash of `tokenizer.json`, part of every cache key.
    pub(crate) fn hash(&self) -> &blake3::Hash {
        &self.hash
    }

    /// `bos_token`, `eos_token` ... as a template sees them.
    pub(crate) fn named_tokens(&self) -> &Map<String, Value> {
        &self.named
    }

    /// The model's own chat template with the file it stands in.
    pub(crate) fn chat_template(&self) -> Option<(&str, &str)> {
        self.chat_template.as_ref().map(|(name, text)| (name.as_str(), text.as_str()))
    }

    /// Takes another template for the model's own; `file` is for messages.
    pub fn set_chat_template(&mut self, file: String, text: String) {
        self.chat_template = Some((file, text));
    }

    fn wrong(&self, e: tokenizers::Error) -> DataError {
        DataError::file(&self.path, e.to_string())
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(e) => return Err(DataError::io("read", path, e)),
    };
    serde_json::from_str(&text)
        .map_err(|e| DataError::record(path, e.line().to_string(), format!("not a JSON object: {e}")))
}

/// A special token is a string or `{"content": string, ...}`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(String::from)
}

/// An id or a list of ids.
fn ids_of(value: &Value) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Value::Array(list) => list.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    }
}

/// `chat_template.jinja` goes before the key of `tokenizer_config.json`, which is a text or a list of named texts.
fn find_template(dir: &Path, config: &Map<String, Value>) -> Result<Option<(String, String)>> {
    let path = dir.join("chat_template.jinja");
    match std::fs::read_to_string(&path) {
        Ok(text) => return Ok(Some((path.display().to_string(), text))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(DataError::io("read", &path, e)),
    }
    let name = dir.join("tokenizer_config.json").display().to_string();
    Ok(match config.get("chat_template") {
        Some(Value::String(text)) => Some((name, text.clone())),
        Some(Value::Array(list)) => {
            let named = |n: &str| list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some(n));
            let entry = named("default").or_else(|| list.first());
            entry.and_then(|t| t.get("template")?.as_str()).map(|text| (name, text.to_owned()))
        }
        _ => None,
    })
}

/// Turns tokens that come one by one into text that never breaks inside a character.
///
/// A token may hold part of a character, or change the look of its neighbours (leading spaces of SentencePiece), so
/// the text of a token is what it adds to the text of those shortly before it. Joined, the pieces are the text of
/// all the ids together.
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    /// Where the tokens begin whose text was complete last time, and the tokens after those, in `ids`.
    context: usize,
    read: usize,
    /// How much of the text of `ids[context..]` has been given out, in bytes.
    shown: usize,
}

impl StreamDecoder<'_> {
    /// Takes a token and gives the text that has become certain, often its own, sometimes none.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids[self.context..], self.skip_special)?;
        let certain = certain_len(&text, self.ids.len() - self.read);
        let new = text.get(self.shown..certain).unwrap_or_default().to_owned();
        self.shown = self.shown.max(certain);
        if certain == text.len() {
            self.context = self.read;
            self.read = self.ids.len();
            self.shown = self.tokenizer.decode(&self.ids[self.context..], self.skip_special)?.len();
        }
        Ok(new)
    }

    /// The rest, with U+FFFD where a character stayed incomplete.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids[self.context..], self.skip_special)?;
        Ok(text.get(self.shown..).unwrap_or_default().to_owned())
    }
}

/// The length without what more tokens may change: bytes that are no character yet are shown as U+FFFD.
///
/// A byte-fallback decoder shows a whole run of byte tokens so until the run is valid, so the whole tail waits. After
/// very many tokens the bytes must be broken, and only the last three can still be the beginning of a character.
fn certain_len(text: &str, waiting: usize) -> usize {
    let limit = if waiting < 64 { usize::MAX } else { 3 };
    let held = text.chars().rev().take(limit).take_while(|c| *c == char::REPLACEMENT_CHARACTER).count();
    text.len() - held * char::REPLACEMENT_CHARACTER.len_utf8()
}
