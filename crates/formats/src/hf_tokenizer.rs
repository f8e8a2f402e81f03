//! Building the tokenizer files of a Hugging Face folder: `tokenizer.json`, `tokenizer_config.json`.
//!
//! What the importers share. The form of `tokenizer.json` is that of the `tokenizers` library; the SentencePiece
//! conversion follows the one of `transformers` (`LlamaConverter`).

use std::collections::HashMap;

use serde_json::{Map, Value, json};

/// SentencePiece writes spaces as this character (U+2581).
pub const SPACE_MARK: char = '\u{2581}';

/// A token that is cut out of the text before anything else happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedToken {
    /// Its id.
    pub id: usize,
    /// Its text.
    pub content: String,
    /// Whether it is left out when decoding with `skip_special_tokens`.
    pub special: bool,
}

/// Tokens that a sequence begins and ends with, those that are added without being asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wrapping {
    /// Id and text of the first token.
    pub bos: Option<(usize, String)>,
    /// Id and text of the last token.
    pub eos: Option<(usize, String)>,
}

/// The parts of `tokenizer.json` that differ from model to model.
#[derive(Debug, Clone)]
pub struct TokenizerParts {
    /// `normalizer`
    pub normalizer: Value,
    /// `pre_tokenizer`
    pub pre_tokenizer: Value,
    /// `decoder`
    pub decoder: Value,
    /// `model`
    pub model: Value,
}

/// `tokenizer.json`.
pub fn tokenizer_json(parts: TokenizerParts, added: &[AddedToken], wrapping: &Wrapping) -> Value {
    let added: Vec<Value> = added
        .iter()
        .map(|t| {
            json!({
                "id": t.id, "content": t.content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": t.special,
            })
        })
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": post_processor(wrapping),
        "decoder": parts.decoder,
        "model": parts.model,
    })
}

fn post_processor(wrapping: &Wrapping) -> Value {
    if wrapping.bos.is_none() && wrapping.eos.is_none() {
        return Value::Null;
    }
    let template = |sequences: &[(&str, usize)]| {
        let mut out = Vec::new();
        for (name, type_id) in sequences {
            let special = |t: &(usize, String)| json!({ "SpecialToken": { "id": t.1, "type_id": type_id } });
            out.extend(wrapping.bos.as_ref().map(special));
            out.push(json!({ "Sequence": { "id": name, "type_id": type_id } }));
            out.extend(wrapping.eos.as_ref().map(special));
        }
        out
    };
    let tokens = wrapping.bos.iter().chain(&wrapping.eos);
    let specials: Map<String, Value> =
        tokens.map(|(id, text)| (text.clone(), json!({ "id": text, "ids": [id], "tokens": [text] }))).collect();
    json!({
        "type": "TemplateProcessing",
        "single": template(&[("A", 0)]),
        "pair": template(&[("A", 0), ("B", 1)]),
        "special_tokens": specials,
    })
}

/// A byte-level BPE (GPT-2's scheme: bytes are written as printable characters).
///
/// `split` are the steps that cut the text before; `nfc` says whether it is brought to Unicode form C first.
pub fn byte_level_bpe(
    vocab: Map<String, Value>,
    merges: Vec<[String; 2]>,
    split: Vec<Value>,
    gpt2_split: bool,
    nfc: bool,
    ignore_merges: bool,
) -> TokenizerParts {
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": gpt2_split });
    let pre_tokenizer = if split.is_empty() {
        byte_level
    } else {
        let steps: Vec<Value> = split.into_iter().chain([byte_level]).collect();
        json!({ "type": "Sequence", "pretokenizers": steps })
    };
    TokenizerParts {
        normalizer: if nfc { json!({ "type": "NFC" }) } else { Value::Null },
        pre_tokenizer,
        decoder: json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true }),
        model: bpe_model(vocab, merges, Value::Null, false, ignore_merges),
    }
}

/// A SentencePiece BPE as the `tokenizers` library expresses it: merges in order of falling score, unknown characters
/// as bytes, spaces as [`SPACE_MARK`], one of which is put before the text if `space_prefix`.
pub fn sentencepiece_bpe(
    vocab: Map<String, Value>,
    merges: Vec<[String; 2]>,
    unk_token: &str,
    space_prefix: bool,
) -> TokenizerParts {
    let mark = SPACE_MARK.to_string();
    let mut normalizers = vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": mark })];
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": mark }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if space_prefix {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": mark }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    TokenizerParts {
        normalizer: json!({ "type": "Sequence", "normalizers": normalizers }),
        pre_tokenizer: Value::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: bpe_model(vocab, merges, unk_token.into(), true, false),
    }
}

fn bpe_model(
    vocab: Map<String, Value>,
    merges: Vec<[String; 2]>,
    unk_token: Value,
    byte_fallback: bool,
    ignore_merges: bool,
) -> Value {
    json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unk_token,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    })
}

/// The merges that a SentencePiece BPE with these pieces performs, in its order of preference: falling score.
///
/// SentencePiece has no merges: it joins the neighbours whose joint piece scores highest. So every way to cut a piece
/// into two pieces is a merge with the piece's score. Where one piece can arise in two overlapping ways at equal score
/// (`a|aa` and `aa|a`), SentencePiece takes the left one and `tokenizers` the one listed first; the order here is the
/// one that `transformers` gives.
pub fn merges_from_scores(pieces: &[(&str, f32)]) -> Vec<[String; 2]> {
    let known: HashMap<&str, ()> = pieces.iter().map(|(p, _)| (*p, ())).collect();
    let mut merges: Vec<(f32, &str, &str)> = Vec::new();
    for &(piece, score) in pieces {
        for (at, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(at);
            if known.contains_key(left) && known.contains_key(right) {
                merges.push((score, left, right));
            }
        }
    }
    let chars = |s: &str| s.chars().count();
    merges.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then_with(|| chars(b.1).cmp(&chars(a.1))).then_with(|| chars(b.2).cmp(&chars(a.2)))
    });
    merges.into_iter().map(|(_, l, r)| [l.to_string(), r.to_string()]).collect()
}

/// What `tokenizer_config.json` says beside `tokenizer.json`.
#[derive(Debug, Clone, Default)]
pub struct TokenizerConfig {
    /// Text of the begin token.
    pub bos: Option<String>,
    /// Text of the end token.
    pub eos: Option<String>,
    /// Text of the padding token.
    pub pad: Option<String>,
    /// Text of the unknown token.
    pub unk: Option<String>,
    /// Longest sequence the model knows.
    pub model_max_length: Option<usize>,
    /// Jinja source.
    pub chat_template: Option<String>,
}

/// `tokenizer_config.json`.
pub fn tokenizer_config_json(config: &TokenizerConfig, wrapping: &Wrapping) -> Value {
    let mut out = Map::new();
    out.insert("add_bos_token".into(), wrapping.bos.is_some().into());
    out.insert("add_eos_token".into(), wrapping.eos.is_some().into());
    let texts = [
        ("bos_token", &config.bos),
        ("eos_token", &config.eos),
        ("pad_token", &config.pad),
        ("unk_token", &config.unk),
        ("chat_template", &config.chat_template),
    ];
    for (key, text) in texts {
        if let Some(text) = text {
            out.insert(key.into(), text.as_str().into());
        }
    }
    out.insert("clean_up_tokenization_spaces".into(), false.into());
    if let Some(n) = config.model_max_length {
        out.insert("model_max_length".into(), n.into());
    }
    out.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_fall_in_score() {
        let pieces = [("a", -9.0), ("b", -9.0), ("ab", -1.0), ("abb", -0.0), ("é", -9.0), ("éa", -2.0), ("zz", 0.0)];
        let merges = merges_from_scores(&pieces);
        let want = [["ab", "b"], ["a", "b"], ["é", "a"]].map(|m| m.map(String::from));
        assert_eq!(merges, want);
    }

    #[test]
    fn wrapping_makes_a_template() {
        assert_eq!(post_processor(&Wrapping::default()), Value::Null);
        let p = post_processor(&Wrapping { bos: Some((1, "<s>".into())), eos: None });
        assert_eq!(p["single"][0]["SpecialToken"]["id"], "<s>");
        assert_eq!(p["pair"].as_array().map(Vec::len), Some(4));
        assert_eq!(p["special_tokens"]["<s>"]["ids"][0], 1);
    }
}
