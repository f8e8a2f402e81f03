//! From tokens to text: streaming, stop strings, and batches of text prompts.

use std::ops::ControlFlow;

use phalanx_data::{StreamDecoder, Tokenizer};

use crate::engine::Generator;
use crate::error::{GenerateError, Result};
use crate::request::{Completion, FinishReason, Flow, Request, Token};

/// Finds stop strings in a text that comes in pieces, wherever the pieces are cut.
///
/// Text is held back as long as it may be the beginning of a stop string; so nothing of a stop string is ever shown.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

/// Text that is certain, and whether a stop string came right after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// May be shown.
    pub text: String,
    /// Whether this is the end.
    pub stopped: bool,
}

impl StopStrings {
    /// A search for any of `stops`.
    ///
    /// # Errors
    /// If one of them is empty: it would stop everything before it begins.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<StopStrings> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.iter().any(String::is_empty) {
            return Err(GenerateError::parameter("stop", "\"\"", "an empty text stops at once; leave it out"));
        }
        Ok(StopStrings { stops, held: String::new() })
    }

    /// Takes more text and gives what has become certain.
    pub fn push(&mut self, text: &str) -> Piece {
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min();
        if let Some(at) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return Piece { text, stopped: true };
        }
        let text = self.held.drain(..self.certain()).collect();
        Piece { text, stopped: false }
    }

    /// What was held back, when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the held text that no stop string can begin in.
    fn certain(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let may_begin =
            |at: &usize| self.held.is_char_boundary(*at) && self.stops.iter().any(|s| s.starts_with(&self.held[*at..]));
        (from..self.held.len()).find(may_begin).unwrap_or(self.held.len())
    }
}

/// The text of one answer while its tokens come: whole characters only, ended by a stop string.
pub struct TextStream<'t> {
    decoder: Option<StreamDecoder<'t>>,
    stops: StopStrings,
}

impl<'t> TextStream<'t> {
    /// A stream of `tokenizer`'s text. `skip_special` leaves special tokens out.
    pub fn new(tokenizer: &'t Tokenizer, skip_special: bool, stops: StopStrings) -> TextStream<'t> {
        TextStream { decoder: Some(tokenizer.stream_decoder(skip_special)), stops }
    }

    /// Takes a token. After a piece that says `stopped`, nothing more is to be pushed.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Piece> {
        match &mut self.decoder {
            Some(decoder) => Ok(self.stops.push(&decoder.push(id)?)),
            None => Ok(Piece::default()),
        }
    }

    /// The rest, when no more tokens come. Call it unless a stop string ended the text.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<Piece> {
        let Some(decoder) = self.decoder.take() else { return Ok(Piece::default()) };
        let mut piece = self.stops.push(&decoder.finish()?);
        if !piece.stopped {
            piece.text.push_str(&self.stops.finish());
        }
        Ok(piece)
    }
}

/// What goes for all prompts of a text generation.
#[derive(Clone, Debug, PartialEq)]
pub struct TextOptions {
    /// Texts that end an answer; they are not part of it.
    pub stop: Vec<String>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
}

impl Default for TextOptions {
    fn default() -> Self {
        TextOptions { stop: vec![], skip_special_tokens: true }
    }
}

/// A generated text with its tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TextCompletion {
    /// The answer, without stop token and stop string.
    pub text: String,
    /// Its tokens and why it ended. After a stop string these go on to the token that completed it.
    pub completion: Completion,
}

/// Generates for all requests at once; `on_text` is called for every token with its request and the text that has become
/// certain, which may be none.
///
/// # Errors
/// As [`Generator::generate`], or if the tokenizer or `on_text` fails.
pub fn generate_text(
    generator: &mut Generator<'_>,
    tokenizer: &Tokenizer,
    requests: Vec<Request>,
    options: &TextOptions,
    on_text: &mut dyn FnMut(usize, &str) -> Result<Flow>,
) -> Result<Vec<TextCompletion>> {
    let stops = StopStrings::new(options.stop.iter().map(String::as_str))?;
    let mut streams: Vec<TextStream<'_>> =
        requests.iter().map(|_| TextStream::new(tokenizer, options.skip_special_tokens, stops.clone())).collect();
    let mut texts = vec![String::new(); requests.len()];
    let mut show = |request: usize, piece: &Piece| -> Result<Flow> {
        texts[request].push_str(&piece.text);
        on_text(request, &piece.text)
    };
    let completions = generator.generate(requests, &mut |token: &Token| {
        if token.is_stop {
            return Ok(ControlFlow::Continue(()));
        }
        let piece = streams[token.request].push(token.id)?;
        let flow = show(token.request, &piece)?;
        Ok(if piece.stopped { ControlFlow::Break(FinishReason::StopString) } else { flow })
    })?;
    for (request, completion) in completions.iter().enumerate() {
        if completion.finish_reason != FinishReason::StopString {
            // It has ended already: whether to go on is no question any more.
            let _ = show(request, &streams[request].finish()?)?;
        }
    }
    Ok(texts.into_iter().zip(completions).map(|(text, completion)| TextCompletion { text, completion }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes the text in all ways of cutting it in two and in single characters.
    fn ways(text: &str, stops: &[&str], want: (&str, bool)) {
        let mut cuts: Vec<Vec<&str>> =
            (0..=text.len()).filter(|&i| text.is_char_boundary(i)).map(|i| vec![&text[..i], &text[i..]]).collect();
        cuts.push(text.split("").collect());
        for pieces in cuts {
            let mut search = StopStrings::new(stops.iter().copied()).unwrap();
            let (mut out, mut stopped) = (String::new(), false);
            for p in &pieces {
                let piece = search.push(p);
                out.push_str(&piece.text);
                // What is shown is never taken back.
                assert!(want.0.starts_with(&out), "{pieces:?}: {out}");
                stopped = piece.stopped;
                if stopped {
                    break;
                }
            }
            if !stopped {
                out.push_str(&search.finish());
            }
            assert_eq!((out.as_str(), stopped), want, "{pieces:?}");
        }
    }

    #[test]
    fn stop_strings_are_found_across_pieces_and_never_shown() {
        ways("Answer: 42\n\nQuestion: 7", &["\n\nQuestion"], ("Answer: 42", true));
        ways("a STO and a STOP!", &["STOP"], ("a STO and a ", true));
        ways("aaab", &["aab"], ("a", true));
        ways("naïve 中文。完", &["。"], ("naïve 中文", true));
        ways("no end of STO", &["STOP", "。"], ("no end of STO", false));
        ways("one two three", &["three", "two"], ("one ", true));
        ways("plain", &[], ("plain", false));
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut s = StopStrings::new(["###"]).unwrap();
        assert_eq!(s.push("abc#").text, "abc");
        assert_eq!(s.push("d").text, "#d");
        assert!(StopStrings::new([""]).unwrap_err().to_string().starts_with("stop"));
    }
}
