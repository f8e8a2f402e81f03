//! Colour, where it is wanted: on a terminal, unless `NO_COLOR` says no (<https://no-color.org>).

use std::io::IsTerminal;

/// How text is decorated. A value: pass it to whatever prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    colour: bool,
}

impl Style {
    /// Colour or none, whatever the terminal.
    pub fn new(colour: bool) -> Self {
        Style { colour }
    }

    /// For text that goes to `stream`: colour when it is a terminal and `no_colour` (the value of the environment
    /// variable `NO_COLOR`) is unset or empty.
    pub fn of(stream: &impl IsTerminal, no_colour: Option<&str>) -> Self {
        Style { colour: stream.is_terminal() && no_colour.is_none_or(str::is_empty) }
    }

    /// Whether there is colour.
    pub fn has_colour(self) -> bool {
        self.colour
    }

    /// Strong.
    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    /// Weak.
    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    /// Red: errors.
    pub fn red(self, text: &str) -> String {
        self.wrap("31", text)
    }

    /// Green: what went well; what is trained on.
    pub fn green(self, text: &str) -> String {
        self.wrap("32", text)
    }

    /// Yellow: warnings.
    pub fn yellow(self, text: &str) -> String {
        self.wrap("33", text)
    }

    /// Cyan: names and paths.
    pub fn cyan(self, text: &str) -> String {
        self.wrap("36", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Columns that `text` takes in a terminal: escape sequences none, East Asian wide characters and emoji two.
pub fn display_width(text: &str) -> usize {
    let mut width = 0;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            // Up to the letter that ends the sequence.
            let _ = chars.by_ref().find(|c| c.is_ascii_alphabetic());
        } else {
            width += char_width(c);
        }
    }
    width
}

fn char_width(c: char) -> usize {
    match c as u32 {
        0..=0x1f | 0x7f..=0x9f | 0x300..=0x36f | 0x200b..=0x200f | 0xfe00..=0xfe0f => 0,
        0x1100..=0x115f
        | 0x2e80..=0x303e
        | 0x3041..=0xa4cf
        | 0xac00..=0xd7a3
        | 0xf900..=0xfaff
        | 0xfe30..=0xfe6f
        | 0xff00..=0xff60
        | 0xffe0..=0xffe6
        | 0x1f300..=0x1f64f
        | 0x1f900..=0x1f9ff
        | 0x20000..=0x3fffd => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_only_where_wanted() {
        assert_eq!(Style::new(true).bold("x"), "\x1b[1mx\x1b[0m");
        assert_eq!(Style::new(false).bold("x"), "x");
        assert_eq!(Style::of(&std::io::stdout(), Some("1")).red("x"), "x");
    }

    #[test]
    fn widths() {
        assert_eq!(display_width("abc"), 3);
        assert_eq!(display_width("\x1b[31mabc\x1b[0m"), 3);
        assert_eq!(display_width("春眠不覺曉"), 10);
        assert_eq!(display_width("e\u{301}"), 1);
    }
}
