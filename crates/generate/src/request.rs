//! What goes into a generation and what comes out of it.

use std::ops::ControlFlow;

use phalanx_models::ModelConfig;

use crate::error::{GenerateError, Result};
use crate::sampling::SamplingParams;

/// A prompt and how to go on from it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Tokens to go on from; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Tokens that end the generation; the one that did is the last of the result.
    pub stop_token_ids: Vec<u32>,
    /// Of the sampling. Equal requests with equal seeds give equal results, in any batch.
    pub seed: u64,
}

/// A token that was just generated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// Which request it belongs to.
    pub request: usize,
    /// How many tokens of that request came before it.
    pub index: usize,
    /// The token.
    pub id: u32,
    /// Its log-probability under the model, before temperature, penalties and cuts.
    pub logprob: f32,
    /// Whether it is one of the request's stop tokens.
    pub is_stop: bool,
}

/// What a callback answers: go on, or end this request for a reason.
pub type Flow = ControlFlow<FinishReason>;

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token came.
    StopToken,
    /// A stop string came.
    StopString,
    /// `max_new_tokens` were generated.
    Length,
    /// The model's context is full.
    Context,
    /// The caller ended it.
    Cancelled,
}

impl FinishReason {
    /// The name in JSON: `stop` and `length` as in OpenAI's interface; `context` and `cancelled` are ours.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::StopToken | FinishReason::StopString => "stop",
            FinishReason::Length => "length",
            FinishReason::Context => "context",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// The result of a [`Request`].
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Generated tokens, a stop token included.
    pub ids: Vec<u32>,
    /// Log-probability of each under the model: to the bit what a training forward over the same tokens gives in f32.
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens of the prompt that were found in the cache.
    pub cached_tokens: usize,
}

impl Completion {
    /// The generated tokens without a stop token at the end.
    pub fn answer_ids(&self) -> &[u32] {
        match (self.finish_reason, self.ids.split_last()) {
            (FinishReason::StopToken, Some((_, before))) => before,
            _ => &self.ids,
        }
    }
}

impl Request {
    /// Refuses what cannot be generated; `index` names the request in errors.
    ///
    /// # Errors
    /// Names the parameter and the mend.
    pub fn check(&self, index: usize, config: &ModelConfig, context: usize) -> Result<()> {
        self.sampling.check()?;
        if self.prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt { request: index });
        }
        if self.prompt.len() >= context {
            return Err(GenerateError::PromptTooLong { request: index, tokens: self.prompt.len(), context });
        }
        if self.max_new_tokens == 0 {
            return Err(GenerateError::parameter("max_new_tokens", 0, "must be at least 1"));
        }
        let vocab = config.vocab_size;
        for (what, ids) in [("prompt", &self.prompt), ("stop_token_ids", &self.stop_token_ids)] {
            if let Some(place) = ids.iter().position(|&id| id as usize >= vocab) {
                return Err(GenerateError::UnknownToken { request: index, what, place, id: ids[place], vocab });
            }
        }
        Ok(())
    }
}
