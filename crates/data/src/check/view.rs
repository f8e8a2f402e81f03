//! A report for people: counts, findings, and examples with the trained tokens marked.

use std::fmt::Write;

use serde::Serialize;

use super::{DataReport, Severity};
use crate::encode::Example;
use crate::tokenizer::Tokenizer;

/// An example, token by token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExampleView {
    /// File and line of its record.
    pub place: String,
    /// Its tokens.
    pub tokens: Vec<TokenView>,
}

/// A token of an [`ExampleView`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenView {
    /// The id.
    pub id: u32,
    /// What it adds to the text; empty where a character needs the next token too.
    pub text: String,
    /// Whether its prediction counts in the loss.
    pub trained: bool,
}

impl ExampleView {
    pub(super) fn new(example: &Example, tokenizer: &Tokenizer, place: String) -> Self {
        let mut decoder = tokenizer.stream_decoder(false);
        let tokens = example.ids.iter().zip(&example.trained).map(|(id, trained)| TokenView {
            id: *id,
            text: decoder.push(*id).unwrap_or_default(),
            trained: *trained,
        });
        let mut tokens: Vec<TokenView> = tokens.collect();
        if let (Ok(rest), Some(last)) = (decoder.finish(), tokens.last_mut()) {
            last.text += &rest;
        }
        Self { place, tokens }
    }

    /// The text with trained parts green and the rest dim; without colour, trained parts stand in ⟦ ⟧.
    pub fn render(&self, color: bool) -> String {
        let (mut out, mut inside) = (String::new(), false);
        let (open, close) = if color { ("\x1b[0;32m", "\x1b[0;2m") } else { ("⟦", "⟧") };
        out.push_str(if color { "\x1b[2m" } else { "" });
        for token in &self.tokens {
            if token.trained != inside {
                out.push_str(if token.trained { open } else { close });
                inside = token.trained;
            }
            show(&mut out, &token.text);
        }
        match (color, inside) {
            (true, _) => out.push_str("\x1b[0m"),
            (false, true) => out.push_str(close),
            (false, false) => {}
        }
        out
    }
}

/// Data may hold anything; what would command the terminal is written out.
fn show(out: &mut String, text: &str) {
    for c in text.chars() {
        match c {
            '\n' => out.push_str("⏎\n"),
            '\t' => out.push(c),
            c if c.is_control() => {
                let _ = write!(out, "\\u{{{:x}}}", c as u32);
            }
            c => out.push(c),
        }
    }
}

impl DataReport {
    /// The report as text for a terminal.
    pub fn render(&self, color: bool) -> String {
        let paint = |code: &str, text: &str| if color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
        let mut out = String::new();
        if let Some(template) = &self.template {
            let _ = writeln!(out, "template     {template}");
        }
        let _ = writeln!(out, "stop tokens  {}", self.stop_tokens.join("  "));
        for set in &self.datasets {
            let s = &set.stats;
            let _ = writeln!(out, "\n{}  ({:?}, {})", paint("1", &set.name), set.format, set.files.join(", "));
            let _ = writeln!(out, "  records    {:>10}   examples   {:>10}", s.records, s.examples);
            let _ = writeln!(
                out,
                "  tokens     {:>10}   trained    {:>10}  ({:.1} %)",
                s.tokens,
                s.targets,
                100.0 * set.label_share
            );
            let [shortest, median, high, longest] = set.lengths;
            let _ = writeln!(
                out,
                "  length     shortest {shortest}, median {median}, 95 % up to {high}, longest {longest}"
            );
            for example in &set.examples {
                let _ = writeln!(out, "\n  {}", paint("4", &example.place));
                for line in example.render(color).lines() {
                    let _ = writeln!(out, "  | {line}");
                }
            }
        }
        let legend =
            if color { "\x1b[32mtrained\x1b[0m \x1b[2mnot trained\x1b[0m" } else { "⟦trained⟧ not trained" };
        let _ = writeln!(out, "\n{legend}\n");
        for finding in &self.findings {
            let word = match finding.severity {
                Severity::Error => paint("31;1", "error"),
                Severity::Warning => paint("33", "warning"),
                Severity::Note => paint("36", "note"),
            };
            let set = finding.dataset.as_deref().map_or(String::new(), |d| format!("{d}: "));
            let mut message = String::new();
            show(&mut message, &finding.message);
            let _ = writeln!(out, "{word}: {set}{message} [{}]", finding.kind);
        }
        let _ = writeln!(
            out,
            "{}",
            if self.ok { paint("32", "The data can be trained on.") } else { paint("31;1", "Training would stop.") }
        );
        out
    }
}
