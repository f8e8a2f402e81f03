//! The binary `phalanx`: reads arguments, calls the crates, prints.
//!
//! Exit codes: 0 done; 1 failed or refused; 2 wrong arguments; 3 a model family that is not supported; 130 stopped by Ctrl-C,
//! 143 by SIGTERM, 129 by SIGHUP (everything saved, but for a second signal).

#![deny(clippy::print_stdout)]

mod args;
mod commands;
mod out;
mod outcome;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    match commands::run(cli) {
        Ok(outcome) => outcome.into(),
        // Who reads no further has what they wanted.
        Err(e) if e.downcast_ref::<out::OutError>().is_some_and(out::OutError::is_closed) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {}", outcome::chain(&*e));
            outcome::exit_code(&*e)
        }
    }
}
