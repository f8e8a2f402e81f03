//! The binary `phalanx`: reads arguments, calls the crates, prints.
//!
//! Exit codes: 0 done; 1 failed or refused; 2 wrong arguments; 3 a model family that is not supported; 130 stopped by Ctrl-C
//! (everything saved).

mod args;
mod commands;
mod outcome;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    match commands::run(cli) {
        Ok(outcome) => outcome.into(),
        Err(e) => {
            eprintln!("error: {}", outcome::chain(&*e));
            outcome::exit_code(&*e)
        }
    }
}
