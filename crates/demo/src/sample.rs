//! Samples: what the model says now.

use std::ops::ControlFlow;
use std::path::Path;

use phalanx_config::Config;
use phalanx_data::Tokenizer;
use phalanx_generate::{GenerationDefaults, Generator, GeneratorOptions, Request, TextOptions, generate_text};
use phalanx_nn::{Batch, Env};
use phalanx_train::job::{Job, Use};

use crate::error::Result;

/// How every sample begins.
pub const PROMPT: &str = "Once upon a time";

/// Continues [`PROMPT`] with the weights that `job` holds, sampling as `generation_config.json` beside its tokenizer says. Gives
/// prompt and continuation.
///
/// # Errors
/// If the model has no weights yet, or memory runs out.
pub fn sample(job: &Job, tokenizer: &Tokenizer, seed: u64, max_new_tokens: usize) -> Result<String> {
    let defaults = GenerationDefaults::from_folder(&job.tokenizer_dir)?;
    let request = Request {
        prompt: tokenizer.encode_plain(PROMPT)?,
        max_new_tokens,
        sampling: defaults.sampling.params()?,
        stop_token_ids: tokenizer.stop_ids().to_vec(),
        seed,
    };
    let env = Env::new(job.rt.clone(), Batch::causal(&[]));
    let mut generator = Generator::new(&job.model, &env, GeneratorOptions::default())?;
    let mut silent = |_: usize, _: &str| Ok(ControlFlow::Continue(()));
    let done = generate_text(&mut generator, tokenizer, vec![request], &TextOptions::default(), &mut silent)?;
    Ok(done.first().map_or_else(String::new, |d| format!("{PROMPT}{}", d.text)))
}

/// Opens the model folder `dir` as anybody would, and samples from it.
///
/// # Errors
/// If the folder is not a sound model.
pub fn sample_folder(dir: &Path, threads: Option<usize>, seed: u64, max_new_tokens: usize) -> Result<String> {
    let mut config = Config::default();
    config.model.model_name_or_path = Some(dir.display().to_string());
    config.run.threads = threads;
    let mut job = Job::prepare(config, Use::Infer)?;
    let tokenizer = job.tokenizer()?;
    job.load(None)?;
    sample(&job, &tokenizer, seed, max_new_tokens)
}

/// A text as an indented block of lines of at most `width` characters. Bytes that a terminal would obey or not show become `·`:
/// an untrained model writes any.
pub fn block(text: &str, width: usize) -> String {
    let shown: String =
        text.chars().map(|c| if (c.is_control() && c != '\n') || c == '\u{fffd}' { '·' } else { c }).collect();
    let mut out = String::new();
    for paragraph in shown.lines() {
        let mut line = String::new();
        let mut end = |line: &mut String| {
            out += format!("  {line}").trim_end();
            out.push('\n');
            line.clear();
        };
        for word in paragraph.split(' ').filter(|w| !w.is_empty()) {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                end(&mut line);
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        end(&mut line);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_wraps_and_is_safe_to_print() {
        assert_eq!(block("one two three\n\nfour", 8), "  one two\n  three\n\n  four\n");
        assert_eq!(block("a\u{1b}[2Jb\u{fffd}\r", 80), "  a·[2Jb··\n");
        assert_eq!(block("averylongword x", 4), "  averylongword\n  x\n");
    }
}
