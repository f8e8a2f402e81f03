//! The reference page of all keys, `docs/config.md`: written from the declarations, so it cannot be wrong.

use std::fmt::Write;

use crate::config::Config;
use crate::foreign::{ALIASES, FAMILIES, HARMLESS, UNSUPPORTED};

const HEAD: &str = "\
# Configuration keys

A run is described by one flat YAML (or JSON) file. Keys, meanings and defaults are LlamaFactory's wherever it has them.
On the command line, `key=value` or `--key value` wins over the file; `key=` goes back to the default; a dot reaches into
a map (`lr_scheduler_kwargs.min_lr=1e-6`). Paths are relative to the working directory.

This page is written by `cargo run -p phalanx-config --example config_page > docs/config.md`; a test compares the two.
";

/// `docs/config.md` as Markdown.
pub fn reference_page() -> String {
    let mut page = HEAD.to_owned();
    let mut section = "";
    for key in Config::keys() {
        if key.section != section {
            section = key.section;
            line(&mut page, format_args!("\n## {section}\n\n| key | default | what it is |\n|---|---|---|"));
        }
        let doc = key.doc.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        let default = match &key.default {
            serde_json::Value::Null => String::new(),
            value => format!("`{value}`"),
        };
        line(&mut page, format_args!("| `{}` | {default} | {} |", key.key, cell(doc.trim())));
    }
    line(&mut page, format_args!("\n## Other spellings\n"));
    for (alias, name) in ALIASES {
        line(&mut page, format_args!("- `{alias}` is `{name}`"));
    }
    let about =
        "Refused unless they hold the value in the second column (null is always fine): they would change the result.";
    line(&mut page, format_args!("\n## LlamaFactory's keys that are not supported\n\n{about}\n"));
    line(&mut page, format_args!("| key | accepted | instead |\n|---|---|---|"));
    for u in UNSUPPORTED {
        let accepted: Vec<_> = u.neutral.iter().filter(|n| !n.is_empty()).map(|n| format!("`{n}`")).collect();
        line(&mut page, format_args!("| `{}` | {} | {} |", u.key, accepted.join(" "), cell(u.instead)));
    }
    for (prefix, instead) in FAMILIES {
        line(&mut page, format_args!("| `{prefix}…` | | {} |", cell(instead)));
    }
    let about = "Accepted with a note: they say how another program gets to the same result.";
    line(
        &mut page,
        format_args!("\n## LlamaFactory's keys without effect here\n\n{about}\n\n| key | why |\n|---|---|"),
    );
    for h in HARMLESS {
        line(&mut page, format_args!("| `{}` | {} |", h.key, cell(h.why)));
    }
    page
}

fn line(page: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(page, "{text}");
}

/// A bar would end the table's cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
