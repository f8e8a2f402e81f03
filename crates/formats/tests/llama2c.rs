//! llama2.c models in: the layout of the file, and token ids as its own encoder gives them.

mod common;
#[path = "common/score_bpe.rs"]
mod score_bpe;

use std::fs;
use std::path::{Path, PathBuf};

use common::Scratch;
use phalanx_formats::{ImportOptions, ImportReport, Result, WeightFolder, llama2c};
use score_bpe::ScoreBpe;
use tokenizers::Tokenizer;

/// dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
const TINY: [i32; 7] = [8, 12, 2, 2, 1, 512, 4];

fn tokenizer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tok512.bin")
}

/// A file whose f32 number `i` is `i`.
fn model(header: [i32; 7], floats: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = header.iter().flat_map(|n| n.to_le_bytes()).collect();
    bytes.extend((0..floats).flat_map(|i| (i as f32).to_le_bytes()));
    bytes
}

/// Numbers of a file with `TINY`'s sizes, without an output matrix.
const FLOATS: usize = 512 * 8 + 2 * (8 + 64 + 32 + 32 + 64 + 8 + 3 * 96) + 8 + 4 * 4;

fn import(bytes: &[u8], tokenizer: &Path) -> (Scratch, Result<ImportReport>) {
    let tmp = Scratch::new();
    let file = tmp.path().join("m.bin");
    fs::write(&file, bytes).unwrap();
    let result = llama2c::import(&file, tokenizer, tmp.path().join("out"), ImportOptions::default(), &mut |_| {});
    (tmp, result)
}

#[test]
fn every_tensor_comes_from_its_place() {
    let (tmp, report) = import(&model(TINY, FLOATS), &tokenizer());
    assert_eq!(report.unwrap().parameters as usize, FLOATS - 16);
    let w = WeightFolder::open(tmp.path().join("out")).unwrap();
    let first = |name: &str| w.get(name).unwrap().to_f32().unwrap()[0];
    let per_layer = 512 * 8;
    assert_eq!(first("model.embed_tokens.weight"), 0.0);
    assert_eq!(first("model.layers.1.input_layernorm.weight"), (per_layer + 8) as f32);
    let wq = per_layer + 2 * 8;
    assert_eq!(first("model.layers.0.self_attn.q_proj.weight"), wq as f32);
    let wk = wq + 2 * 64;
    let wv = wk + 2 * 32;
    assert_eq!(first("model.layers.1.self_attn.v_proj.weight"), (wv + 32) as f32);
    let wo = wv + 2 * 32;
    assert_eq!(first("model.layers.1.self_attn.o_proj.weight"), (wo + 64) as f32);
    let w1 = wo + 2 * 64 + 2 * 8;
    assert_eq!(first("model.layers.0.mlp.gate_proj.weight"), w1 as f32);
    // w2 is the way down, w3 the other way up.
    assert_eq!(first("model.layers.1.mlp.down_proj.weight"), (w1 + 2 * 96 + 96) as f32);
    assert_eq!(first("model.layers.0.mlp.up_proj.weight"), (w1 + 4 * 96) as f32);
    assert_eq!(first("model.norm.weight"), (w1 + 6 * 96) as f32);
    assert!(!w.contains("lm_head.weight"));
    // Query rows of a head of 4: pairs (0 1) (2 3) become halves (0 2) (1 3).
    let q = w.get("model.layers.0.self_attn.q_proj.weight").unwrap().to_f32().unwrap();
    let rows: Vec<usize> = q.chunks(8).map(|r| (r[0] as usize - wq) / 8).collect();
    assert_eq!(rows, [0, 2, 1, 3, 4, 6, 5, 7]);
}

#[test]
fn an_output_matrix_of_its_own() {
    let mut header = TINY;
    header[5] = -512;
    let (tmp, report) = import(&model(header, FLOATS + 512 * 8), &tokenizer());
    report.unwrap();
    let w = WeightFolder::open(tmp.path().join("out")).unwrap();
    assert_eq!(w.get("lm_head.weight").unwrap().to_f32().unwrap()[0], FLOATS as f32);
}

#[test]
fn ids_are_those_of_its_own_encoder() {
    let (tmp, report) = import(&model(TINY, FLOATS), &tokenizer());
    report.unwrap();
    let ours = Tokenizer::from_file(tmp.path().join("out/tokenizer.json")).unwrap();
    let bytes = fs::read(tokenizer()).unwrap();
    let mut rest = &bytes[4..];
    let mut pieces = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<8>() {
        let score = f32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let (text, after) = after.split_at(head[4] as usize);
        pieces.push((String::from_utf8(text.to_vec()).unwrap().replace(' ', "\u{2581}"), score));
        rest = after;
    }
    let reference = ScoreBpe::new(pieces);
    let story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, \
                 she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, \
                 let's go to the park.\" Zig-zag & 100% ñandú – 汉字 😀\t\n\n  end ";
    for text in [story, "", " ", "   ", "hehehe the the", "aaaaaaa", "\n"] {
        let got = ours.encode(text, true).unwrap();
        assert_eq!(got.get_ids(), reference.encode(text), "{text:?}");
        assert_eq!(ours.decode(got.get_ids(), true).unwrap(), text);
    }
    assert_eq!(ours.encode("Once upon a time", true).unwrap().get_ids(), [1, 403, 407, 261, 378]);
}

#[test]
fn wrong_files_are_explained() {
    let fails = |bytes: &[u8], tokenizer: &Path| {
        let (tmp, result) = import(bytes, tokenizer);
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 1, "only the source may be there");
        result.unwrap_err().to_string()
    };
    let sound = model(TINY, FLOATS);
    assert!(fails(&sound[..sound.len() - 4], &tokenizer()).contains("truncated"));
    assert!(fails(&model(TINY, FLOATS + 1), &tokenizer()).contains("too long"));
    assert!(fails(&sound[..20], &tokenizer()).contains("too few for a header"));
    assert!(fails(b"24ka0000000000000000000000000000", &tokenizer()).contains("export.py --version 0"));
    let with = |at: usize, n: i32| {
        let mut header = TINY;
        header[at] = n;
        fails(&model(header, FLOATS), &tokenizer())
    };
    assert!(with(0, -8).contains("dim is -8"));
    assert!(with(2, 0).contains("n_layers is 0"));
    assert!(with(3, 3).contains("do not go together"));
    assert!(with(2, 1 << 30).contains("truncated"));
    assert!(with(5, i32::MIN).contains("vocab_size is"));
    let mut nan = sound.clone();
    nan[28..32].copy_from_slice(&f32::NAN.to_le_bytes());
    assert!(fails(&nan, &tokenizer()).contains("`model.embed_tokens.weight` hold NaN"));

    let tmp = Scratch::new();
    let other = tmp.path().join("t.bin");
    let bytes = fs::read(tokenizer()).unwrap();
    fs::write(&other, &bytes[..500]).unwrap();
    assert!(fails(&sound, &other).contains("t.bin: ends within token"));
    fs::write(&other, [&bytes[..], &[0; 9]].concat()).unwrap();
    assert!(fails(&sound, &other).contains("holds more than the 512 tokens"));
    fs::write(&other, [&bytes[..8], &(-1i32).to_le_bytes(), &bytes[12..]].concat()).unwrap();
    assert!(fails(&sound, &other).contains("token 0 has the length -1"));
}
