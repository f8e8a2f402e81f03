//! From a sample to token ids with a mask of the tokens that are trained.
//!
//! The rule for conversations is that training shows exactly what inference produces:
//!
//! ```text
//! ids(example) = ids(prompt given at inference) + ids(answer) + stop token        trained: answer and stop token
//! ```
//!
//! The whole text is tokenised at once, and the mask follows from the byte range of each token. Where a token would
//! reach over the border of prompt and answer, inference could not produce it; the text is then tokenised in two
//! pieces at that border. What a template writes after the stop token (a line feed, mostly) is not trained, and the
//! example ends with the stop token of its last answer. A template without one gets EOS appended.

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};
use crate::formats::Record;
use crate::options::{DataOptions, Stage};
use crate::record::{Conversation, Sample};
use crate::template::{ChatTemplate, RenderedExample};
use crate::tokenizer::{IdsAndOffsets, Tokenizer};

/// A document as token ids.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    /// The tokens.
    pub ids: Vec<u32>,
    /// For each token, whether predicting it counts in the loss. (The first token is never predicted.)
    pub trained: Vec<bool>,
}

impl Example {
    /// The number of tokens whose prediction counts.
    pub fn num_targets(&self) -> usize {
        self.trained.iter().skip(1).filter(|t| **t).count()
    }
}

/// What happened while encoding, summed over a data set.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EncodeStats {
    /// Records read.
    pub records: u64,
    /// Records without an answer or text, left out.
    pub empty_records: u64,
    /// Records that could not be understood, left out (`skip_bad_samples`).
    pub bad_records: u64,
    /// Where the first of those stands and what is wrong with it.
    pub first_bad: Option<String>,
    /// Examples made.
    pub examples: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// Tokens in them whose prediction counts.
    pub targets: u64,
    /// Examples cut to `cutoff_len`.
    pub cut_examples: u64,
    /// Tokens that were cut off, those of dropped examples included.
    pub cut_tokens: u64,
    /// Examples left out because no trained token was left after the cut.
    pub dropped_examples: u64,
    /// Conversations that became several examples because the template rewrites past answers.
    pub split_conversations: u64,
    /// Answers not trained for the same reason (`rewritten_history: last_turn`).
    pub untrained_answers: u64,
    /// Answers that do not continue the generation prompt to the letter.
    pub mismatched_prompts: u64,
    /// Borders of prompt and answer inside a token.
    pub merged_borders: u64,
    /// Examples that got EOS because the template ends an answer with no stop token.
    pub appended_eos: u64,
    /// Answers that end with no stop token at all.
    pub missing_stop: u64,
    /// Length of the longest example before the cut, in tokens.
    pub longest: u64,
}

impl EncodeStats {
    /// Adds another count to this one.
    pub fn add(&mut self, other: &Self) {
        self.records += other.records;
        self.empty_records += other.empty_records;
        self.bad_records += other.bad_records;
        if self.first_bad.is_none() {
            self.first_bad.clone_from(&other.first_bad);
        }
        self.examples += other.examples;
        self.tokens += other.tokens;
        self.targets += other.targets;
        self.cut_examples += other.cut_examples;
        self.cut_tokens += other.cut_tokens;
        self.dropped_examples += other.dropped_examples;
        self.split_conversations += other.split_conversations;
        self.untrained_answers += other.untrained_answers;
        self.mismatched_prompts += other.mismatched_prompts;
        self.merged_borders += other.merged_borders;
        self.appended_eos += other.appended_eos;
        self.missing_stop += other.missing_stop;
        self.longest = self.longest.max(other.longest);
    }

    /// What a user should know, in sentences.
    pub fn messages(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut say = |n: u64, text: String| {
            if n > 0 {
                out.push(text);
            }
        };
        say(
            self.empty_records,
            format!("{} of {} records have no answer or text: left out", self.empty_records, self.records),
        );
        say(
            self.bad_records,
            format!(
                "{} of {} records are not understood: left out (skip_bad_samples); the first: {}",
                self.bad_records,
                self.records,
                self.first_bad.as_deref().unwrap_or("?")
            ),
        );
        say(
            self.cut_examples,
            format!(
                "cutoff_len cut {} of {} examples, {} tokens in all; the longest has {} tokens",
                self.cut_examples,
                self.examples + self.dropped_examples,
                self.cut_tokens,
                self.longest
            ),
        );
        say(
            self.dropped_examples,
            format!("{} examples have no trained token within cutoff_len: left out", self.dropped_examples),
        );
        say(
            self.split_conversations,
            format!(
                "the template rewrites past answers: {} conversations became several examples, one for each such answer \
                 (rewritten_history: last_turn trains the last only)",
                self.split_conversations
            ),
        );
        say(
            self.untrained_answers,
            format!("the template rewrites past answers: {} of them are not trained", self.untrained_answers),
        );
        say(
            self.mismatched_prompts,
            format!(
                "{} answers do not continue the template's generation prompt to the letter",
                self.mismatched_prompts
            ),
        );
        say(
            self.merged_borders,
            format!(
                "{} answers begin inside a token; they were tokenised apart from their prompt",
                self.merged_borders
            ),
        );
        say(
            self.appended_eos,
            format!("the template ends answers with no stop token: EOS was appended to {} examples", self.appended_eos),
        );
        say(
            self.missing_stop,
            format!("{} answers end with no stop token: the model will not learn to stop there", self.missing_stop),
        );
        out
    }
}

/// Turns samples into examples; shared between threads.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    options: &'a DataOptions,
    stops: Vec<u32>,
}

impl<'a> Encoder<'a> {
    /// `template` may be missing for stage `pt` only.
    ///
    /// # Errors
    /// If it is missing for stage `sft`, or the tokenizer fails.
    pub fn new(tokenizer: &'a Tokenizer, template: Option<&'a ChatTemplate>, options: &'a DataOptions) -> Result<Self> {
        let stops = match template {
            Some(template) => template.stop_ids(tokenizer)?,
            None if options.stage == Stage::Sft => {
                return Err(DataError::option("template", "stage sft needs a chat template"));
            }
            None => tokenizer.stop_ids().to_vec(),
        };
        Ok(Self { tokenizer, template, options, stops })
    }

    /// Every id that ends an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stops
    }

    /// The examples of one sample, none if nothing of it can be trained; adds to the counts.
    ///
    /// # Errors
    /// If the template or the tokenizer refuses the sample, or it does not fit the stage.
    pub fn encode(&self, sample: &Sample, stats: &mut EncodeStats) -> Result<Vec<Example>> {
        match (sample, self.options.stage, self.template) {
            (Sample::Text(text), Stage::Pt, _) => self.text(text, stats),
            (Sample::Chat(conversation), Stage::Sft, Some(template)) => self.chat(conversation, template, stats),
            (Sample::Text(_), ..) => {
                Err(DataError::option("stage", "sft trains on answers, but the data is plain text; use pt"))
            }
            (Sample::Chat(_), ..) => {
                Err(DataError::option("stage", "pt trains on texts, but the data is conversations; use sft"))
            }
        }
    }

    /// Encodes a record. One without answer or text is counted and gives nothing, and so does one that cannot be
    /// understood if `skip_bad_samples` is set.
    ///
    /// # Errors
    /// As [`Self::encode`], with the record's place.
    pub fn encode_record(&self, record: &Record) -> Result<(Vec<Example>, EncodeStats)> {
        let mut stats = EncodeStats { records: 1, ..EncodeStats::default() };
        let error = match &record.sample {
            Ok(sample) => match self.encode(sample, &mut stats) {
                Ok(examples) => return Ok((examples, stats)),
                Err(DataError::Template { name, detail }) => {
                    let detail = format!("chat template {name}: {detail}");
                    DataError::record(&record.path, record.place.to_string(), detail)
                }
                Err(e) => return Err(e),
            },
            Err(problem) if problem.is_empty_record() => {
                stats.empty_records = 1;
                return Ok((Vec::new(), stats));
            }
            Err(problem) => record.error(problem),
        };
        if !self.options.skip_bad_samples {
            return Err(error);
        }
        let first_bad = Some(error.to_string());
        Ok((Vec::new(), EncodeStats { records: 1, bad_records: 1, first_bad, ..EncodeStats::default() }))
    }

    /// Text and EOS, in pieces of `cutoff_len`. Each piece is a document of its own.
    fn text(&self, text: &str, stats: &mut EncodeStats) -> Result<Vec<Example>> {
        let mut ids = self.tokenizer.encode_plain(text)?;
        match self.tokenizer.eos() {
            Some(eos) => ids.push(eos),
            None => stats.missing_stop += 1,
        }
        stats.longest = stats.longest.max(ids.len() as u64);
        let mut out = Vec::new();
        for piece in ids.chunks(self.options.cutoff_len) {
            // One token alone predicts nothing.
            if piece.len() > 1 {
                out.push(Example { ids: piece.to_vec(), trained: vec![true; piece.len()] });
            } else {
                stats.cut_tokens += 1;
            }
        }
        count(&out, stats);
        Ok(out)
    }

    fn chat(&self, chat: &Conversation, template: &ChatTemplate, stats: &mut EncodeStats) -> Result<Vec<Example>> {
        template.check_parts(chat)?;
        let rendering = template.examples(chat, self.options)?;
        stats.split_conversations += u64::from(rendering.examples.len() > 1);
        stats.untrained_answers += rendering.untrained_answers as u64;
        stats.mismatched_prompts += rendering.mismatched_prompts as u64;
        let mut out = Vec::new();
        for rendered in &rendering.examples {
            let mut example = self.mask(rendered, stats)?;
            let len = example.ids.len();
            stats.longest = stats.longest.max(len as u64);
            if len > self.options.cutoff_len {
                stats.cut_examples += 1;
                stats.cut_tokens += (len - self.options.cutoff_len) as u64;
                example.ids.truncate(self.options.cutoff_len);
                example.trained.truncate(self.options.cutoff_len);
            }
            if example.num_targets() == 0 {
                stats.dropped_examples += 1;
                stats.cut_tokens += example.ids.len() as u64;
            } else {
                out.push(example);
            }
        }
        count(&out, stats);
        Ok(out)
    }

    fn mask(&self, rendered: &RenderedExample, stats: &mut EncodeStats) -> Result<Example> {
        let (ids, offsets) = self.tokenise(&rendered.text, rendered, stats)?;
        let (example, stopped, missing) = self.mask_tokens(ids, &offsets, rendered);
        stats.missing_stop += missing;
        if stopped {
            return Ok(example);
        }
        // The template ends its last answer without a stop token: the text ends with the answer's words, then EOS.
        let text = &rendered.text[..words_end(rendered, rendered.answers.len() - 1)];
        let (ids, offsets) = self.tokenise(text, rendered, &mut EncodeStats::default())?;
        let (mut example, ..) = self.mask_tokens(ids, &offsets, rendered);
        match self.tokenizer.eos() {
            Some(eos) => {
                stats.appended_eos += 1;
                example.ids.push(eos);
                example.trained.push(true);
            }
            None => stats.missing_stop += 1,
        }
        Ok(example)
    }

    /// Marks the answers, each up to its stop token, and ends the example there. Says whether the last answer has a
    /// stop token, and how many of the others have none.
    fn mask_tokens(
        &self,
        mut ids: Vec<u32>,
        offsets: &[(usize, usize)],
        rendered: &RenderedExample,
    ) -> (Example, bool, u64) {
        let token_at = |byte: usize| offsets.partition_point(|(start, _)| *start < byte);
        let mut trained = vec![self.options.train_on_prompt; ids.len()];
        let (mut end, mut stopped, mut missing) = (ids.len(), false, 0);
        for (i, answer) in rendered.answers.iter().enumerate() {
            let (mut first, past) = (token_at(answer.start), token_at(answer.end));
            // A token that holds the end of the prompt and could not be divided still begins the answer.
            if first > 0 && offsets[first - 1].1 > answer.start {
                first -= 1;
            }
            // A stop token inside the message's own words ends nothing.
            let after_words = rendered.words_end[i].unwrap_or(answer.start);
            let stop = (first..past).rev().find(|t| self.stops.contains(&ids[*t]) && offsets[*t].0 >= after_words);
            end = stop.map_or_else(|| token_at(words_end(rendered, i)).max(first), |t| t + 1);
            stopped = stop.is_some();
            missing += u64::from(!stopped && i + 1 < rendered.answers.len());
            trained[first..end].fill(true);
        }
        ids.truncate(end);
        trained.truncate(end);
        (Example { ids, trained }, stopped, missing)
    }

    /// Tokenises in one go; where a token reaches over the beginning of an answer, in pieces at that border.
    fn tokenise(&self, text: &str, rendered: &RenderedExample, stats: &mut EncodeStats) -> Result<IdsAndOffsets> {
        let whole = self.tokenizer.encode_offsets(text)?;
        let is_inside = |border: usize| {
            let at = whole.1.partition_point(|(start, _)| *start < border);
            at > 0 && whole.1[at - 1].1 > border
        };
        let borders: Vec<usize> = rendered.answers.iter().map(|a| a.start).filter(|b| is_inside(*b)).collect();
        if borders.is_empty() {
            return Ok(whole);
        }
        stats.merged_borders += borders.len() as u64;
        let wanted = self.tokenizer.decode(&whole.0, false)?;
        // SentencePiece models put a space in front of each piece, so one that is there already is left to them.
        for leave_space in [false, true] {
            let (mut ids, mut offsets, mut from) = (Vec::new(), Vec::new(), 0);
            for to in borders.iter().copied().chain([text.len()]) {
                let skipped = usize::from(leave_space && from > 0 && text[from..to].starts_with(' '));
                let (piece, spans) = self.tokenizer.encode_offsets(&text[from + skipped..to])?;
                ids.extend(piece);
                offsets.extend(spans.into_iter().map(|(start, end)| (start + from + skipped, end + from + skipped)));
                from = to;
            }
            if self.tokenizer.decode(&ids, false)? == wanted {
                return Ok((ids, offsets));
            }
        }
        Ok(whole)
    }
}

/// Where answer `i` ends without what the template puts after it.
fn words_end(rendered: &RenderedExample, i: usize) -> usize {
    let answer = &rendered.answers[i];
    rendered.words_end[i].unwrap_or_else(|| rendered.text[..answer.end].trim_end().len().max(answer.start))
}

fn count(examples: &[Example], stats: &mut EncodeStats) {
    for example in examples {
        stats.examples += 1;
        stats.tokens += example.ids.len() as u64;
        stats.targets += example.num_targets() as u64;
    }
}
