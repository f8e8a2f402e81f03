//! The nearest known word to a mistyped one.

/// The candidate with the smallest edit distance to `word`, when it is near enough to be a typing mistake: at most a
/// third of the letters wrong. Ties go to the first.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(1);
    candidates
        .into_iter()
        .map(|c| (distance(word, c), c))
        .filter(|(d, _)| *d <= limit)
        .min_by_key(|(d, _)| *d)
        .map(|p| p.1)
}

/// Edit distance with insertions, deletions, substitutions and swaps of neighbours (optimal string alignment), over
/// lower-case letters with `-` and `_` alike.
fn distance(a: &str, b: &str) -> usize {
    let fold = |s: &str| s.to_lowercase().replace('-', "_");
    strsim::osa_distance(&fold(a), &fold(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_typing_mistakes_and_nothing_else() {
        let keys = ["learning_rate", "lora_rank", "cutoff_len", "bf16"];
        assert_eq!(nearest("learning-rate", keys), Some("learning_rate"));
        assert_eq!(nearest("leraning_rate", keys), Some("learning_rate"));
        assert_eq!(nearest("lora_rnk", keys), Some("lora_rank"));
        assert_eq!(nearest("cutoff_length", keys), Some("cutoff_len"));
        assert_eq!(nearest("bf61", keys), Some("bf16"));
        assert_eq!(nearest("optimizer_states", keys), None);
        assert_eq!(distance("ab", "ba"), 1);
        assert_eq!(distance("", "abc"), 3);
    }
}
