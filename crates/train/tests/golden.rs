//! Numbers that `transformers` and PyTorch computed for tiny models of every family.

use phalanx_tensor::Runtime;
use phalanx_train::parity::verify;

fn check(case: &str) {
    let dir = format!("{}/../../testkit/fixtures/golden/{case}", env!("CARGO_MANIFEST_DIR"));
    let p = verify(&Runtime::new(2), dir).unwrap();
    assert!(p.pass, "{}", serde_json::to_string_pretty(&p).unwrap());
}

#[test]
fn llama_gqa() {
    check("llama-gqa");
}

#[test]
fn llama3_rope_tied() {
    check("llama3-rope-tied");
}

#[test]
fn qwen2_bias() {
    check("qwen2-bias");
}

#[test]
fn qwen3_qknorm() {
    check("qwen3-qknorm");
}

#[test]
fn mistral_window() {
    check("mistral-window");
}

#[test]
fn llama_yarn() {
    check("llama-yarn");
}

#[test]
fn llama_linear_rope_biases_gelu_and_wide_heads() {
    check("llama-linear-biases");
}

#[test]
fn qwen2_with_windows_on_some_blocks() {
    check("qwen2-some-windows");
}

#[test]
fn qwen3_moe() {
    check("qwen3-moe");
}

#[test]
fn deepseek_v3_mla() {
    check("deepseek-v3-mla");
}

#[test]
fn qwen3_moe_with_experts_in_some_blocks_and_weights_that_do_not_sum_to_one() {
    check("qwen3-moe-some-dense");
}

#[test]
fn deepseek_v3_with_yarn_whole_queries_biases_and_wide_values() {
    check("deepseek-v3-yarn");
}

#[test]
fn a_family_that_is_not_here_says_so() {
    let from = format!("{}/../../testkit/fixtures/golden/llama3-rope-tied", env!("CARGO_MANIFEST_DIR"));
    let dir = copy(&from, "unknown");
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
    std::fs::write(dir.join("config.json"), config.replace("\"llama\"", "\"lama\"")).unwrap();
    let e = verify(&Runtime::new(1), &dir).unwrap_err();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(phalanx_train::parity::is_unsupported(&e), "{e}");
    assert!(e.to_string().contains("qwen2") && e.to_string().contains("config.json"), "{e}");
}

fn copy(from: &str, name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("phalanx-golden-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    for e in std::fs::read_dir(from).unwrap() {
        let path = e.unwrap().path();
        std::fs::copy(&path, dir.join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// A value that is no number must fail, not be passed over by `max`.
#[test]
fn a_reference_that_is_not_a_number_fails() {
    let from = format!("{}/../../testkit/fixtures/golden/llama3-rope-tied", env!("CARGO_MANIFEST_DIR"));
    let dir = copy(&from, "nan");
    // The last tensor of expected.safetensors ends the file: make its last value NaN.
    let path = dir.join("expected.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let n = bytes.len();
    bytes[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let p = verify(&Runtime::new(1), &dir).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(!p.pass, "{}", serde_json::to_string(&p).unwrap());
}
