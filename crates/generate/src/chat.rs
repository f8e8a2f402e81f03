//! A conversation at a prompt: lines in, answers out as they come.
//!
//! The session knows no terminal. It takes a line, writes to whatever it is given, and says whether to go on; so the command
//! line only connects it to standard input and output, and tests drive it with strings. Each answer is generated from the
//! whole conversation rendered anew by the model's template; the generator finds by itself how much of that lies in its
//! cache from the turn before.

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use phalanx_data::{ChatTemplate, Conversation, Message, Role, Tokenizer};

use crate::engine::Generator;
use crate::error::{GenerateError, Result};
use crate::request::{Completion, FinishReason, Request};
use crate::sampling::SamplingParams;
use crate::text::{TextOptions, generate_text};

/// How answers are made.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Longest answer, in tokens.
    pub max_new_tokens: usize,
    /// Stop strings and special tokens.
    pub text: TextOptions,
    /// Tokens that end an answer beside those of the model's files and template.
    pub stop_token_ids: Vec<u32>,
    /// Of the first answer; each further one, and each new try, uses the next.
    pub seed: u64,
    /// System message at the start.
    pub system: Option<String>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        ChatOptions {
            sampling: SamplingParams::default(),
            max_new_tokens: 1024,
            text: TextOptions::default(),
            stop_token_ids: vec![],
            seed: 0,
            system: None,
        }
    }
}

/// What the caller is to do after a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Read another line.
    Line,
    /// End.
    Exit,
}

/// What `/help` prints.
pub const HELP: &str = "\
/clear         forget the conversation (the system message stays)
/system TEXT   set the system message and begin anew; without TEXT, remove it
/regenerate    answer the last question again
/undo          take the last question and its answer back
/history       show the conversation
/exit          end (also /quit, Ctrl-D)
/help          this list
A line that is to begin with a slash: write two. Ctrl-C ends an answer early.";

/// A conversation with a model.
pub struct ChatSession<'a> {
    generator: Generator<'a>,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    options: ChatOptions,
    stop_token_ids: Vec<u32>,
    conversation: Conversation,
    answers: u64,
    interrupt: Arc<AtomicBool>,
}

impl<'a> ChatSession<'a> {
    /// A conversation that has not begun.
    ///
    /// # Errors
    /// If an option is impossible, or the tokenizer has ids that the model has no row for.
    pub fn new(
        generator: Generator<'a>,
        tokenizer: &'a Tokenizer,
        template: &'a ChatTemplate,
        options: ChatOptions,
    ) -> Result<ChatSession<'a>> {
        options.sampling.check()?;
        crate::text::StopStrings::new(options.text.stop.iter().map(String::as_str))?;
        if options.max_new_tokens == 0 {
            return Err(GenerateError::parameter("max_new_tokens", 0, "must be at least 1"));
        }
        tokenizer.check_rows(generator.model().config().vocab_size)?;
        let mut stop_token_ids = template.stop_ids(tokenizer)?;
        stop_token_ids.extend_from_slice(&options.stop_token_ids);
        let conversation = Conversation { system: options.system.clone(), ..Conversation::default() };
        Ok(ChatSession {
            generator,
            tokenizer,
            template,
            options,
            stop_token_ids,
            conversation,
            answers: 0,
            interrupt: Arc::default(),
        })
    }

    /// Set to true (by a Ctrl-C handler), it ends the answer in progress; what was said so far stays.
    pub fn interrupt(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.interrupt)
    }

    /// What was said.
    pub fn conversation(&self) -> &Conversation {
        &self.conversation
    }

    /// Takes a line: a command, or something to answer. Mistakes of the person are written to `out`.
    ///
    /// # Errors
    /// If the answer cannot be generated or written; the question is then taken back.
    pub fn line(&mut self, line: &str, out: &mut dyn Write) -> Result<Next> {
        let line = line.trim();
        if line.is_empty() {
            return Ok(Next::Line);
        }
        if let Some(command) = line.strip_prefix('/') {
            if !command.starts_with('/') {
                return self.command(command, out);
            }
            self.say(command, out)?;
            return Ok(Next::Line);
        }
        self.say(line, out)?;
        Ok(Next::Line)
    }

    fn command(&mut self, command: &str, out: &mut dyn Write) -> Result<Next> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match name {
            "exit" | "quit" => return Ok(Next::Exit),
            "help" => tell(out, HELP)?,
            "clear" => {
                self.conversation.messages.clear();
                tell(out, "(forgotten)")?;
            }
            "system" => {
                let text = rest.trim();
                self.conversation.messages.clear();
                self.conversation.system = (!text.is_empty()).then(|| text.to_owned());
                tell(out, if text.is_empty() { "(no system message)" } else { "(system message set, begun anew)" })?;
            }
            "undo" => match self.take_back() {
                Some(_) => tell(out, "(taken back)")?,
                None => tell(out, "Nothing has been said yet.")?,
            },
            "regenerate" | "retry" => match self.take_back() {
                Some(question) => {
                    self.say(&question, out)?;
                }
                None => tell(out, "Nothing has been said yet.")?,
            },
            "history" => {
                if let Some(system) = &self.conversation.system {
                    tell(out, &format!("system: {system}"))?;
                }
                for m in &self.conversation.messages {
                    tell(out, &format!("{}: {}", m.role.as_str(), m.content))?;
                }
            }
            other => tell(out, &format!("There is no command /{other}; /help lists them."))?,
        }
        Ok(Next::Line)
    }

    /// Removes the last question with its answer; returns the question.
    fn take_back(&mut self) -> Option<String> {
        let messages = &mut self.conversation.messages;
        let at = messages.iter().rposition(|m| m.role == Role::User)?;
        let question = messages[at].content.clone();
        messages.truncate(at);
        Some(question)
    }

    /// Adds a question, writes the answer as it comes, and keeps both.
    ///
    /// # Errors
    /// As [`ChatSession::line`].
    pub fn say(&mut self, question: &str, out: &mut dyn Write) -> Result<Completion> {
        self.conversation.messages.push(Message::new(Role::User, question));
        match self.answer(out) {
            Ok((text, completion)) => {
                self.conversation.messages.push(Message::new(Role::Assistant, text));
                Ok(completion)
            }
            Err(e) => {
                self.conversation.messages.pop();
                Err(e)
            }
        }
    }

    fn answer(&mut self, out: &mut dyn Write) -> Result<(String, Completion)> {
        let prompt = self.prompt(out)?;
        let request = Request {
            prompt,
            max_new_tokens: self.options.max_new_tokens,
            sampling: self.options.sampling,
            stop_token_ids: self.stop_token_ids.clone(),
            seed: self.options.seed.wrapping_add(self.answers),
        };
        self.answers += 1;
        self.interrupt.store(false, Ordering::Relaxed);
        let interrupt = &self.interrupt;
        let mut text = String::new();
        let done =
            generate_text(&mut self.generator, self.tokenizer, vec![request], &self.options.text, &mut |_, piece| {
                if !piece.is_empty() {
                    text.push_str(piece);
                    out.write_all(piece.as_bytes()).and_then(|()| out.flush()).map_err(GenerateError::Write)?;
                }
                Ok(if interrupt.load(Ordering::Relaxed) {
                    ControlFlow::Break(FinishReason::Cancelled)
                } else {
                    ControlFlow::Continue(())
                })
            })?;
        let Some(completion) = done.into_iter().next().map(|d| d.completion) else {
            unreachable!("one request, one completion");
        };
        tell(out, "")?;
        match completion.finish_reason {
            FinishReason::Length => {
                tell(out, &format!("(cut at max_new_tokens = {})", self.options.max_new_tokens))?;
            }
            FinishReason::Context => tell(out, "(the context is full; /clear begins anew)")?,
            FinishReason::Cancelled => tell(out, "(interrupted)")?,
            FinishReason::StopToken | FinishReason::StopString => {}
        }
        Ok((text, completion))
    }

    /// The conversation's tokens; the oldest turns go when they leave no room for an answer.
    fn prompt(&mut self, out: &mut dyn Write) -> Result<Vec<u32>> {
        let context = self.generator.context();
        // An answer of a few words must fit at least.
        let room = self.options.max_new_tokens.min(context / 8).max(1);
        let mut dropped = 0;
        loop {
            let ids = self.template.prompt_ids(self.tokenizer, &self.conversation)?;
            if ids.len() + room <= context || self.conversation.messages.len() < 3 {
                if dropped > 0 {
                    tell(
                        out,
                        &format!(
                            "(the context of {context} tokens is full: the oldest {dropped} messages are forgotten)"
                        ),
                    )?;
                }
                return Ok(ids);
            }
            // A question with its answer, so that the roles still alternate.
            let next = self.conversation.messages[1..].iter().position(|m| m.role == Role::User).map_or(1, |i| i + 1);
            self.conversation.messages.drain(..next);
            dropped += next;
        }
    }
}

fn tell(out: &mut dyn Write, line: &str) -> Result<()> {
    writeln!(out, "{line}").map_err(GenerateError::Write)
}
