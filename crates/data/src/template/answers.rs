//! Where in the rendered text the assistant's answers stand.
//!
//! A template does not say which of its output is an answer, so prefixes of the conversation are rendered:
//!
//! ```text
//! P_i = render(messages[..i],  with the head of an answer)   what the model is given when it writes answer i
//! E_i = render(messages[..=i], without)                      the same with the answer
//! ```
//!
//! Normally P_i is a prefix of E_i, and E_i of the whole text F: then E_i − P_i is the answer, at the same place in F.
//! Two things break this in real templates. The head may hold something that the finished answer lacks (`<think>`):
//! then the answer begins where P_i and E_i part. Or past answers are rewritten (Qwen3 drops their thinking): then
//! E_i is no prefix of F, and training answer i inside F would teach what is never generated. Such an answer gets an
//! example of its own, the text E_i ([`RewrittenHistory::Split`]), or is not trained ([`RewrittenHistory::LastTurn`]).

use std::ops::Range;

use super::ChatTemplate;
use crate::error::{DataError, Result};
use crate::options::{DataOptions, RewrittenHistory};
use crate::record::{Conversation, Message, Role};

/// A text with the places of the answers that are trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedExample {
    /// The whole text, ending with the last answer and what the template puts after it.
    pub text: String,
    /// Byte ranges of `text`, in order, each from the first byte that the model writes to the end of the turn.
    pub answers: Vec<Range<usize>>,
    /// For each range, where the message's own words end in it, if they stand there unchanged.
    pub words_end: Vec<Option<usize>>,
}

/// The examples of one conversation, and what was unusual.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendering {
    /// Longest first; more than one only if the template rewrites past answers.
    pub examples: Vec<RenderedExample>,
    /// Answers that are not trained because the template rewrites them (`rewritten_history: last_turn`).
    pub untrained_answers: usize,
    /// Answers that do not continue the generation prompt to the letter.
    pub mismatched_prompts: usize,
}

struct Answer {
    text: String,
    start: usize,
    words_end: Option<usize>,
}

impl ChatTemplate {
    /// Renders a conversation into training examples, cut after the last trained answer.
    ///
    /// # Errors
    /// What the template raises.
    pub fn examples(&self, conversation: &Conversation, options: &DataOptions) -> Result<Rendering> {
        let messages = &conversation.messages;
        let last = messages.iter().rposition(|m| m.role == Role::Assistant);
        let wanted = |(i, m): (usize, &Message)| {
            let kept = m.role == Role::Assistant && m.trained && (!options.mask_history || Some(i) == last);
            kept.then_some(i)
        };
        let mut rendering = Rendering::default();
        let mut answers = Vec::new();
        for i in messages.iter().enumerate().filter_map(wanted) {
            answers.push(self.answer(conversation, i, &mut rendering.mismatched_prompts)?);
        }
        while let Some(whole) = answers.pop() {
            let (inside, outside): (Vec<_>, Vec<_>) =
                answers.into_iter().partition(|a| whole.text.starts_with(&a.text));
            let mut example = RenderedExample { text: String::new(), answers: Vec::new(), words_end: Vec::new() };
            for answer in inside.iter().chain([&whole]) {
                example.answers.push(answer.start..answer.text.len());
                example.words_end.push(answer.words_end);
            }
            example.text = whole.text;
            rendering.examples.push(example);
            answers = outside;
            if options.rewritten_history == RewrittenHistory::LastTurn {
                rendering.untrained_answers = answers.len();
                break;
            }
        }
        Ok(rendering)
    }

    /// E_i and where the answer begins in it.
    fn answer(&self, conversation: &Conversation, i: usize, mismatched: &mut usize) -> Result<Answer> {
        let message = &conversation.messages[i];
        let text = self.render_first(conversation, i + 1, false)?;
        // A template may refuse to render no message at all; then the answer is found by its words.
        let prompt = match self.render_first(conversation, i, true) {
            Err(_) if i == 0 => None,
            other => Some(other?),
        };
        let start = match prompt {
            Some(prompt) if text.starts_with(&prompt) => prompt.len(),
            prompt => {
                *mismatched += 1;
                self.search_start(conversation, i, &text, prompt.as_deref())?
            }
        };
        let (words, written) = (message.content.trim(), &text[start..]);
        let head = written.len() - written.trim_start().len();
        let plain = message.tool_calls.is_empty() && !words.is_empty() && written[head..].starts_with(words);
        let words_end = plain.then_some(start + head + words.len());
        Ok(Answer { text, start, words_end })
    }

    /// The beginning of answer `i` where the generation prompt is not a prefix of the rendered answer.
    fn search_start(&self, conversation: &Conversation, i: usize, text: &str, prompt: Option<&str>) -> Result<usize> {
        if let Some(prompt) = prompt {
            let history = self.render_first(conversation, i, false)?;
            if text.starts_with(&history) {
                return Ok(common_prefix(prompt, text));
            }
        }
        // The answer changed what stands before it. Another answer changes it in the same way, so the answer begins
        // where the two part; a space in front belongs to it, as most tokenizers see it.
        let other = Conversation {
            messages: conversation.messages[..i]
                .iter()
                .cloned()
                .chain([Message::new(Role::Assistant, "\u{e000}")])
                .collect(),
            ..conversation.clone()
        };
        if let Ok(other) = self.render(&other, false) {
            let parted = common_prefix(&other, text);
            if parted < text.len() {
                return Ok(text[..parted].trim_end_matches(' ').len());
            }
        }
        Err(DataError::Template {
            name: self.name.clone(),
            detail: format!("the answer in message {} cannot be found in what it prints", i + 1),
        })
    }
}

/// Length in bytes of the longest common prefix, at a character boundary.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((at, _), _)| at)
}
