//! GGUF in: values, names, row order and tokenizers against other people's code; every way a file can be wrong.

mod common;
#[path = "common/gguf_builder.rs"]
mod gguf_builder;
#[path = "common/score_bpe.rs"]
mod score_bpe;

use std::fs;
use std::path::{Path, PathBuf};

use common::Scratch;
use gguf_builder::Builder;
use phalanx_formats::convert::FloatType;
use phalanx_formats::gguf::{self, Array, GgmlType, GgufFile, Value, dequant::dequantize};
use phalanx_formats::{ImportOptions, ImportReport, Result, WeightFolder};
use score_bpe::ScoreBpe;
use serde_json::Value as Json;
use tokenizers::Tokenizer;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn json(path: impl AsRef<Path>) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn import(file: &Path, out: &Path, options: ImportOptions) -> Result<ImportReport> {
    gguf::import(file, out, options, &mut |_| {})
}

/// Imports the file that `builder` makes.
fn import_built(builder: &Builder) -> (Scratch, Result<ImportReport>) {
    let tmp = Scratch::new();
    let file = tmp.path().join("built.gguf");
    fs::write(&file, builder.build()).unwrap();
    let result = import(&file, &tmp.path().join("out"), ImportOptions::default());
    (tmp, result)
}

/// The import must fail, name the file, and leave nothing; the message is returned.
fn refused(builder: &Builder) -> String {
    let (tmp, result) = import_built(builder);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("built.gguf"), "{message}");
    assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 1, "only the source may be there");
    message
}

/// CRC-32 as zlib has it.
fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
    let mut crc = !0u32;
    for b in bytes {
        crc ^= u32::from(b);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[test]
fn blocks_widen_to_the_same_bits_as_gguf_py() {
    let w = WeightFolder::open_file(fixture("dequant.safetensors")).unwrap();
    let kinds = [
        (GgmlType::Q4_0, "Q4_0"),
        (GgmlType::Q4_1, "Q4_1"),
        (GgmlType::Q5_0, "Q5_0"),
        (GgmlType::Q5_1, "Q5_1"),
        (GgmlType::Q8_0, "Q8_0"),
        (GgmlType::Q4_K, "Q4_K"),
        (GgmlType::Q5_K, "Q5_K"),
        (GgmlType::Q6_K, "Q6_K"),
        (GgmlType::F16, "F16"),
        (GgmlType::Bf16, "BF16"),
    ];
    for (ty, name) in kinds {
        let blocks = w.get(&format!("{name}.blocks")).unwrap().bytes;
        let want = w.get(&format!("{name}.values")).unwrap().to_f32().unwrap();
        let mut got = vec![0f32; want.len()];
        dequantize(ty, blocks, &mut got);
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert_eq!(g.to_bits(), w.to_bits(), "{name} element {i}: {g} against {w}");
        }
        assert_eq!(ty.to_string(), name);
    }
}

fn check_tensors(folder: &Path, expected: &Json) {
    let w = WeightFolder::open(folder).unwrap();
    let expected = expected["tensors"].as_object().unwrap();
    assert_eq!(w.len(), expected.len());
    for (name, want) in expected {
        let view = w.get(name).unwrap();
        let shape: Vec<usize> = serde_json::from_value(want["shape"].clone()).unwrap();
        assert_eq!(view.shape, shape, "{name}");
        let values = view.to_f32().unwrap();
        let first: Vec<f32> = serde_json::from_value(want["first"].clone()).unwrap();
        assert_eq!(values[..3], first, "{name}");
        let crc = crc32(values.iter().flat_map(|v| v.to_le_bytes()));
        assert_eq!(u64::from(crc), want["crc32"].as_u64().unwrap(), "{name}");
    }
}

#[test]
fn llama_with_sentencepiece() {
    let tmp = Scratch::new();
    let out = tmp.path().join("model");
    let mut steps = Vec::new();
    let report = gguf::import(fixture("llama-spm.gguf"), &out, ImportOptions::default(), &mut |p| {
        steps.push((p.tensors_done, p.bytes_done, p.bytes));
    })
    .unwrap();
    check_tensors(&out, &json(fixture("llama-spm.expected.json")));
    assert_eq!((report.model_type.as_str(), report.tensors), ("llama", 21));
    assert_eq!(steps.len(), 21);
    assert_eq!(steps[20].1, report.bytes);
    assert_eq!(steps[20].1, steps[20].2);

    let config = json(out.join("config.json"));
    assert_eq!(config["rope_theta"], 50000.0);
    assert_eq!(config["rms_norm_eps"], 1e-6);
    assert_eq!((&config["num_key_value_heads"], &config["head_dim"]), (&2.into(), &8.into()));
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(json(out.join("generation_config.json"))["eos_token_id"], serde_json::json!([2, 290]));
    let tokenizer_config = json(out.join("tokenizer_config.json"));
    assert_eq!(tokenizer_config["bos_token"], "<s>");
    let template = fs::read_to_string(out.join("chat_template.jinja")).unwrap();
    assert_eq!(tokenizer_config["chat_template"], template.as_str());

    let file = GgufFile::open(fixture("llama-spm.gguf")).unwrap();
    let texts = file.opt_strings("tokenizer.ggml.tokens").unwrap().unwrap();
    let Some(Value::Array(Array::F32(scores))) = file.metadata().get("tokenizer.ggml.scores") else { panic!() };
    let reference = ScoreBpe::new(texts.iter().cloned().zip(scores.iter().copied()).collect());
    let tokenizer = Tokenizer::from_file(out.join("tokenizer.json")).unwrap();
    for text in ["", "the boat and the oat", "aaaa aaa baa", "thé  the \n 汉", "end, and."] {
        let got = tokenizer.encode(text, true).unwrap();
        assert_eq!(got.get_ids(), reference.encode(text), "{text:?}");
        assert_eq!(tokenizer.decode(got.get_ids(), true).unwrap(), text);
    }
    // The text after a special token gets its space, too, as in llama.cpp.
    let ids = tokenizer.encode("<|im_start|>the<|im_end|>", false).unwrap().get_ids().to_vec();
    assert_eq!(ids, [289, 261, 290]);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "<|im_start|> the", "user-defined tokens are not special");
}

#[test]
fn qwen3_with_byte_level_bpe() {
    let tmp = Scratch::new();
    let out = tmp.path().join("model");
    import(&fixture("qwen3-bpe.gguf"), &out, ImportOptions::default()).unwrap();
    let expected = json(fixture("qwen3-bpe.expected.json"));
    check_tensors(&out, &expected);
    let config = json(out.join("config.json"));
    assert_eq!(config["model_type"], "qwen3");
    assert_eq!((&config["head_dim"], &config["tie_word_embeddings"]), (&16.into(), &true.into()));
    assert_eq!(config["bos_token_id"], Json::Null);
    let scaling = serde_json::json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
    assert_eq!(config["rope_scaling"], scaling);

    let tokenizer = Tokenizer::from_file(out.join("tokenizer.json")).unwrap();
    let texts: Vec<String> = serde_json::from_value(expected["texts"].clone()).unwrap();
    let ids: Vec<Vec<u32>> = serde_json::from_value(expected["ids"].clone()).unwrap();
    for (text, want) in texts.iter().zip(ids) {
        let got = tokenizer.encode(text.as_str(), true).unwrap();
        assert_eq!(got.get_ids(), want, "{text:?}");
    }
    assert_eq!(tokenizer.token_to_id("[PAD330]"), None, "fillers are no tokens");
}

#[test]
fn other_types_shards_and_overwriting() {
    let tmp = Scratch::new();
    let out = tmp.path().join("model");
    let file = fixture("qwen3-bpe.gguf");
    let options = ImportOptions { dtype: FloatType::Bf16, max_shard_bytes: 30_000, ..ImportOptions::default() };
    let report = import(&file, &out, options).unwrap();
    assert_eq!(json(out.join("config.json"))["torch_dtype"], "bfloat16");
    let w = WeightFolder::open(&out).unwrap();
    assert_eq!((w.total_bytes(), w.total_elements() * 2), (report.bytes, report.bytes));
    assert!(w.files().count() > 1);

    let e = import(&file, &out, ImportOptions::default()).unwrap_err().to_string();
    assert!(e.contains("exists and is not empty"), "{e}");
    let overwrite = ImportOptions { dtype: FloatType::F16, overwrite: true, ..ImportOptions::default() };
    import(&file, &out, overwrite).unwrap();
    assert_eq!(WeightFolder::open(&out).unwrap().files().count(), 1, "old shards are gone");
    fs::write(out.join("thesis.docx"), "years of work").unwrap();
    let e = import(&file, &out, overwrite).unwrap_err().to_string();
    assert!(e.contains("thesis.docx: is not a model's file"), "{e}");
}

#[test]
fn what_is_not_supported_is_named() {
    let llama = Builder::tiny_llama;
    import_built(&llama()).1.unwrap();
    for (builder, what) in [
        (llama().text("general.architecture", "gemma3"), "architecture `gemma3`; llama"),
        (llama().u32("llama.expert_count", 8), "a mixture of experts"),
        (llama().u32("split.count", 3), "llama-gguf-split --merge"),
        (llama().u32("llama.rope.dimension_count", 2), "`llama.rope.dimension_count` is not the width of a head (4)"),
        (llama().text("llama.rope.scaling.type", "longrope"), "rope scaling `longrope`"),
        (llama().f32("llama.logit_scale", 2.0), "`llama.logit_scale`"),
        (llama().text("tokenizer.ggml.model", "t5"), "tokenizer model `t5`"),
        (llama().text("tokenizer.ggml.pre", "klingon"), "`tokenizer.ggml.pre` is `klingon`; supported: default"),
        (llama().tensor_of("x.weight", &[256], 11, vec![0; 110]), "`x.weight` is of type Q3_K; types that can be read"),
        (llama().tensor("blk.0.attn_qkv.weight", &[24, 8], 0.0), "1 unexpected:\n    blk.0.attn_qkv.weight"),
        (llama().tensor("rope_freqs.weight", &[2], 3.0), "not of Llama 3's scaling"),
    ] {
        let message = refused(&builder);
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn llama3_frequencies_become_rope_scaling() {
    // Heads of 4 have two frequencies; with this base the slow one has a wavelength of 628,319 positions.
    let divisors = [1f32, 8.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let b = Builder::tiny_llama().f32("llama.rope.freq_base", 1e10).tensor_of("rope_freqs.weight", &[2], 0, divisors);
    let (tmp, report) = import_built(&b);
    report.unwrap();
    let scaling = &json(tmp.path().join("out/config.json"))["rope_scaling"];
    assert_eq!((&scaling["rope_type"], &scaling["factor"]), (&"llama3".into(), &8.0.into()));
    assert_eq!(scaling["original_max_position_embeddings"], 8192);
    let wrong = Builder::tiny_llama().tensor("rope_freqs.weight", &[3], 1.0);
    assert!(refused(&wrong).contains("`rope_freqs.weight` has shape [3]"));
}

#[test]
fn metadata_that_makes_no_sense_is_named() {
    let llama = Builder::tiny_llama;
    for (builder, what) in [
        (llama().without("general.architecture"), "`general.architecture` is missing"),
        (llama().without("llama.embedding_length"), "`llama.embedding_length` is missing"),
        (llama().text("llama.embedding_length", "8"), "`llama.embedding_length` is not a whole number"),
        (llama().u32("llama.attention.head_count", 0), "`llama.attention.head_count` is 0"),
        (llama().u32("llama.attention.head_count_kv", 3), "does not divide the 2 heads"),
        (llama().u32("llama.attention.key_length", 3), "makes a head of 3"),
        (llama().u32("llama.block_count", u32::MAX), "`llama.block_count` is 4294967295"),
        (llama().u32("llama.block_count", 5), "36 missing"),
        (llama().u32("llama.embedding_length", 16), "with another shape"),
        (llama().u32("llama.feed_forward_length", 1 << 31), "is 2147483648"),
        (llama().u32("tokenizer.ggml.eos_token_id", 4), "is 4, but there are 4 tokens only"),
        (
            llama().texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<e>", "x"]),
            "5 tokens, but the embedding has 4 rows",
        ),
        (llama().texts("tokenizer.ggml.merges", &["ab"]), "holds `ab`, which is not two parts"),
        (llama().without("tokenizer.ggml.merges"), "`tokenizer.ggml.merges` is missing"),
        (llama().text("tokenizer.ggml.model", "llama"), "`tokenizer.ggml.scores` is missing"),
        (llama().u32("tokenizer.ggml.token_type", 1), "not a list"),
        (llama().tensor("blk.0.attn_q.bias", &[8], f32::NAN), "missing"),
    ] {
        let message = refused(&builder);
        assert!(message.contains(what), "{message}");
    }
    let mut nan = Builder::empty();
    nan = nan.tensor("a.weight", &[1], f32::NAN);
    assert!(refused(&nan).contains("`general.architecture` is missing"));
}

#[test]
fn damaged_values_are_found() {
    let llama = |v| Builder::tiny_llama().tensor("output.weight", &[4, 8], v);
    assert!(refused(&llama(f32::NAN)).contains("`output.weight` holds NaN or infinity"));
    assert!(refused(&llama(f32::NEG_INFINITY)).contains("`output.weight` holds NaN or infinity"));
    let tmp = Scratch::new();
    let file = tmp.path().join("big.gguf");
    fs::write(&file, llama(1e6).build()).unwrap();
    let out = tmp.path().join("out");
    let options = |dtype| ImportOptions { dtype, ..ImportOptions::default() };
    let e = import(&file, &out, options(FloatType::F16)).unwrap_err().to_string();
    assert!(e.contains("`output.weight` holds 1e6, which F16 cannot; import as BF16 or F32"), "{e}");
    import(&file, &out, options(FloatType::Bf16)).unwrap();
}

#[test]
fn broken_files_are_explained() {
    let with = |f: &dyn Fn(&mut Builder)| {
        let mut b = Builder::tiny_llama();
        f(&mut b);
        refused(&b)
    };
    assert!(with(&|b| b.magic = *b"PK\x03\x04").contains("not a GGUF file"));
    assert!(with(&|b| b.magic = *b"tjgg").contains("from before GGUF"));
    assert!(with(&|b| b.version = 1).contains("GGUF version 1; little-endian versions 2 and 3"));
    assert!(with(&|b| b.version = 3 << 24).contains("big-endian"));
    let e = Builder::empty;
    for (builder, what) in [
        (e().raw("k", 99, &[]), "`k` has the unknown type 99"),
        (e().raw("k", 8, &u64::MAX.to_le_bytes()), "truncated: the text of `k`"),
        (e().raw("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xFF]), "not UTF-8"),
        (e().raw("k", 9, &[[4u8, 0, 0, 0].as_slice(), &u64::MAX.to_le_bytes()].concat()), "truncated: the list `k`"),
        (e().raw("k", 9, &[9u8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0].repeat(9)), "`k` has the unknown type 9"),
        (e().u32("general.alignment", 3), "not a power of two"),
        (e().u32("general.alignment", 0), "not a power of two"),
        (e().tensor("t", &[1], 0.0).tensor("t", &[1], 0.0), "`t` occurs twice"),
        (e().tensor_of("t", &[1, 1, 1, 1, 1], 0, vec![0; 4]), "5 dimensions"),
        (e().tensor_of("t", &[u64::MAX, 2], 0, vec![0; 4]), "too large to be true"),
        (e().tensor_of("t", &[1 << 40, 1 << 20], 0, vec![0; 4]), "truncated"),
        (e().tensor_of("t", &[4, 16], 8, vec![0; 68]), "rows are not whole blocks"),
        (e().tensor_of("t", &[], 8, vec![0; 34]), "rows are not whole blocks"),
        (e().tensor_at("t", &[8], 0, vec![0; 32], 1 << 20), "truncated"),
        (e().tensor_at("t", &[8], 0, vec![0; 32], u64::MAX - 31), "too large to be true"),
        (e().tensor_at("t", &[8], 0, vec![0; 32], 4), "not aligned"),
    ] {
        let message = refused(&builder);
        assert!(message.contains(what), "{what}: {message}");
    }
}

#[test]
fn every_kind_of_value_is_read() {
    let list = |kind: u32, n: u64, bytes: &[u8]| [&kind.to_le_bytes()[..], &n.to_le_bytes(), bytes].concat();
    let b = Builder::empty()
        .raw("i8", 1, &[0xFF])
        .raw("u16", 2, &[1, 2])
        .raw("i64", 11, &(-5i64).to_le_bytes())
        .raw("f64", 12, &0.1f64.to_le_bytes())
        .raw("bool", 7, &[1])
        .raw("bools", 9, &list(7, 2, &[0, 1]))
        .raw("nested", 9, &list(9, 1, &list(0, 3, &[7, 8, 9])))
        .f32("f32", 1e-5)
        .u32("general.alignment", 64);
    let tmp = Scratch::new();
    let path = tmp.path().join("f.gguf");
    fs::write(&path, b.build()).unwrap();
    let f = GgufFile::open(&path).unwrap();
    assert_eq!(f.metadata()["i8"], Value::I8(-1));
    assert_eq!(f.metadata()["i64"], Value::I64(-5));
    assert_eq!(f.opt_usize("u16").unwrap(), Some(513));
    assert!(f.opt_usize("i64").is_err());
    assert_eq!((f.opt_f64("f64").unwrap(), f.opt_f64("f32").unwrap()), (Some(0.1), Some(1e-5)));
    assert_eq!(f.opt_bool("bool").unwrap(), Some(true));
    assert_eq!(f.metadata()["bools"], Value::Array(Array::Bool(vec![false, true])));
    assert_eq!(f.metadata()["nested"], Value::Array(Array::Array(vec![Array::U8(vec![7, 8, 9])])));
    assert_eq!(f.opt_str("none").unwrap(), None);
    assert!(f.tensors().is_empty());
}
