//! A small table of text: columns as wide as they must be, numbers to the right.

use std::fmt;

use crate::style::{Style, display_width};

/// Rows under a head. Cells may hold escape sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    head: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
    style: Style,
}

impl Table {
    /// A table with a head. A name that begins with `>` makes a column whose cells stand at the right: `">tokens"`.
    /// With empty names only, there is no head.
    pub fn new(style: Style, head: &[&str]) -> Self {
        Table {
            head: head.iter().map(|h| h.strip_prefix('>').unwrap_or(h).to_owned()).collect(),
            right: head.iter().map(|h| h.starts_with('>')).collect(),
            rows: vec![],
            style,
        }
    }

    /// Adds a row; cells that are missing are empty, cells too many are left out.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) -> &mut Self {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.head.len(), String::new());
        self.rows.push(row);
        self
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_head = self.head.iter().any(|h| !h.is_empty());
        let widths: Vec<usize> = (0..self.head.len())
            .map(|i| self.rows.iter().chain([&self.head]).map(|r| display_width(&r[i])).max().unwrap_or(0))
            .collect();
        let line = |f: &mut fmt::Formatter<'_>, cells: &[String]| {
            let mut text = String::new();
            for (i, cell) in cells.iter().enumerate() {
                let gap = " ".repeat(widths[i] - display_width(cell));
                let between = if i > 0 { "  " } else { "" };
                text += &if self.right[i] { format!("{between}{gap}{cell}") } else { format!("{between}{cell}{gap}") };
            }
            writeln!(f, "{}", text.trim_end())
        };
        if has_head {
            let head: Vec<String> = self.head.iter().map(|h| self.style.bold(h)).collect();
            line(f, &head)?;
        }
        self.rows.iter().try_for_each(|row| line(f, row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(Style::new(false), &["key", ">tokens", "origin"]);
        table.row(["lora_rank", "8", "run.yaml:4"]).row(["詩", "1200", "default"]).row(["x"]);
        let expected = "key        tokens  origin\nlora_rank       8  run.yaml:4\n詩           1200  default\nx\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn colour_does_not_shift_columns() {
        let style = Style::new(true);
        let mut table = Table::new(style, &["", ""]);
        table.row([style.green("ab"), "c".into()]).row(["abcd", "e"]);
        let text = table.to_string();
        assert_eq!(text, "\x1b[32mab\x1b[0m    c\nabcd  e\n");
    }
}
