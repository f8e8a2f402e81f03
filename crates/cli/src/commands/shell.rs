//! Commands that a person can copy into a POSIX shell.

/// Words as one command line, each quoted where it needs it.
pub fn command<S: AsRef<str>>(words: impl IntoIterator<Item = S>) -> String {
    words.into_iter().map(|w| quoted(w.as_ref())).collect::<Vec<_>>().join(" ")
}

/// One word as a shell takes it for exactly this text.
fn quoted(word: &str) -> String {
    let harmless = |c: char| c.is_alphanumeric() || "_-./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(harmless) {
        word.to_owned()
    } else {
        // Between single quotes everything stands for itself but the quote.
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_needs_it_is_quoted() {
        let words = ["phalanx", "train", "my run.yaml", "plan={freeze: \"**\"}", "stop=it's", "lr=1e-4", "~/a", ""];
        let line = r#"phalanx train 'my run.yaml' 'plan={freeze: "**"}' 'stop=it'\''s' lr=1e-4 '~/a' ''"#;
        assert_eq!(command(words), line);
    }
}
