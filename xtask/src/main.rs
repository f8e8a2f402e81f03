//! What CI and people run on the workspace itself: `cargo xtask deps | files | licences | ci | nightly`.
//!
//! A check collects every fault before it fails, and each fault says how to mend it.

mod deps;
mod files;
mod licences;
mod metadata;
mod run;

use std::process::ExitCode;

/// Faults found by a check, one line each; empty when all is well.
type Faults = Vec<String>;

/// Anything that keeps a check from running at all.
type Result<T> = std::result::Result<T, String>;

const HELP: &str = "\
cargo xtask COMMAND

  deps      dependency arrows between crates point downwards only
  files     no source file passes 800 lines (a warning above 500)
  licences  licences of all locked packages; docs/dependencies.md; no C code; number of packages
  ci        formatting, lints, the three checks above, then all tests (what .ci/run calls)
  nightly   the long tests: lists them, then runs them in release mode
";

fn main() -> ExitCode {
    let command = std::env::args().nth(1).unwrap_or_default();
    let outcome = match command.as_str() {
        "deps" => check("deps"),
        "files" => check("files"),
        "licences" => check("licences"),
        "ci" => ci(),
        "nightly" => nightly(),
        "" | "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown command `{other}`\n\n{HELP}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one check and prints its faults.
fn check(name: &str) -> Result<()> {
    let faults = match name {
        "deps" => deps::check(&metadata::workspace()?),
        "files" => files::check(&metadata::root()?)?,
        _ => licences::check(&metadata::locked()?, &metadata::root()?)?,
    };
    if faults.is_empty() {
        println!("{name}: ok");
        return Ok(());
    }
    Err(format!("{name}: {} to mend\n  {}", faults.len(), faults.join("\n  ")))
}

/// Everything that must hold before a change is accepted. Cheap checks come first, and all of them run, so that one
/// round shows all that is wrong.
fn ci() -> Result<()> {
    let cheap = [
        run::step("format", &["fmt", "--all", "--check"]),
        check("deps"),
        check("files"),
        check("licences"),
        run::step("lints", &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]),
    ];
    let failures: Vec<String> = cheap.into_iter().filter_map(|outcome| outcome.err()).collect();
    if !failures.is_empty() {
        return Err(failures.join("\n"));
    }
    run::tests(&["test", "--workspace"])
}

fn nightly() -> Result<()> {
    run::step("long tests", &["test", "--workspace", "--release", "--", "--ignored", "--list"])?;
    run::tests(&["test", "--workspace", "--release", "--", "--ignored"])
}
