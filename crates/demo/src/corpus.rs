//! The corpus: short stories for children, made by a grammar from a seed.
//!
//! A model of a few million weights and two minutes of time learns only what is regular. So the stories are written by a
//! grammar ([`GRAMMAR`], the prose is there): fifteen plots of eight to twelve sentences, each with several wordings. What
//! makes them stories, and what the model has to learn beyond word order, is that a story agrees with itself: names, pronouns,
//! places and things are drawn once and come back many sentences later. Text that agrees cannot be written word by word from
//! the last few words; attention over the whole story has to be learned, and the sample after training shows whether it was.
//!
//! Story `i` of a seed is a pure function of (seed, i).

use std::collections::{BTreeMap, HashMap};

use phalanx_tensor::rng::Stream;

use crate::error::{DemoError, Result};

/// The grammar of the stories, as text.
pub const GRAMMAR: &str = include_str!("stories.txt");

/// Where a list of words comes from.
#[derive(Debug, Clone, PartialEq)]
enum Words {
    /// Entries, each with a value a column.
    Own { columns: Vec<String>, entries: Vec<Vec<String>> },
    /// Another draw from the list of this name.
    Like(String),
}

/// One wording of a rule, and its line for messages.
#[derive(Debug, Clone, PartialEq)]
struct Wording {
    line: usize,
    text: String,
}

/// A grammar that writes stories.
#[derive(Debug, Clone, PartialEq)]
pub struct Grammar {
    lists: BTreeMap<String, Words>,
    rules: BTreeMap<String, Vec<Wording>>,
}

impl Grammar {
    /// The demo's own grammar.
    ///
    /// # Errors
    /// None, as a test makes sure; the type is that of [`Grammar::parse`].
    pub fn built_in() -> Result<Grammar> {
        Grammar::parse(GRAMMAR)
    }

    /// Reads a grammar. The head of [`GRAMMAR`] tells the notation.
    ///
    /// # Errors
    /// [`DemoError::Grammar`] with the line that cannot be understood.
    pub fn parse(text: &str) -> Result<Grammar> {
        let mut grammar = Grammar { lists: BTreeMap::new(), rules: BTreeMap::new() };
        let mut section: Option<(char, String)> = None;
        for (number, line) in text.lines().enumerate().map(|(i, l)| (i + 1, l.trim())) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(head) = line.strip_prefix('%') {
                let (name, words) = list_head(head);
                grammar.lists.insert(name.clone(), words);
                section = Some(('%', name));
            } else if let Some(name) = line.strip_prefix('@') {
                grammar.rules.insert(name.into(), vec![]);
                section = Some(('@', name.into()));
            } else {
                match &section {
                    Some(('%', name)) => grammar.entries(name, number, line)?,
                    Some((_, name)) => grammar.wording(name, number, line)?,
                    None => return Err(DemoError::grammar(number, "stands before the first %list or @rule")),
                }
            }
        }
        Ok(grammar)
    }

    fn entries(&mut self, list: &str, number: usize, line: &str) -> Result<()> {
        let Some(Words::Own { columns, entries }) = self.lists.get_mut(list) else {
            return Err(DemoError::grammar(number, format!("%{list} takes its words from another list")));
        };
        if columns.len() == 1 {
            entries.extend(line.split(',').map(|w| w.trim()).filter(|w| !w.is_empty()).map(|w| vec![w.into()]));
            return Ok(());
        }
        let entry: Vec<String> = line.split('|').map(|w| w.trim().into()).collect();
        if entry.len() != columns.len() {
            let why = format!("has {} values for the {} columns of %{list}", entry.len(), columns.len());
            return Err(DemoError::grammar(number, why));
        }
        entries.push(entry);
        Ok(())
    }

    fn wording(&mut self, rule: &str, number: usize, line: &str) -> Result<()> {
        let Some(text) = line.strip_prefix("- ") else {
            return Err(DemoError::grammar(number, "a wording begins with `- `"));
        };
        self.rules.entry(rule.into()).or_default().push(Wording { line: number, text: text.into() });
        Ok(())
    }

    /// Story `index` under `seed`. Paragraphs are separated by an empty line.
    ///
    /// # Errors
    /// [`DemoError::Grammar`] if a wording names a list, column or rule that does not exist, or rules go round in circles.
    pub fn story(&self, seed: u64, index: u64) -> Result<String> {
        let stream = Stream::new(seed, "demo.story").at(index);
        let mut writer =
            Writer { grammar: self, stream, drawn: 0, words: HashMap::new(), used: HashMap::new(), depth: 0 };
        let text = writer.rule("story", 0)?;
        Ok(text.replace(" / ", "\n\n"))
    }

    /// The number of wordings of all rules.
    pub fn num_wordings(&self) -> usize {
        self.rules.values().map(Vec::len).sum()
    }
}

fn list_head(head: &str) -> (String, Words) {
    if let Some((name, other)) = head.split_once('=') {
        return (name.trim().into(), Words::Like(other.trim().into()));
    }
    let mut parts = head.split_whitespace().map(String::from);
    let name = parts.next().unwrap_or_default();
    let columns: Vec<String> = parts.collect();
    let columns = if columns.is_empty() { vec!["word".into()] } else { columns };
    (name, Words::Own { columns, entries: vec![] })
}

/// Rules inside rules; more is a circle.
const DEEPEST: usize = 16;

/// The state of one story.
struct Writer<'g> {
    grammar: &'g Grammar,
    stream: Stream,
    /// Numbers drawn so far.
    drawn: u64,
    /// Entry of each list that the story has drawn.
    words: HashMap<String, usize>,
    /// Wordings of each rule that the story has used.
    used: HashMap<String, Vec<usize>>,
    depth: usize,
}

impl Writer<'_> {
    /// A number below `n`.
    fn draw(&mut self, n: usize) -> usize {
        let bits = self.stream.bits(self.drawn);
        self.drawn += 1;
        ((u64::from(bits) * n as u64) >> 32) as usize
    }

    /// One wording of a rule, another than before while there are others.
    fn rule(&mut self, name: &str, line: usize) -> Result<String> {
        let Some(wordings) = self.grammar.rules.get(name).filter(|w| !w.is_empty()) else {
            return Err(DemoError::grammar(line, format!("there is no rule @{name}")));
        };
        if self.depth == DEEPEST {
            return Err(DemoError::grammar(line, format!("the rule @{name} goes round in a circle")));
        }
        let used = self.used.get(name).map_or(&[][..], Vec::as_slice);
        let mut free: Vec<usize> = (0..wordings.len()).filter(|i| !used.contains(i)).collect();
        if free.is_empty() {
            free = (0..wordings.len()).collect();
        }
        let choice = free[self.draw(free.len())];
        self.used.entry(name.into()).or_default().push(choice);
        self.depth += 1;
        let text = self.expand(&wordings[choice].text, wordings[choice].line)?;
        self.depth -= 1;
        Ok(text)
    }

    /// Fills the slots and writes the rules of a text.
    fn expand(&mut self, text: &str, line: usize) -> Result<String> {
        let mut out = String::with_capacity(text.len() * 2);
        let mut rest = text;
        while let Some(at) = rest.find(['{', '[']) {
            out.push_str(&rest[..at]);
            let close = if rest[at..].starts_with('{') { '}' } else { ']' };
            let Some(length) = rest[at..].find(close) else {
                return Err(DemoError::grammar(line, format!("`{}` is not closed", &rest[at..])));
            };
            let inner = &rest[at + 1..at + length];
            if close == '}' {
                out.push_str(&self.slot(inner, line)?);
            } else {
                let name = self.expand(inner, line)?;
                out.push_str(&self.rule(&name, line)?);
            }
            rest = &rest[at + length + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    /// The word of a slot: `toy`, `Toy`, `a toy`, `A toy`, `friend.he`, `friend.He`, `he`.
    fn slot(&mut self, slot: &str, line: usize) -> Result<String> {
        let capital = slot.contains(char::is_uppercase);
        let lower = slot.to_lowercase();
        let (article, name) = match lower.strip_prefix("a ") {
            Some(name) => (true, name.to_owned()),
            None => (false, lower),
        };
        let (list, column) = match name.split_once('.') {
            Some((list, column)) => (list, Some(column)),
            None if self.grammar.lists.contains_key(&name) => (name.as_str(), None),
            // A bare column is the hero's.
            None => ("hero", Some(name.as_str())),
        };
        let mut word = self.word(list, column, line)?;
        if article {
            let vowel = word.starts_with(['a', 'e', 'i', 'o', 'u']);
            word = format!("{} {word}", if vowel { "an" } else { "a" });
        }
        Ok(if capital { upper_first(&word) } else { word })
    }

    /// A column (the first if not named) of the story's entry of a list.
    fn word(&mut self, list: &str, column: Option<&str>, line: usize) -> Result<String> {
        let missing = |what: &str| DemoError::grammar(line, format!("there is no {what}"));
        let grammar = self.grammar;
        let source = match grammar.lists.get(list) {
            Some(Words::Like(other)) => other.as_str(),
            _ => list,
        };
        let Some(Words::Own { columns, entries }) = grammar.lists.get(source) else {
            return Err(missing(&format!("list %{list}")));
        };
        let entry = match self.words.get(list) {
            Some(entry) => *entry,
            None => self.draw_word(list, source, entries.len(), line)?,
        };
        let index = match column {
            None => 0,
            Some(c) => columns.iter().position(|k| k == c).ok_or_else(|| missing(&format!("column {c} in %{list}")))?,
        };
        Ok(entries[entry][index].clone())
    }

    /// Draws the story's entry of a list, never one that a list of the same words has.
    fn draw_word(&mut self, list: &str, source: &str, len: usize, line: usize) -> Result<usize> {
        let lists = &self.grammar.lists;
        let taken: Vec<usize> = self
            .words
            .iter()
            .filter(|(name, _)| {
                name.as_str() == source || matches!(lists.get(*name), Some(Words::Like(other)) if other == source)
            })
            .map(|(_, entry)| *entry)
            .collect();
        let free: Vec<usize> = (0..len).filter(|i| !taken.contains(i)).collect();
        if free.is_empty() {
            return Err(DemoError::grammar(line, format!("%{list} has no word left")));
        }
        let entry = free[self.draw(free.len())];
        self.words.insert(list.into(), entry);
        Ok(entry)
    }
}

fn upper_first(s: &str) -> String {
    let mut chars = s.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

/// `count` stories under `seed`.
///
/// # Errors
/// As [`Grammar::story`].
///
/// ```
/// let stories = phalanx_demo::corpus::stories(7, 3)?;
/// assert_eq!(stories, phalanx_demo::corpus::stories(7, 3)?);
/// assert!(stories.iter().all(|s| s.len() > 200));
/// # Ok::<(), phalanx_demo::DemoError>(())
/// ```
pub fn stories(seed: u64, count: usize) -> Result<Vec<String>> {
    let grammar = Grammar::built_in()?;
    (0..count as u64).map(|i| grammar.story(seed, i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_and_list_is_used_and_nothing_is_left_unfilled() {
        let grammar = Grammar::built_in().unwrap();
        assert!(grammar.num_wordings() >= 300, "{}", grammar.num_wordings());
        let all = stories(1, 3000).unwrap();
        for story in &all {
            assert!(!story.contains(['{', '}', '[', ']', '/', '%', '@']), "{story}");
            assert!(!story.contains("  ") && !story.contains(" a a") && !story.contains(" ."), "{story}");
            assert!(
                story.is_ascii() && story.starts_with(char::is_uppercase) && story.ends_with(['.', '!', '"']),
                "{story}"
            );
        }
        let mut written = all.join("\n");
        written.make_ascii_lowercase();
        for (name, words) in &grammar.lists {
            let Words::Own { entries, .. } = words else { continue };
            for entry in entries {
                assert!(written.contains(&entry[0].to_lowercase()), "{name}: {entry:?}");
            }
        }
        for (name, wordings) in &grammar.rules {
            for w in wordings {
                // The longest piece between slots.
                let piece =
                    w.text.split(['{', '}', '[', ']', '/']).map(str::trim).max_by_key(|p| p.len()).unwrap_or_default();
                let fixed = piece.contains(' ') || !w.text.contains('[');
                assert!(!fixed || written.contains(&piece.to_lowercase()), "@{name}: {piece}");
            }
        }
    }

    #[test]
    fn stories_vary_and_are_of_a_size_that_fits_a_row() {
        let all = stories(42, 2000).unwrap();
        let distinct: std::collections::HashSet<&String> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        let longest = all.iter().map(String::len).max().unwrap_or(0);
        let mean = all.iter().map(String::len).sum::<usize>() / all.len();
        assert!(longest < 1100 && (450..800).contains(&mean), "longest {longest}, mean {mean}");
        assert_ne!(stories(43, 1).unwrap()[0], all[0]);
    }

    #[test]
    fn a_story_keeps_its_words_and_two_friends_differ() {
        let text = "%hero name he\nAnn | she\nBob | he\n%friend = hero\n%thing\napple, owl\n@story\n- {hero} {He} {friend} {a thing} {A thing} {friend.he} [end-{he}]\n@end-she\n- she ends\n@end-he\n- he ends\n";
        let grammar = Grammar::parse(text).unwrap();
        for i in 0..20 {
            let story = grammar.story(3, i).unwrap();
            let w: Vec<&str> = story.split(' ').collect();
            let (she, he) = (["Ann", "She", "Bob", "he", "she"], ["Bob", "He", "Ann", "she", "he"]);
            let expected = if w[0] == "Ann" { she } else { he };
            assert_eq!([w[0], w[1], w[2], w[7], w[8]], expected, "{story}");
            assert_eq!((w[3], w[5], w[4]), ("an", "An", w[6]), "{story}");
        }
    }

    #[test]
    fn faults_name_their_line() {
        let story = |text: &str| Grammar::parse(text).and_then(|g| g.story(1, 0)).unwrap_err().to_string();
        assert!(story("word\n").starts_with("stories.txt:1:"));
        assert!(story("%hero a b\nx\n").contains("stories.txt:2: has 1 values for the 2 columns"));
        assert!(story("@story\n- {toy}\n").contains("stories.txt:2: there is no list %hero"));
        assert!(story("@story\n- a\n- b\n@story\n- [other]\n").contains("stories.txt:5: there is no rule @other"));
        assert!(story("@story\n- [story]\n").contains("circle"));
        assert!(story("@story\n- {open\n").contains("not closed"));
    }
}
