//! A bar for the work before or instead of a run: reading and tokenising data, importing a model.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use phalanx_report::units;

/// Shown on standard error where that is a terminal, cleared when dropped.
pub struct Bar(Option<ProgressBar>);

impl Bar {
    /// `quiet` (`--json`, `--plain`) wants no bar on a terminal either.
    pub fn new(quiet: bool) -> Bar {
        let shown = !quiet && std::io::stderr().is_terminal();
        Bar(shown.then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10))))
    }

    /// For [`phalanx_data::prepare`] and its like.
    pub fn data(&self, p: phalanx_data::Progress<'_>) {
        self.show(p.done, p.total, || data_text(p));
    }

    /// For the importers.
    pub fn import(&self, p: phalanx_formats::import::Progress<'_>) {
        self.show(p.bytes_done, Some(p.bytes), || import_text(p));
    }

    fn show(&self, done: u64, total: Option<u64>, text: impl Fn() -> String) {
        let Some(bar) = &self.0 else { return };
        // Where the end is not known there is nothing to draw a share of.
        let template = if total.is_some() { "{bar:24.cyan/dim} {wide_msg}" } else { "{wide_msg}" };
        // Templates of constants; the default bar is no worse than none.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━━─"));
        }
        if let Some(total) = total {
            bar.set_length(total);
        }
        bar.set_position(done);
        bar.set_message(text());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// `tokenising tales: 12,345 records`, `reading tales: 1.0 GiB of 1.5 GiB`.
fn data_text(p: phalanx_data::Progress<'_>) -> String {
    match p.total {
        Some(total) => format!("{} {}: {} of {}", p.step, p.dataset, units::bytes(p.done), units::bytes(total)),
        None => format!("{} {}: {} records", p.step, p.dataset, units::grouped(p.done)),
    }
}

/// `importing: 12 of 290 tensors, 1.0 GiB of 1.5 GiB`.
fn import_text(p: phalanx_formats::import::Progress<'_>) -> String {
    let (done, all) = (units::bytes(p.bytes_done), units::bytes(p.bytes));
    format!("importing: {} of {} tensors, {done} of {all}", p.tensors_done, p.tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_says_what_is_done_and_how_far_it_is() {
        let p = phalanx_data::Progress { step: "tokenising", dataset: "tales", done: 12_345, total: None };
        assert_eq!(data_text(p), "tokenising tales: 12,345 records");
        let p = phalanx_data::Progress { step: "reading", dataset: "tales", done: 1 << 30, total: Some(3 << 29) };
        assert_eq!(data_text(p), "reading tales: 1.0 GiB of 1.5 GiB");
        let p = phalanx_formats::import::Progress {
            tensor: "lm_head.weight",
            tensors_done: 12,
            tensors: 290,
            bytes_done: 1 << 30,
            bytes: 3 << 29,
        };
        assert_eq!(import_text(p), "importing: 12 of 290 tensors, 1.0 GiB of 1.5 GiB");
        // Without a terminal, or with --json, nothing is drawn.
        assert!(Bar::new(true).0.is_none());
    }
}
