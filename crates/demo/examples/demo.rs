//! The demo without the command line: `cargo run --release -p phalanx-demo --example demo [DIR [STEPS]] [key=value]...`

use std::sync::atomic::AtomicBool;

use phalanx_demo::{Existing, Observer, Options};

struct Print;

impl phalanx_train::trainer::Observer for Print {
    fn message(&mut self, text: &str) {
        println!("{text}");
    }
    fn step(&mut self, step: &phalanx_report::Step, logged: bool) {
        if logged && (step.step.is_multiple_of(50) || step.step < 50) {
            println!("{}", step.plain());
        }
    }
}

impl Observer for Print {}

fn main() -> phalanx_demo::Result<()> {
    let mut options = Options { existing: Existing::Overwrite, ..Options::default() };
    let (keys, plain): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|a| a.contains('='));
    if let Some(dir) = plain.first() {
        options.output_dir = dir.into();
    }
    options.steps = plain.get(1).and_then(|s| s.parse().ok());
    for key in &keys {
        if let Some((name, value)) = key.split_once('=') {
            let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
            options.changes.set(name.to_owned(), value);
        }
    }
    let outcome = phalanx_demo::run(&options, &AtomicBool::new(false), &mut Print)?;
    println!(
        "\n{} tokens, {:.1} s, loss {:?} -> {:?}, evaluation {:?}",
        outcome.tokens, outcome.seconds, outcome.first_loss, outcome.last_loss, outcome.eval_loss
    );
    Ok(())
}
