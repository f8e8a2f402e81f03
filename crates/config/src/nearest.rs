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
    let fold = |s: &str| s.to_lowercase().replace('-', "_").chars().collect::<Vec<_>>();
    let (a, b) = (fold(a), fold(b));
    let mut rows = vec![vec![0usize; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut best = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(rows[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    rows[a.len()][b.len()]
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
