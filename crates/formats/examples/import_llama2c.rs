//! Imports a llama2.c model into a Hugging Face folder:
//! `cargo run -p phalanx-formats --example import_llama2c MODEL.bin TOKENIZER.bin OUT`.

use phalanx_formats::{ImportOptions, llama2c};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, tokenizer, out] = args.as_slice() else {
        return Err("usage: import_llama2c MODEL.bin TOKENIZER.bin OUT_DIR".into());
    };
    let report = llama2c::import(model, tokenizer, out, ImportOptions::default(), &mut |_| {})?;
    println!("{report:#?}");
    Ok(())
}
