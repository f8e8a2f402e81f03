//! How text is cut before BPE merges begin, by the name that GGUF gives it (`tokenizer.ggml.pre`).
//!
//! llama.cpp knows these cuts as lists of regular expressions under some sixty names (`llm_tokenizer_bpe` and
//! `llama_vocab::impl::load` in `llama-vocab.cpp`); here are those that models of the llama and qwen families use, in
//! the form of the models' own `tokenizer.json`.

use serde_json::{Value, json};

/// The steps before merging.
#[derive(Debug, Clone, PartialEq)]
pub struct PreTokenizer {
    /// Steps before the byte-level one.
    pub split: Vec<Value>,
    /// Whether the byte-level step also cuts with GPT-2's expression.
    pub gpt2_split: bool,
    /// Whether text is brought to Unicode form C first.
    pub nfc: bool,
    /// Whether a word that is a token as a whole is taken without merging.
    pub ignore_merges: bool,
    /// Whether a begin token is put first where the file does not say.
    pub add_bos: bool,
}

/// All names that [`pre_tokenizer`] knows, for messages.
pub const KNOWN: &str = "default, gpt-2, phi-2, mpt, olmo, jais, exaone4, mellum, gigachat, smollm, starcoder, refact, \
                         command-r, codeshell, exaone, minerva-7b, mellum2, llama3, llama-v3, llama-bpe, falcon3, \
                         falcon-h1, pixtral, midm-2.0, lfm2, dbrx, smaug-bpe, chatglm-bpe, glm4, qwen2, \
                         deepseek-r1-qwen, kormo, megrez, stablelm2, hunyuan, tekken, deepseek-coder, gpt-4o, llama4";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

/// The steps of that name; `None` if it is not known.
pub fn pre_tokenizer(name: &str) -> Option<PreTokenizer> {
    let plain = PreTokenizer { split: vec![], gpt2_split: true, nfc: false, ignore_merges: false, add_bos: false };
    let cut = |pattern| PreTokenizer { split: vec![split(pattern)], gpt2_split: false, ..plain.clone() };
    let digits = json!({ "type": "Digits", "individual_digits": true });
    Some(match name {
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "exaone4" | "mellum" | "gigachat" => plain,
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            PreTokenizer { split: vec![digits], ..plain }
        }
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            PreTokenizer { ignore_merges: true, add_bos: true, ..cut(LLAMA3) }
        }
        "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" => cut(LLAMA3),
        // Qwen's own tokenizer.json normalises to form C; llama.cpp does not, which differs for decomposed accents only.
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "megrez" => PreTokenizer { nfc: true, ..cut(QWEN2) },
        "stablelm2" | "hunyuan" => cut(QWEN2),
        "tekken" => PreTokenizer { ignore_merges: true, add_bos: true, ..cut(TEKKEN) },
        "gpt-4o" | "llama4" => cut(GPT4O),
        "deepseek-coder" => {
            let cuts = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"];
            let split = cuts.into_iter().map(split).chain([digits]).collect();
            PreTokenizer { split, gpt2_split: false, ..plain }
        }
        "default" => {
            let cuts = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];
            PreTokenizer { split: cuts.into_iter().map(split).collect(), gpt2_split: false, ..plain }
        }
        _ => return None,
    })
}

/// Cuts out what the expression matches; what lies between stays whole.
fn split(pattern: &str) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_names_is_true() {
        assert!(KNOWN.split(", ").all(|n| pre_tokenizer(n.trim()).is_some()), "{KNOWN}");
        assert_eq!(pre_tokenizer("no-such"), None);
    }
}
