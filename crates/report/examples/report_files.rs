//! Draws a made-up run into a folder: `cargo run -p phalanx-report --example report_files -- /tmp/demo`.

use std::path::PathBuf;

use phalanx_report::tensorboard::EventWriter;
use phalanx_report::{Entry, curve, metrics};

fn main() -> phalanx_report::Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "demo".into()));
    let mut events = EventWriter::create(&dir.join("runs"), 1.8e9, 1, None)?;
    let mut writer = metrics::MetricsWriter::create(dir.join("metrics.jsonl"))?;
    for step in (10..=3000).step_by(10) {
        let x = step as f64;
        // Some noise, no randomness needed.
        let noise = (x * 12.9898).sin() * 43758.5453 % 0.3;
        let loss = 4.2 * (-x / 350.0).exp() + 1.9 - 0.3 * (x / 3000.0) + noise + if step == 1400 { 9.0 } else { 0.0 };
        let mut entry =
            Entry::new(step, x / 1500.0).with("loss", loss).with("learning_rate", 3e-4 * (1.0 - x / 3000.0));
        if step % 300 == 0 {
            entry = entry.with("eval_loss", 4.2 * (-x / 350.0).exp() + 1.95 - 0.2 * (x / 3000.0));
        }
        events.entry(&entry, 1.8e9 + x)?;
        writer.write(&entry)?;
    }
    let entries = metrics::read(&dir.join("metrics.jsonl"))?;
    let curve = curve::Curve::from_entries("smollm2-135m, GSM8K, full", &entries);
    curve::write(&curve, &dir)?;
    println!("{}", curve::ascii(&curve, 72, 14));
    println!("{}", curve::sparkline(&curve.train.iter().map(|p| p.1).collect::<Vec<_>>(), 60));
    Ok(())
}
