//! The command line.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use phalanx_parallel::Exactness;

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
    /// Train a small story teller from nothing in about two minutes: no model, no data, no download.
    Demo(Demo),
    /// Train a model as a configuration file says.
    #[command(after_help = "Example: phalanx train examples/lora.yaml learning_rate=1e-4 output_dir=out")]
    Train(Configured),
    /// Loss and perplexity of a model on evaluation data.
    Eval(Configured),
    /// Write a trained model (adapters merged) as a Hugging Face folder.
    #[command(
        after_help = "Example: phalanx export model_name_or_path=base adapter_name_or_path=out export_dir=merged"
    )]
    Export(Configured),
    /// Generate from prompts.
    Generate(Generate),
    /// Talk to a model.
    Chat(Chat),
    /// Make a model folder from a file of another program.
    Import {
        /// What kind of file.
        #[command(subcommand)]
        what: Import,
    },
    /// Look at training data.
    Data {
        /// What to do.
        #[command(subcommand)]
        what: Data,
    },
    /// Look at the plan of a configuration.
    Plan {
        /// What to do.
        #[command(subcommand)]
        what: Plan,
    },
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
    /// How the ranks of a run spent their time, and which of them keeps the others waiting.
    Report(Report),
    /// Find better block sizes for this machine's matrix products: faster, with the same bits.
    Tune(Tune),
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

/// Options of `report`.
#[derive(Args, Debug)]
pub struct Report {
    /// The run's output_dir.
    pub run: PathBuf,
    /// Look at so many of the last steps.
    #[arg(long, default_value_t = 100)]
    pub last: u64,
    /// One JSON line a rank.
    #[arg(long)]
    pub json: bool,
}

/// Options of `tune`.
#[derive(Args, Debug)]
pub struct Tune {
    /// Forget what was found.
    #[arg(long)]
    pub reset: bool,
    /// Milliseconds for each comparison; more on a busy machine.
    #[arg(long, default_value_t = 1000)]
    pub patience_ms: u64,
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// One JSON line a unit.
    #[arg(long)]
    pub json: bool,
}

/// Options of `demo`.
#[derive(Args, Debug)]
pub struct Demo {
    /// Folder to write.
    #[arg(long, visible_alias = "output_dir", default_value = "phalanx-demo")]
    pub output_dir: PathBuf,
    /// Train this many minutes: a few steps are timed first.
    #[arg(long, conflicts_with = "steps")]
    pub minutes: Option<f64>,
    /// Train this many steps.
    #[arg(long)]
    pub steps: Option<u64>,
    /// Seed of corpus, weights, order and samples.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Threads; all cores if left out. Changes nothing in the result.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Train a finished demo further.
    #[arg(long = "continue", conflicts_with = "overwrite")]
    pub go_on: bool,
    /// Start anew in the folder of another demo.
    #[arg(long)]
    pub overwrite: bool,
    /// JSON lines on standard output.
    #[arg(long)]
    pub json: bool,
}

/// A configuration file and overrides.
#[derive(Args, Debug)]
pub struct Configured {
    /// [CONFIG.yaml] [key=value]... [--json] [--plain]: a LlamaFactory-like YAML file, then keys that override it. `--json` prints JSON
    /// lines on standard output, `--plain` lines instead of a progress bar.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "CONFIG.yaml | key=value | --json"
    )]
    pub args: Vec<String>,
}

/// How tokens are chosen; what is left out comes from the model's generation_config.json.
#[derive(Args, Debug)]
pub struct Sampling {
    /// Most tokens to generate; if left out what the model folder says, else 256 (chat: 1024).
    #[arg(long)]
    pub max_new_tokens: Option<usize>,
    /// Always the likeliest token.
    #[arg(long)]
    pub greedy: bool,
    /// Above 1 flattens, below 1 sharpens; 0 is greedy. If left out what the model folder says, else greedy.
    #[arg(long, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Keep the k likeliest tokens; 0 keeps all. If left out what the model folder says, else 50.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Keep the likeliest tokens that make up this share. If left out what the model folder says, else 1.
    #[arg(long, allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Keep tokens at least this likely, as a share of the likeliest.
    #[arg(long, allow_negative_numbers = true)]
    pub min_p: Option<f64>,
    /// Divide the logits of tokens already seen; 1 is off.
    #[arg(long, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f64>,
    /// Texts that end an answer.
    #[arg(long)]
    pub stop: Vec<String>,
    /// Seed of the sampling.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Which model, and how it is held.
#[derive(Args, Debug)]
pub struct ModelChoice {
    /// A model folder, a GGUF file, or a configuration file that names one.
    pub model: PathBuf,
    /// PEFT adapter folder.
    #[arg(long)]
    pub adapter: Vec<PathBuf>,
    /// Type of the weights in memory; that of the files if left out.
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// How the weights are stored in memory; as in the file (a GGUF file's own blocks, a folder's exact values) if left out.
    #[arg(long, value_enum)]
    pub weights: Option<WeightForm>,
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// A built-in chat template instead of the model's own.
    #[arg(long)]
    pub template: Option<String>,
}

/// Options of `generate`.
#[derive(Args, Debug)]
pub struct Generate {
    /// Which model.
    #[command(flatten)]
    pub model: ModelChoice,
    /// A prompt; several are generated together.
    #[arg(long, short)]
    pub prompt: Vec<String>,
    /// A file with one prompt a line.
    #[arg(long)]
    pub prompt_file: Option<PathBuf>,
    /// Put each prompt into the chat template as a user's message.
    #[arg(long)]
    pub chat: bool,
    /// System message, with --chat.
    #[arg(long, requires = "chat")]
    pub system: Option<String>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: Sampling,
    /// Sequences under way at once.
    #[arg(long, default_value_t = 16)]
    pub max_batch: usize,
    /// One JSON line a prompt: text, token ids, log-probabilities, finish reason.
    #[arg(long)]
    pub json: bool,
}

/// Options of `chat`.
#[derive(Args, Debug)]
pub struct Chat {
    /// Which model.
    #[command(flatten)]
    pub model: ModelChoice,
    /// System message.
    #[arg(long)]
    pub system: Option<String>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: Sampling,
}

/// What `import` reads.
#[derive(Subcommand, Debug)]
pub enum Import {
    /// A GGUF file (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K).
    Gguf {
        /// The file.
        file: PathBuf,
        /// The folder to write.
        out: PathBuf,
        /// How it is written.
        #[command(flatten)]
        options: ImportOptions,
    },
    /// A llama2.c checkpoint with its tokenizer.
    Llama2c {
        /// The model file (`.bin`).
        file: PathBuf,
        /// The tokenizer file (`tok*.bin`).
        tokenizer: PathBuf,
        /// The folder to write.
        out: PathBuf,
        /// How it is written.
        #[command(flatten)]
        options: ImportOptions,
    },
}

/// How an imported model is written.
#[derive(Args, Debug)]
pub struct ImportOptions {
    /// Type of the stored weights.
    #[arg(long, value_enum, default_value_t = Stored::F32)]
    pub dtype: Stored,
    /// Replace a model that is already there.
    #[arg(long)]
    pub overwrite: bool,
    /// One JSON object instead of sentences.
    #[arg(long)]
    pub json: bool,
}

/// A type of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stored {
    /// float32
    F32,
    /// bfloat16
    Bf16,
    /// float16
    F16,
}

/// What `data` does.
#[derive(Subcommand, Debug)]
pub enum Data {
    /// Show what is trained on, token by token, and what is wrong with the data.
    Check(Configured),
}

/// What `plan` does.
#[derive(Subcommand, Debug)]
pub enum Plan {
    /// The resolved plan, module by module.
    Show(Configured),
    /// Draw a pipeline schedule: who computes what when, how long ranks wait, what they hold.
    #[command(after_help = "Example: phalanx plan draw --schedule 1f1b --ranks 4 --micro-batches 8 --svg 1f1b.svg")]
    Draw(Draw),
}

/// Options of `plan draw`. Times are in any one unit.
#[derive(Args, Debug)]
pub struct Draw {
    /// gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipev.
    #[arg(long, default_value = "1f1b")]
    pub schedule: String,
    /// Pipeline ranks.
    #[arg(long, default_value_t = 4)]
    pub ranks: usize,
    /// Micro-batches a step.
    #[arg(long, default_value_t = 8)]
    pub micro_batches: usize,
    /// Stages a rank, for interleaved (2 if left out); the others fix it.
    #[arg(long)]
    pub chunks: Option<usize>,
    /// Time of a stage's forward.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub forward: f64,
    /// Time of a stage's gradient of its input.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub input_grad: f64,
    /// Time of a stage's gradient of its weights.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub weight_grad: f64,
    /// Time of an overlapped forward and backward (dualpipev); their sum if left out.
    #[arg(long, allow_negative_numbers = true)]
    pub overlapped: Option<f64>,
    /// Time of a message between ranks.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub latency: f64,
    /// Layers of each stage, such as "Et*3|t*4|t*4|t*3L"; times above are then those of a layer.
    #[arg(long)]
    pub layout: Option<String>,
    /// Columns of the terminal; what does not fit is drawn smaller.
    #[arg(long, default_value_t = 120)]
    pub width: usize,
    /// Write a picture to this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// One JSON object instead of a drawing.
    #[arg(long)]
    pub json: bool,
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
    /// Low-precision recipes against exact training of a small model on a text.
    Precision(Precision),
    /// Every layout of a model over ranks against one rank.
    Layouts(Layouts),
}

/// Options of `verify layouts`.
#[derive(Args, Debug)]
pub struct Layouts {
    /// A model folder or a config.json; its weights are not read. Tiny models, dense and with experts, if left out.
    pub config: Option<PathBuf>,
    /// Layouts of at most so many ranks; each is a thread.
    #[arg(long, default_value_t = 8)]
    pub ranks: usize,
    /// Only layouts with this in their name.
    #[arg(long, default_value = "")]
    pub only: String,
    /// One JSON line a layout.
    #[arg(long)]
    pub json: bool,
}

/// Options of `verify precision`.
#[derive(Args, Debug)]
pub struct Precision {
    /// A text of some hundred kilobytes or more; it is read as bytes.
    pub text: PathBuf,
    /// Recipes; all if left out.
    #[arg(long, value_parser = exactness(), value_delimiter = ',')]
    pub recipes: Vec<Exactness>,
    /// Optimizer steps.
    #[arg(long, default_value_t = 500)]
    pub steps: usize,
    /// Seeds of the weights.
    #[arg(long, default_value_t = 3)]
    pub seeds: usize,
    /// Sequences a step.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
    /// Bytes a sequence.
    #[arg(long, default_value_t = 256)]
    pub seq: usize,
    /// Peak of the learning rate.
    #[arg(long, default_value_t = 1e-3)]
    pub lr: f64,
    /// One JSON line for a recipe and a seed.
    #[arg(long)]
    pub json: bool,
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
}

/// What `bench` measures.
#[derive(Subcommand, Debug)]
pub enum Bench {
    /// Whole training steps on random tokens.
    Train(BenchTrain),
    /// Matrix products of a transformer step.
    Gemm(BenchGemm),
    /// Attention, forward and backward.
    Attention(BenchAttention),
    /// Generation with a model.
    Decode(BenchDecode),
}

/// Whether a bench shows what its kernels took.
#[derive(Args, Debug)]
pub struct Profiling {
    /// Show what each kernel took: time, share, rate, fraction of the roofline (with --json one line a kernel).
    #[arg(long)]
    pub profile: bool,
    /// Write a trace that https://ui.perfetto.dev and chrome://tracing open.
    #[arg(long, value_name = "FILE", requires = "profile")]
    pub trace: Option<PathBuf>,
}

/// Options of `bench gemm`.
#[derive(Args, Debug)]
pub struct BenchGemm {
    /// Only shapes whose name has all of these in it, such as `decode` or `2048`.
    pub filter: Vec<String>,
    /// Type of both operands.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    pub dtype: Dtype,
    /// How exact the products must be.
    #[arg(long, value_parser = exactness(), default_value_t = Exactness::F32)]
    pub arithmetic: Exactness,
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// What the kernels took.
    #[command(flatten)]
    pub profiling: Profiling,
    /// One JSON line a shape.
    #[arg(long)]
    pub json: bool,
}

/// Options of `bench attention`.
#[derive(Args, Debug)]
pub struct BenchAttention {
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// What the kernels took.
    #[command(flatten)]
    pub profiling: Profiling,
    /// One JSON line a shape and pass.
    #[arg(long)]
    pub json: bool,
}

/// Options of `bench decode`.
#[derive(Args, Debug)]
pub struct BenchDecode {
    #[command(flatten)]
    pub model: ModelChoice,
    /// Sequences at once; several times for several (1, 4 and 16 if left out).
    #[arg(long)]
    pub batch: Vec<usize>,
    /// Tokens each sequence makes.
    #[arg(long, default_value_t = 64)]
    pub tokens: usize,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// What the kernels took.
    #[command(flatten)]
    pub profiling: Profiling,
    /// One JSON line a batch.
    #[arg(long)]
    pub json: bool,
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
    /// How exact the products of linear layers must be; if left out, as the type of the weights says.
    #[arg(long, value_parser = exactness())]
    pub arithmetic: Option<Exactness>,
    /// Ranks, threads of this process that share the cores: parameters are sharded over them, unless --plan says otherwise.
    #[arg(long, default_value_t = 1, conflicts_with = "profile")]
    pub ranks: usize,
    /// A YAML file with `mesh:` and `plan:`.
    #[arg(long)]
    pub plan: Option<PathBuf>,
    /// Micro-batches that a rank's sequences are cut into.
    #[arg(long, default_value_t = 1)]
    pub micro_batches: usize,
    /// What the kernels took.
    #[command(flatten)]
    pub profiling: Profiling,
    /// One JSON line instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// How weights are stored for generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightForm {
    /// Every value as it is, in the type of --dtype
    Exact,
    /// 8 bits, with a scale for 32 values
    Q8,
    /// 4 bits, with a scale and a minimum for 32 values
    Q4,
}

impl From<WeightForm> for phalanx_models::WeightForm {
    fn from(form: WeightForm) -> Self {
        use phalanx_kernels::gemm::prepared::Form;
        match form {
            WeightForm::Exact => Self::Exact,
            WeightForm::Q8 => Self::Rounded(Form::Q8),
            WeightForm::Q4 => Self::Rounded(Form::Q4),
        }
    }
}

/// Names of a plan's `arithmetic`.
fn exactness() -> impl TypedValueParser<Value = Exactness> {
    PossibleValuesParser::new(Exactness::ALL.map(Exactness::name)).try_map(|name| name.parse::<Exactness>())
}

/// A type of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// float32
    F32,
    /// bfloat16
    Bf16,
}
