//! Imports a GGUF file into a Hugging Face folder: `cargo run -p phalanx-formats --example import FILE OUT [f32|bf16|f16]`.

use phalanx_formats::ImportOptions;
use phalanx_formats::convert::FloatType;
use phalanx_formats::gguf::import;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, out, rest @ ..] = args.as_slice() else {
        return Err("usage: import FILE.gguf OUT_DIR [f32|bf16|f16]".into());
    };
    let dtype = match rest.first().map(String::as_str) {
        None | Some("f32") => FloatType::F32,
        Some("bf16") => FloatType::Bf16,
        Some("f16") => FloatType::F16,
        Some(other) => return Err(format!("`{other}` is none of f32, bf16, f16").into()),
    };
    let options = ImportOptions { dtype, ..ImportOptions::default() };
    let report = import(file, out, options, &mut |p| {
        if p.tensors_done % 50 == 0 || p.tensors_done == p.tensors {
            println!("{}/{} tensors, {} of {} MB", p.tensors_done, p.tensors, p.bytes_done >> 20, p.bytes >> 20);
        }
    })?;
    println!("{report:#?}");
    Ok(())
}
