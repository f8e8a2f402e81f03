//! A model folder made on the spot: a byte-level tokenizer with two special tokens, ChatML, and a small random model.

use std::path::PathBuf;

use phalanx_data::{ChatTemplate, DataOptions, Tokenizer};
use phalanx_generate::{Generator, GeneratorOptions};
use phalanx_models::{Model, ModelConfig, initialise};
use phalanx_nn::{Batch, Env};
use phalanx_tensor::Runtime;
use serde_json::{Map, Value, json};

pub const IM_START: u32 = 256;
pub const IM_END: u32 = 257;

const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The characters that stand for bytes in byte-level vocabularies (GPT-2's table).
fn byte_char(b: u8) -> char {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if plain(b) {
        return char::from(b);
    }
    let nth = (0..b).filter(|&x| !plain(x)).count() as u32;
    char::from_u32(256 + nth).unwrap()
}

/// A folder of its own for each test; removed when dropped.
pub struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn tokenizer(test: &str) -> (Tokenizer, ChatTemplate, Folder) {
    let dir = std::env::temp_dir().join(format!("phalanx-generate-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (byte_char(b).to_string(), json!(b))).collect();
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(IM_START, "<|im_start|>"), special(IM_END, "<|im_end|>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []},
    });
    let config = json!({"eos_token": "<|im_end|>", "chat_template": TEMPLATE});
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    let (template, _) = ChatTemplate::choose(&tokenizer, &DataOptions::default()).unwrap();
    (tokenizer, template, Folder(dir))
}

pub fn model(context: usize) -> (Model, Env) {
    let config = json!({"model_type": "llama", "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": context, "initializer_range": 0.2});
    let rt = Runtime::new(1);
    let model = Model::new(&ModelConfig::from_json("test", config).unwrap()).unwrap();
    initialise(&rt, &model, 5).unwrap();
    (model, Env::new(rt, Batch::causal(&[])))
}

pub fn generator<'m>(model: &'m Model, env: &Env) -> Generator<'m> {
    Generator::new(model, env, GeneratorOptions { max_batch: 2, ..GeneratorOptions::default() }).unwrap()
}
