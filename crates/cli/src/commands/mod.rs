//! One file a verb.

mod bench;
mod chat;
mod configured;
mod data;
mod demo;
mod doctor;
mod draw;
mod eval;
mod export;
mod generate;
mod import;
mod model;
mod plan;
mod preparing;
mod report;
mod shell;
mod train;
mod tune;
mod verify;
mod watch;

pub use watch::exit_code_of_signal;

use phalanx_report::Style;
use phalanx_tensor::Runtime;

use crate::args::{Cli, Command};
use crate::outcome::{Outcome, Result};

/// Runs the command.
pub fn run(cli: Cli) -> Result<Outcome> {
    tune::install();
    match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Train(args) => train::run(&args.args),
        Command::Eval(args) => eval::run(&args.args),
        Command::Export(args) => export::run(&args.args),
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Import { what } => import::run(what),
        Command::Data { what } => data::run(what),
        Command::Plan { what } => plan::run(what),
        Command::Verify { what } => verify::run(what),
        Command::Bench { what } => bench::run(what),
        Command::Report(args) => report::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Doctor { json, threads } => doctor::run(json, threads),
    }
}

/// A runtime with the threads asked for, or one for each core.
fn runtime(threads: Option<usize>) -> Result<Runtime> {
    match threads {
        Some(0) => Err("--threads must be at least 1".into()),
        Some(n) => Ok(Runtime::try_new(n)?),
        None => Ok(Runtime::try_new(phalanx_report::System::read().threads)?),
    }
}

/// How text on standard output looks. The one place where the binary reads `NO_COLOR`.
#[expect(clippy::disallowed_methods, reason = "the one door for the environment")]
fn style() -> Style {
    Style::of(&std::io::stdout(), std::env::var("NO_COLOR").ok().as_deref())
}
