//! GGUF, the single-file format of llama.cpp: reading it, and turning it into a Hugging Face folder.
//!
//! Many small models reach people only in this form. [`import()`] gives a folder that everything else here
//! (and `transformers`) loads: the quantised blocks are widened to F32, BF16 or F16, the tokenizer, the chat template
//! and the configuration are taken from the file's metadata. What quantisation lost stays lost; it is a trained start,
//! not the published checkpoint.
//!
//! Sources: the format, <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>; block layouts, `ggml-common.h` and
//! `ggml-quants.c` of ggml; names and row order, `convert_hf_to_gguf.py` of llama.cpp.

pub mod config;
pub mod dequant;
pub mod file;
mod import;
pub mod model;
pub mod pre_tokenizer;
pub mod tensor_names;
pub mod tokenizer;
pub mod value;

pub use dequant::GgmlType;
pub use file::{GgufFile, GgufTensor};
pub use import::import;
pub use model::GgufModel;
pub use value::{Array, Value};
