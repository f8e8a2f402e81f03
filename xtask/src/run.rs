//! Running cargo: its output as text, a step that must succeed, the tests with their sum.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::Result;

/// The cargo that runs this program.
fn cargo() -> Command {
    #[expect(clippy::disallowed_methods, reason = "cargo tells its subcommands where it is in this way only")]
    let path = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(path);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    command
}

/// What `cargo args` prints.
pub fn output(args: &[&str]) -> Result<String> {
    let out = cargo().args(args).stderr(Stdio::inherit()).output().map_err(|e| format!("cannot run cargo: {e}"))?;
    if !out.status.success() {
        return Err(format!("`cargo {}` failed", args.join(" ")));
    }
    String::from_utf8(out.stdout).map_err(|e| format!("`cargo {}`: {e}", args.join(" ")))
}

/// Runs `cargo args` with its output on the screen.
pub fn step(name: &str, args: &[&str]) -> Result<()> {
    println!("{name}: cargo {}", args.join(" "));
    let status = cargo().args(args).status().map_err(|e| format!("cannot run cargo: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name}: `cargo {}` failed", args.join(" "))) }
}

/// Runs tests and adds up what the test runners of all crates say.
pub fn tests(args: &[&str]) -> Result<()> {
    println!("tests: cargo {}", args.join(" "));
    let mut child = cargo().args(args).stdout(Stdio::piped()).spawn().map_err(|e| format!("cannot run cargo: {e}"))?;
    let mut sum = Sum::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(|e| format!("cannot read the output of the tests: {e}"))?;
            println!("{line}");
            sum.add(&line);
        }
    }
    let status = child.wait().map_err(|e| format!("cannot wait for the tests: {e}"))?;
    println!(
        "tests: {} passed, {} failed, {} ignored, in {} programs",
        sum.passed, sum.failed, sum.ignored, sum.programs
    );
    if status.success() { Ok(()) } else { Err(format!("`cargo {}` failed", args.join(" "))) }
}

/// The lines `test result: ok. 10 passed; 0 failed; 1 ignored; ...`, added up.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sum {
    passed: usize,
    failed: usize,
    ignored: usize,
    programs: usize,
}

impl Sum {
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let count = |what: &str| {
            let part = result.split([';', '.']).map(str::trim).find(|part| part.ends_with(what));
            part.and_then(|part| part.split(' ').next()?.parse::<usize>().ok()).unwrap_or(0)
        };
        self.passed += count(" passed");
        self.failed += count(" failed");
        self.ignored += count(" ignored");
        self.programs += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums() {
        let mut sum = Sum::default();
        sum.add("running 3 tests");
        sum.add("test result: ok. 10 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.06s");
        sum.add("test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.06s");
        assert_eq!(sum, Sum { passed: 12, failed: 3, ignored: 1, programs: 2 });
    }
}
