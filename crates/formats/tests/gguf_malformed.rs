//! No bytes make the GGUF reader or the importer panic, loop or take more memory than the file.

mod common;
#[path = "common/gguf_builder.rs"]
#[allow(dead_code, reason = "shared with tests that need more of it")]
mod gguf_builder;

use std::fs;
use std::path::Path;

use common::Scratch;
use gguf_builder::Builder;
use phalanx_formats::ImportOptions;
use phalanx_formats::gguf::{self, GgufFile, dequant::dequantize};
use proptest::prelude::*;
use proptest::sample::Index;

/// Reads all there is to read.
fn exercise(bytes: &[u8]) {
    let tmp = Scratch::new();
    let path = tmp.path().join("x.gguf");
    fs::write(&path, bytes).unwrap();
    let Ok(file) = GgufFile::open(&path) else { return };
    for tensor in file.tensors() {
        if let Ok(bytes) = file.bytes(tensor) {
            let mut out = vec![0f32; tensor.num_elements()];
            dequantize(tensor.ty, bytes, &mut out);
        }
    }
    let config = gguf::config::read(&file);
    let tokenizer = gguf::tokenizer::convert(&file);
    if config.is_ok() && tokenizer.is_ok() {
        let _ = gguf::import(&path, tmp.path().join("out"), ImportOptions::default(), &mut |_| {});
    }
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn damage(mut bytes: Vec<u8>, within: usize, flips: &[(Index, u8)], cut: Option<Index>) -> Vec<u8> {
    let within = within.min(bytes.len());
    for (at, value) in flips {
        bytes[at.index(within)] = *value;
    }
    if let Some(cut) = cut {
        bytes.truncate(cut.index(bytes.len()));
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(head in prop::bool::ANY, mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if head {
            let sound = Builder::tiny_llama().build();
            bytes.splice(0..0, sound[..24].iter().copied());
        }
        exercise(&bytes);
    }

    #[test]
    fn a_small_file_damaged_anywhere(
        flips in prop::collection::vec((any::<Index>(), prop_oneof![any::<u8>(), Just(0), Just(255)]), 1..5),
        cut in prop::option::weighted(0.3, any::<Index>()),
    ) {
        exercise(&damage(Builder::tiny_llama().build(), usize::MAX, &flips, cut));
    }

    #[test]
    fn a_real_file_damaged_in_its_metadata(
        spm in any::<bool>(),
        flips in prop::collection::vec((any::<Index>(), any::<u8>()), 0..8),
        cut in prop::option::weighted(0.3, any::<Index>()),
    ) {
        exercise(&damage(fixture(if spm { "llama-spm.gguf" } else { "qwen3-bpe.gguf" }), 16_000, &flips, cut));
    }
}
