//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Train and run large models, Hugging Face files in, Hugging Face files out.
#[derive(Parser, Debug)]
#[command(name = "phalanx", version, about, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Compare with golden numbers.
    Verify {
        /// What to compare.
        #[command(subcommand)]
        what: Verify,
    },
    /// Measure speed.
    Bench {
        /// What to measure.
        #[command(subcommand)]
        what: Bench,
    },
    /// Report what this machine is and can do.
    Doctor {
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
        /// Threads for the measurements; all cores if left out.
        #[arg(long)]
        threads: Option<usize>,
    },
}

/// What `verify` compares.
#[derive(Subcommand, Debug)]
pub enum Verify {
    /// Logits, loss, gradients, eight training steps and a greedy continuation of golden folders.
    Parity {
        /// Golden folders.
        #[arg(required = true)]
        dirs: Vec<PathBuf>,
        /// One JSON line a folder.
        #[arg(long)]
        json: bool,
        /// Threads; all cores if left out.
        #[arg(long)]
        threads: Option<usize>,
    },
}

/// What `bench` measures.
#[derive(Subcommand, Debug)]
pub enum Bench {
    /// Whole training steps on random tokens.
    Train(BenchTrain),
}

/// Options of `bench train`.
#[derive(Args, Debug)]
pub struct BenchTrain {
    /// tiny-15m, smol-135m or qwen3-600m-4l.
    #[arg(long, default_value = "smol-135m")]
    pub shape: String,
    /// Sequences a step.
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
    /// Tokens a sequence.
    #[arg(long, default_value_t = 512)]
    pub seq: usize,
    /// Type that weights are computed with.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Steps before the measurement.
    #[arg(long, default_value_t = 2)]
    pub warmup: usize,
    /// Measured steps.
    #[arg(long, default_value_t = 6)]
    pub steps: usize,
    /// Recompute every block in backward.
    #[arg(long)]
    pub recompute: bool,
    /// One JSON line instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// A type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// float32
    F32,
    /// bfloat16
    Bf16,
}
