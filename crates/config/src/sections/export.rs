//! A trained model as a Hugging Face folder (`phalanx export`).

use std::path::PathBuf;

use crate::schema::{choice, section};

choice! {
    /// The storage type of exported weights.
    pub enum ExportDtype {
        /// That of the model it started from.
        Auto = "auto",
        /// 32 bits.
        Float32 = "float32" | "fp32" | "f32",
        /// 16 bits, the exponent of f32.
        Bfloat16 = "bfloat16" | "bf16",
        /// 16 bits, IEEE half precision.
        Float16 = "float16" | "fp16" | "f16",
    }
}

section! {
    /// A trained model as a Hugging Face folder.
    pub struct ExportConfig, "export" {
        /// The folder to write.
        pub export_dir: Option<PathBuf> = None,
        /// Largest weight file, in GB (10^9 bytes).
        pub export_size: u64 = 5,
        /// `auto`, `float32`, `bfloat16` or `float16`.
        pub export_dtype: ExportDtype = ExportDtype::Auto,
    }
}
