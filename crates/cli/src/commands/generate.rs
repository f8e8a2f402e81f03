//! `phalanx generate`

use std::ops::ControlFlow;

use phalanx_data::{Conversation, Message, Role};
use phalanx_generate::{FinishReason, Generator, GeneratorOptions, Request, generate_text};
use serde_json::json;

use super::model;
use crate::args::Generate;
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(a: &Generate) -> Result<Outcome> {
    let mut prompts = a.prompt.clone();
    if let Some(path) = &a.prompt_file {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        // Windows' editors begin a file with a mark that is no text.
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        prompts.extend(text.lines().filter(|l| !l.is_empty()).map(str::to_owned));
    }
    if prompts.is_empty() {
        return Err("no prompt: give --prompt TEXT (several times for several) or --prompt-file FILE".into());
    }
    if a.model.template.is_some() && !a.chat {
        return Err("--template: is for chats; add --chat, or leave it out to continue the prompt as plain text".into());
    }
    let loaded = model::load(&a.model)?;
    let tokenizer = loaded.job.tokenizer()?;
    let sampling = loaded.sampling(&a.sampling)?;
    let max_new_tokens = loaded.max_new_tokens(&a.sampling, 256);
    let mut stops: Vec<u32> = tokenizer.stop_ids().to_vec();
    stops.extend(loaded.stop_token_ids()?);
    let template = if a.chat { Some(loaded.job.template(&tokenizer)?.0) } else { None };
    if let Some(t) = &template {
        stops.extend(t.stop_ids(&tokenizer)?);
    }
    stops.sort_unstable();
    stops.dedup();
    let mut requests = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let ids = match &template {
            None => tokenizer.encode_plain(prompt)?,
            Some(t) => {
                let chat = Conversation {
                    system: a.system.clone(),
                    messages: vec![Message::new(Role::User, prompt.clone())],
                    ..Conversation::default()
                };
                t.prompt_ids(&tokenizer, &chat)?
            }
        };
        requests.push(Request {
            prompt: ids,
            max_new_tokens,
            sampling,
            stop_token_ids: stops.clone(),
            seed: a.sampling.seed.wrapping_add(i as u64),
        });
    }
    let lens: Vec<usize> = requests.iter().map(|r| r.prompt.len()).collect();
    let options = GeneratorOptions { max_batch: a.max_batch, ..GeneratorOptions::default() };
    let mut generator = Generator::new(&loaded.job.model, &loaded.env, options)?;
    let text = loaded.text(&a.sampling);
    let alone = prompts.len() == 1 && !a.json;
    let mut shown = alone && !a.chat;
    let started = std::time::Instant::now();
    let done = generate_text(&mut generator, &tokenizer, requests, &text, &mut |_, piece| {
        // The prompt stands before the answer, but not before a mistake.
        let before = if std::mem::take(&mut shown) { prompts[0].as_str() } else { "" };
        if alone && out::text(format_args!("{before}{piece}")).is_err() {
            // Nobody reads on; the next line that is written says so.
            return Ok(ControlFlow::Break(FinishReason::Cancelled));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let tokens: usize = done.iter().map(|d| d.completion.ids.len()).sum();
    if a.json {
        for (i, d) in done.iter().enumerate() {
            out::line(json!({"prompt": prompts[i], "text": d.text, "token_ids": d.completion.ids,
                "logprobs": d.completion.logprobs, "finish_reason": d.completion.finish_reason.as_str(),
                "prompt_tokens": lens[i]}))?;
        }
    } else if alone {
        out::line(if shown { prompts[0].as_str() } else { "" })?;
    } else {
        for (i, d) in done.iter().enumerate() {
            out::line(format_args!("--- {}\n{}", prompts[i], d.text))?;
        }
    }
    if !a.json {
        eprintln!("{tokens} tokens in {seconds:.2} s, {:.1} tokens/s", tokens as f64 / seconds);
    }
    Ok(Outcome::Done)
}
