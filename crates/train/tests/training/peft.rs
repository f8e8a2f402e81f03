//! Folders that PEFT wrote, and its logits (`tests/fixtures/make_peft.py`).

use std::sync::Arc;

use phalanx_models::{Model, ModelConfig, load_weights, logits};
use phalanx_nn::{Arithmetic, Batch, Cx, Env};
use phalanx_tensor::{DType, Runtime};
use phalanx_testkit::assert_close;
use phalanx_train::adapter;

use crate::common::fixtures;

#[test]
fn base_and_adapter_give_pefts_logits() {
    for case in ["plain", "rslora_saved"] {
        let dir = fixtures().join("peft");
        let rt = Runtime::new(1);
        let m = Model::new(&ModelConfig::from_folder(dir.join("base")).unwrap()).unwrap();
        load_weights(&rt, &m, dir.join("base"), &|_| DType::F32).unwrap();
        let params = m.parameters();
        let shape = |n: &str| params.iter().find(|p| p.name() == n).map(|p| p.shape().to_vec());
        let loaded = adapter::load(&rt, &dir.join(case), &shape).unwrap();
        assert_eq!(loaded.adapters.by_path.len(), 6);
        assert_eq!(loaded.replaced.len(), usize::from(case == "rslora_saved"));
        for (name, values) in &loaded.replaced {
            let p = params.iter().find(|p| p.name() == name).unwrap();
            p.set(rt.from_f32(p.shape(), values, phalanx_tensor::Category::Weights).unwrap()).unwrap();
        }
        let text = std::fs::read_to_string(dir.join(case).join("expected.json")).unwrap();
        let want: serde_json::Value = serde_json::from_str(&text).unwrap();
        let ids: Vec<u32> = serde_json::from_value(want["ids"].clone()).unwrap();
        let want: Vec<f32> = serde_json::from_value(want["logits"].clone()).unwrap();
        let mut env = Env::new(rt.clone(), Batch::causal(&[ids.len()]));
        env.adapters = Arc::new(loaded.adapters);
        let hidden = m.hidden(&mut Cx::eval(&env), &ids.as_slice().into()).unwrap();
        let got = rt.to_vec(&logits(&rt, &m, &hidden, Arithmetic::F32).unwrap()).unwrap();
        assert_close(&got, &want, 1e-4, 1e-4, case);
        // Dropout is for training alone.
        env.adapters = Arc::default();
        let hidden = m.hidden(&mut Cx::eval(&env), &ids.as_slice().into()).unwrap();
        let base = rt.to_vec(&logits(&rt, &m, &hidden, Arithmetic::F32).unwrap()).unwrap();
        assert!(base.iter().zip(&want).any(|(a, b)| (a - b).abs() > 0.1));
    }
}

#[test]
fn what_peft_can_and_this_cannot_is_refused_by_name() {
    let scratch = crate::common::Scratch::new("peft");
    let from = fixtures().join("peft/plain");
    let text = std::fs::read_to_string(from.join("adapter_config.json")).unwrap();
    let weights = std::fs::read(from.join("adapter_model.safetensors")).unwrap();
    for (key, value, word) in [
        ("use_dora", "true", "use_dora"),
        ("peft_type", "\"IA3\"", "IA3"),
        ("bias", "\"all\"", "bias"),
        ("init_lora_weights", "\"pissa_niter_4\"", "changed the base model's weights"),
        ("init_lora_weights", "\"olora\"", "changed the base model's weights"),
        ("rank_pattern", "{\"q_proj\": 2}", "rank_pattern"),
        ("r", "8", "shape"),
        ("r", "0", "r: must be a whole number of at least 1"),
        ("use_rslora", "\"yes\"", "use_rslora: must be true or false"),
        ("layers_to_transform", "[0]", "layers_to_transform"),
    ] {
        let mut c: serde_json::Value = serde_json::from_str(&text).unwrap();
        c[key] = serde_json::from_str(value).unwrap();
        let dir = scratch.path(&format!("{key}-{}", value.len()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("adapter_config.json"), c.to_string()).unwrap();
        std::fs::write(dir.join("adapter_model.safetensors"), &weights).unwrap();
        let m = Model::new(&ModelConfig::from_folder(fixtures().join("peft/base")).unwrap()).unwrap();
        let shape = |n: &str| m.parameters().iter().find(|p| p.name() == n).map(|p| p.shape().to_vec());
        let e = adapter::load(&Runtime::new(1), &dir, &shape).map(|_| ()).unwrap_err().to_string();
        assert!(e.contains(word), "{key}: {e}");
        // Another model: the first layer that is not there is named.
        let e = adapter::load(&Runtime::new(1), &from, &|_| None).map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("another model"), "{e}");
    }
}

/// Writes adapters for PEFT to read: run with `-- --ignored for_peft_to_read --nocapture`, then
/// `python tests/fixtures/check_peft.py DIR` with the folder that it prints.
#[test]
#[ignore = "by hand: needs Python with peft to be of use"]
fn for_peft_to_read() {
    let out = std::env::temp_dir().join("phalanx-for-peft");
    println!("{}", out.display());
    let dir = fixtures().join("peft");
    let rt = Runtime::new(1);
    let m = Model::new(&ModelConfig::from_folder(dir.join("base")).unwrap()).unwrap();
    load_weights(&rt, &m, dir.join("base"), &|_| DType::F32).unwrap();
    let params = m.parameters();
    let shape = |n: &str| params.iter().find(|p| p.name() == n).map(|p| p.shape().to_vec());
    for case in ["plain", "rslora_saved"] {
        let loaded = adapter::load(&rt, &dir.join(case), &shape).unwrap();
        let saved: Vec<_> = loaded
            .replaced
            .iter()
            .map(|(n, v)| (params.iter().find(|p| p.name() == n).unwrap().clone(), v.clone()))
            .collect();
        let to = out.join(case);
        std::fs::create_dir_all(&to).unwrap();
        adapter::save(
            &rt,
            &to,
            &loaded.adapters,
            &loaded.options,
            &saved,
            &adapter::StandsOn { model: "base", merged: &[] },
            &m,
        )
        .unwrap();
    }
}
