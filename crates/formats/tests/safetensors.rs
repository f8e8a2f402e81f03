//! Reading and writing safetensors through the public API: what is right, and every way to be wrong.

mod common;

use std::fs;
use std::path::Path;

use common::Scratch;
use phalanx_formats::safetensors_folder::ADAPTER_STEM;
use phalanx_formats::{Dtype, FormatError, SafetensorsWriter, TensorSpec, WeightFolder};
use phalanx_testkit::values;
use proptest::prelude::*;

fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

fn specs() -> Vec<TensorSpec> {
    vec![
        TensorSpec::new("a.bf16", Dtype::BF16, [3, 5]),
        TensorSpec::new("b.f32", Dtype::F32, [7]),
        TensorSpec::new("c.f16", Dtype::F16, [2, 2, 2]),
        TensorSpec::new("d.scalar", Dtype::F32, []),
        TensorSpec::new("e.none", Dtype::F32, [0, 4]),
    ]
}

fn write(dir: &Path, writer: SafetensorsWriter) -> phalanx_formats::WrittenWeights {
    writer
        .write(dir, |spec, sink| {
            let v = values(spec.name.len() as u64, spec.num_elements());
            // In two pieces, as a caller that gathers would.
            let (x, y) = v.split_at(v.len() / 2);
            sink.write_f32(x)?;
            sink.write_f32(y)
        })
        .unwrap()
}

/// Opening `bytes` as a file must fail; the message is returned.
fn refused(bytes: &[u8]) -> String {
    let tmp = Scratch::new();
    let path = tmp.path().join("x.safetensors");
    fs::write(&path, bytes).unwrap();
    let message = WeightFolder::open_file(&path).unwrap_err().to_string();
    assert!(message.contains("x.safetensors"), "{message}");
    message
}

#[test]
fn one_file_round_trip() {
    let tmp = Scratch::new();
    let written = write(tmp.path(), SafetensorsWriter::new(specs()).unwrap().metadata("made_by", "test"));
    assert_eq!(written.files, [tmp.path().join("model.safetensors")]);
    assert_eq!((written.index, written.total_elements, written.total_bytes), (None, 31, 15 * 2 + 8 * 4 + 8 * 2));

    let w = WeightFolder::open(tmp.path()).unwrap();
    assert_eq!(w.names().collect::<Vec<_>>(), ["a.bf16", "b.f32", "c.f16", "d.scalar", "e.none"]);
    assert_eq!((w.total_bytes(), w.total_elements()), (78, 31));
    assert_eq!((w.metadata("format"), w.metadata("made_by")), (Some("pt"), Some("test")));
    let view = w.get("a.bf16").unwrap();
    assert_eq!((view.dtype, view.shape, view.bytes.len()), (Dtype::BF16, &[3usize, 5][..], 30));
    let want = values(6, 15);
    let mut got = vec![0f32; 15];
    w.read_f32("a.bf16", &mut got).unwrap();
    let rounded: Vec<f32> = want.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
    assert_eq!(got, rounded);
    // A part of a tensor, as a sharded loader reads it.
    let mut part = [0f32; 4];
    view.read_f32_at(9, &mut part).unwrap();
    assert_eq!(part, rounded[9..13]);
    assert!(matches!(view.read_f32_at(12, &mut part), Err(FormatError::WrongLength { expected: 15, got: 16, .. })));
    let mut narrow = vec![half::bf16::ZERO; 7];
    w.read_bf16("b.f32", &mut narrow).unwrap();
    assert_eq!(narrow[3], half::bf16::from_f32(values(5, 7)[3]));
    assert_eq!(w.get("d.scalar").unwrap().to_f32().unwrap(), values(8, 1));
    assert!(w.get("e.none").unwrap().to_f32().unwrap().is_empty());
}

#[test]
fn every_tensor_begins_at_a_multiple_of_its_element_size() {
    let tmp = Scratch::new();
    let odd = vec![TensorSpec::new("a", Dtype::BF16, [1]), TensorSpec::new("b", Dtype::F32, [1])];
    write(tmp.path(), SafetensorsWriter::new(odd).unwrap());
    let bytes = fs::read(tmp.path().join("model.safetensors")).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(header_len % 8, 0);
    let header = String::from_utf8(bytes[8..8 + header_len as usize].to_vec()).unwrap();
    assert!(header.contains(r#""b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#), "{header}");
}

#[test]
fn shards_and_index_as_transformers_writes_them() {
    let tmp = Scratch::new();
    let specs: Vec<_> = (0..5).map(|i| TensorSpec::new(format!("layer.{i}"), Dtype::F32, [10])).collect();
    let written = write(tmp.path(), SafetensorsWriter::new(specs).unwrap().max_shard_bytes(100));
    let names: Vec<_> = written.files.iter().map(|f| f.file_name().unwrap().to_str().unwrap()).collect();
    let third = "model-00003-of-00003.safetensors";
    assert_eq!(names, ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", third]);
    let index: serde_json::Value = serde_json::from_slice(&fs::read(written.index.unwrap()).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 200);
    assert_eq!(index["metadata"]["total_parameters"], 50);
    assert_eq!(index["weight_map"]["layer.4"], third);

    let w = WeightFolder::open(tmp.path()).unwrap();
    assert_eq!((w.len(), w.files().count()), (5, 3));
    assert_eq!(w.get("layer.2").unwrap().to_f32().unwrap(), values(7, 10));
}

#[test]
fn a_tied_head_is_written_once() {
    let tmp = Scratch::new();
    let specs = vec![
        TensorSpec::new("model.embed_tokens.weight", Dtype::F32, [4, 2]),
        TensorSpec::new("lm_head.weight", Dtype::F32, [4, 2]),
        TensorSpec::new("other", Dtype::F32, [4, 3]),
    ];
    let writer = SafetensorsWriter::new(specs).unwrap();
    assert!(writer.clone().tied("lm_head.weight", "other").is_err());
    assert!(writer.clone().tied("lm_head.weight", "nowhere").is_err());
    write(tmp.path(), writer.tied("lm_head.weight", "model.embed_tokens.weight").unwrap());
    let w = WeightFolder::open(tmp.path()).unwrap();
    assert_eq!(w.names().collect::<Vec<_>>(), ["model.embed_tokens.weight", "other"]);
}

#[test]
fn adapters_and_files_of_any_name() {
    let tmp = Scratch::new();
    write(tmp.path(), SafetensorsWriter::new(specs()).unwrap().stem(ADAPTER_STEM));
    assert_eq!(WeightFolder::open_stem(tmp.path(), ADAPTER_STEM).unwrap().len(), 5);
    let message = WeightFolder::open(tmp.path()).unwrap_err().to_string();
    assert!(message.contains("`adapter_model.safetensors` is there under another name"), "{message}");
}

#[test]
fn writer_refuses_contradictions() {
    let new = |specs| SafetensorsWriter::new(specs).unwrap_err().to_string();
    let t = |n: &str, s: &[usize]| TensorSpec::new(n, Dtype::F32, s);
    assert!(new(vec![t("a", &[1]), t("a", &[2])]).contains("`a` is in the list twice"));
    assert!(new(vec![t("__metadata__", &[1])]).contains("does not allow"));
    assert!(new(vec![t("a", &[usize::MAX, 2])]).contains("too large"));

    let tmp = Scratch::new();
    let writer = SafetensorsWriter::new(vec![t("a", &[3])]).unwrap();
    for n in [2, 4] {
        let e = writer.write(tmp.path(), |_, sink| sink.write_f32(&vec![0.0; n])).unwrap_err();
        assert!(matches!(e, FormatError::WrongLength { expected: 12, .. }), "{e}");
    }
    let ints = SafetensorsWriter::new(vec![TensorSpec::new("i", Dtype::I64, [1])]).unwrap();
    let e = ints.write(tmp.path(), |_, sink| sink.write_f32(&[1.0])).unwrap_err().to_string();
    assert!(e.contains("`i` is I64"), "{e}");
    assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 0, "nothing half-written may stay");
}

#[test]
fn malformed_files_are_explained() {
    assert!(refused(b"").contains("the file is empty"));
    assert!(refused(b"abc").contains("3 bytes are too few"));
    assert!(refused(&raw("{}", b"")[..7]).contains("too few"));
    let mut beyond = 1_000_000u64.to_le_bytes().to_vec();
    beyond.extend(b"{}");
    assert!(refused(&beyond).contains("the header's length (1000000 bytes) goes beyond the file (10 bytes)"));
    assert!(refused(&raw("{\"a\":", b"")).contains("not the JSON"));
    assert!(refused(&raw("\u{7f}", b"")).contains("not the JSON"));
    let tensor = |name: &str, ty: &str, n: usize, from: usize, to: usize| {
        format!(r#""{name}":{{"dtype":"{ty}","shape":[{n}],"data_offsets":[{from},{to}]}}"#)
    };
    let one = |t: String| format!("{{{t}}}");
    assert!(refused(&raw(&one(tensor("a", "F99", 1, 0, 4)), &[0; 4])).contains("F99"));
    assert!(refused(&raw(&one(tensor("a", "F32", 2, 0, 4)), &[0; 4])).contains("do not fit its number of bytes"));
    assert!(refused(&raw(&one(tensor("hole", "F32", 1, 4, 8)), &[0; 8])).contains("`hole` do not begin where"));
    let overlap = format!("{{{},{}}}", tensor("a", "F32", 2, 0, 8), tensor("b", "F32", 1, 4, 8));
    assert!(refused(&raw(&overlap, &[0; 8])).contains("do not begin where those before it end"));
    let huge = format!(r#"{{"a":{{"dtype":"F32","shape":[{0},{0}],"data_offsets":[0,4]}}}}"#, u64::MAX / 2);
    assert!(refused(&raw(&huge, &[0; 4])).contains("too large to be true"));
    let good = one(tensor("a", "F32", 2, 0, 8));
    let short = refused(&raw(&good, &[0; 5]));
    assert!(short.contains("truncated") && short.contains(&format!("asks for {} bytes", 16 + good.len())), "{short}");
    assert!(refused(&raw(&good, &[0; 9])).contains("too long"));
}

#[test]
fn index_and_shards_must_agree() {
    let tmp = Scratch::new();
    let dir = tmp.path();
    let index = dir.join("model.safetensors.index.json");
    let shard = |name: &str, tensors: &[&str]| {
        let specs = tensors.iter().map(|t| TensorSpec::new(*t, Dtype::F32, [1])).collect();
        let writer = SafetensorsWriter::new(specs).unwrap();
        writer.write_file(dir.join(name), |_, sink| sink.write_f32(&[1.0])).unwrap();
    };
    let fails = |map: &str| {
        fs::write(&index, map).unwrap();
        WeightFolder::open(dir).unwrap_err().to_string()
    };
    shard("s1.safetensors", &["a", "b"]);
    shard("s2.safetensors", &["c"]);
    let e = fails(r#"{"weight_map":{"a":"s1.safetensors","c":"s3.safetensors"}}"#);
    assert!(e.contains("names the shard `s3.safetensors` (for 1 tensors, e.g. `c`)"), "{e}");
    let e = fails(r#"{"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}}"#);
    assert!(e.contains("tensor `b` is in `s2.safetensors`, but it is not (it is in `s1.safetensors`)"), "{e}");
    let e = fails(r#"{"weight_map":{"a":"s1.safetensors","z":"s2.safetensors"}}"#);
    assert!(e.contains("tensor `z` is in `s2.safetensors`, but it is not;"), "{e}");
    for (bad, what) in [
        ("{", "not valid JSON"),
        ("[]", "no `weight_map`"),
        (r#"{"weight_map":{}}"#, "is empty"),
        (r#"{"weight_map":{"a":1}}"#, "`weight_map.a` is not a file name"),
        (r#"{"weight_map":{"a":"../s1.safetensors"}}"#, "not a plain file name"),
        (r#"{"weight_map":{"a":".."}}"#, "not a plain file name"),
    ] {
        let e = fails(bad);
        assert!(e.contains(what) && e.contains("index.json"), "{e}");
    }
    shard("s2.safetensors", &["c", "b"]);
    let e = fails(r#"{"weight_map":{"a":"s1.safetensors","c":"s2.safetensors"}}"#);
    assert!(e.contains("tensor `b` is both in") && e.contains("s1.safetensors"), "{e}");
}

#[test]
fn a_folder_without_weights_says_what_is_there() {
    let tmp = Scratch::new();
    let open = || WeightFolder::open(tmp.path()).unwrap_err().to_string();
    let e = open();
    assert!(e.contains("looked for model.safetensors, model.safetensors.index.json; the folder is empty"), "{e}");
    fs::write(tmp.path().join("m.Q4_0.gguf"), "x").unwrap();
    assert!(open().contains("phalanx import gguf m.Q4_0.gguf"));
    fs::write(tmp.path().join("pytorch_model.bin"), "x").unwrap();
    assert!(open().contains("only `pytorch_model.bin` is there"));
    let e = WeightFolder::open(tmp.path().join("nowhere")).unwrap_err().to_string();
    assert!(e.contains("nowhere") && e.contains("list the model folder"), "{e}");
}

#[test]
fn names_dtypes_and_nan_are_checked() {
    let tmp = Scratch::new();
    let specs = vec![TensorSpec::new("w", Dtype::F16, [2, 3]), TensorSpec::new("ids", Dtype::I64, [2])];
    let writer = SafetensorsWriter::new(specs).unwrap();
    writer
        .write(tmp.path(), |spec, sink| match spec.dtype {
            Dtype::I64 => sink.write_bytes(&[0; 16]),
            _ => sink.write_f32(&[0.0, 1.0, 2.0, 3.0, f32::NEG_INFINITY, f32::NAN]),
        })
        .unwrap();
    let w = WeightFolder::open(tmp.path()).unwrap();
    assert_eq!(w.first_non_finite("w").unwrap(), Some(4));
    let e = w.read_f32("ids", &mut [0.0; 2]).unwrap_err().to_string();
    assert!(e.contains("tensor `ids` is I64; only F32, BF16 and F16"), "{e}");
    let e = w.read_f32("w", &mut [0.0; 5]).unwrap_err().to_string();
    assert!(e.contains("`w` has 6 elements, the caller offered 5"), "{e}");
    let e = w.get("v").unwrap_err().to_string();
    assert!(e.contains("no tensor `v` (did you mean `w`?)"), "{e}");
    let e = w.check_names(&[("w".into(), vec![3, 2]), ("x".into(), vec![1])], &[]).unwrap_err().to_string();
    assert!(e.contains("1 missing") && e.contains("1 unexpected") && e.contains("needs [3, 2]"), "{e}");
}

/// A file with one tensor of each kind, written once for all cases.
fn sound_file() -> &'static [u8] {
    static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    BYTES.get_or_init(|| {
        let tmp = Scratch::new();
        write(tmp.path(), SafetensorsWriter::new(specs()).unwrap());
        fs::read(tmp.path().join("model.safetensors")).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the bytes, opening gives weights that can all be read, or an error; it never panics.
    #[test]
    fn malformed_bytes_never_panic(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let tmp = Scratch::new();
        let path = tmp.path().join("model.safetensors");
        let mut bytes = sound_file().to_vec();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(&path, bytes).unwrap();
        if let Ok(w) = WeightFolder::open(tmp.path()) {
            for view in w.tensors() {
                let _ = view.to_f32();
                let _ = view.first_non_finite();
            }
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), small_header in any::<bool>()) {
        let tmp = Scratch::new();
        let mut bytes = bytes;
        if small_header && bytes.len() >= 8 {
            bytes[1..8].fill(0);
        }
        let path = tmp.path().join("model.safetensors");
        fs::write(&path, bytes).unwrap();
        let _ = WeightFolder::open_file(&path);
    }
}
