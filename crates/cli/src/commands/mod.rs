//! One file a verb.

mod bench;
mod doctor;
mod verify;

use phalanx_tensor::Runtime;

use crate::args::{Cli, Command};
use crate::outcome::{Outcome, Result};

/// Runs the command.
pub fn run(cli: Cli) -> Result<Outcome> {
    match cli.command {
        Command::Verify { what } => verify::run(what),
        Command::Bench { what } => bench::run(what),
        Command::Doctor { json, threads } => doctor::run(json, threads),
    }
}

/// A runtime with the threads asked for, or one for each core.
fn runtime(threads: Option<usize>) -> Result<Runtime> {
    match threads {
        Some(0) => Err("--threads must be at least 1".into()),
        Some(n) => Ok(Runtime::new(n)),
        None => Ok(Runtime::new(phalanx_report::System::read().threads)),
    }
}
