//! Numbers that `transformers` and PyTorch computed for tiny models of every dense family.

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
fn a_family_that_is_not_here_says_so() {
    for case in ["qwen3-moe", "deepseek-v3-mla"] {
        let dir = format!("{}/../../testkit/fixtures/golden/{case}", env!("CARGO_MANIFEST_DIR"));
        let e = verify(&Runtime::new(1), dir).unwrap_err();
        assert!(phalanx_train::parity::is_unsupported(&e), "{e}");
        assert!(e.to_string().contains("qwen2") && e.to_string().contains("config.json"), "{e}");
    }
}
