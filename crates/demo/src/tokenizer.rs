//! The tokenizer: a byte-level BPE (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2), trained on the corpus in a moment.
//!
//! It is written as the files that every Hugging Face model has, so that from here on nothing is special about the demo. All
//! 256 bytes are in the vocabulary: any prompt can be encoded.

use std::path::Path;

use phalanx_formats::atomic;
use serde_json::json;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::error::{DemoError, Result};

/// The token that ends a story; its id is 0.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Trains a tokenizer of `vocab_size` tokens, 257 at least, and gives the text of `tokenizer.json`. Equal texts give equal bytes.
///
/// # Errors
/// [`DemoError::Tokenizer`] if the texts are too few to fill the vocabulary.
pub fn train(texts: &[String], vocab_size: usize) -> Result<String> {
    let wrong = |e: tokenizers::Error| DemoError::Tokenizer(e.to_string());
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    let mut trainer: TrainerWrapper = BpeTrainerBuilder::new()
        .vocab_size(vocab_size)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
        .into();
    tokenizer.train(&mut trainer, texts.iter()).map_err(wrong)?;
    let made = tokenizer.get_vocab_size(true);
    if made != vocab_size {
        let why = format!("the stories give {made} tokens, not the {vocab_size} of vocab_size; make more stories");
        return Err(DemoError::Tokenizer(why));
    }
    tokenizer.to_string(true).map_err(wrong)
}

/// Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` (how the demo samples) into `dir`.
///
/// # Errors
/// As [`train`], or if the disk refuses.
pub fn write(dir: &Path, texts: &[String], vocab_size: usize, context: usize) -> Result<()> {
    let tokenizer = train(texts, vocab_size)?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": false,
        "model_max_length": context,
    });
    let generation = json!({
        "eos_token_id": 0,
        "do_sample": true,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.95,
        "max_new_tokens": 300,
    });
    std::fs::create_dir_all(dir).map_err(DemoError::io(dir))?;
    atomic::write_bytes(dir.join("tokenizer_config.json"), format!("{config:#}\n").as_bytes())?;
    atomic::write_bytes(dir.join("generation_config.json"), format!("{generation:#}\n").as_bytes())?;
    atomic::write_bytes(dir.join("tokenizer.json"), tokenizer.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_stories_give_equal_bytes_and_any_text_survives() {
        let stories = crate::corpus::stories(5, 200).unwrap();
        let (a, b) = (train(&stories, 600).unwrap(), train(&stories, 600).unwrap());
        assert!(a == b, "two trainings differ");
        let tokenizer = Tokenizer::from_bytes(a.as_bytes()).unwrap();
        assert_eq!((tokenizer.get_vocab_size(true), tokenizer.token_to_id(END_OF_TEXT)), (600, Some(0)));
        for text in ["Once upon a time, a fox.\n\n\"Oh!\"", "naïve ☃ \u{1F98A}\u{0}\t", ""] {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(tokenizer.decode(ids.get_ids(), false).unwrap(), text);
        }
        assert!(train(&stories[..1], 5000).unwrap_err().to_string().contains("make more stories"));
    }
}
