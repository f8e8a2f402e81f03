//! `phalanx chat`

use std::io::{BufRead, IsTerminal, Write};
use std::sync::Arc;

use phalanx_generate::chat::{ChatOptions, ChatSession, Next};
use phalanx_generate::{Generator, GeneratorOptions};

use super::model;
use crate::args::Chat;
use crate::outcome::{Outcome, Result, chain};

pub fn run(a: &Chat) -> Result<Outcome> {
    let loaded = model::load(&a.model)?;
    let tokenizer = loaded.job.tokenizer()?;
    let (template, notes) = loaded.job.template(&tokenizer)?;
    notes.iter().for_each(|n| eprintln!("note: {n}"));
    let options = ChatOptions {
        sampling: loaded.sampling(&a.sampling)?,
        max_new_tokens: loaded.max_new_tokens(&a.sampling, 1024),
        text: loaded.text(&a.sampling),
        stop_token_ids: loaded.stop_token_ids()?,
        seed: a.sampling.seed,
        system: a.system.clone().or_else(|| loaded.job.config.data.default_system.clone()),
    };
    let generator = Generator::new(&loaded.job.model, &loaded.env, GeneratorOptions::default())?;
    let mut session = ChatSession::new(generator, &tokenizer, &template, options)?;
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&session.interrupt()))?;
    let (stdin, mut out) = (std::io::stdin(), std::io::stdout());
    let at_terminal = stdin.is_terminal();
    if at_terminal {
        writeln!(out, "/help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation")?;
    }
    let mut bytes = Vec::new();
    loop {
        if at_terminal {
            write!(out, "{} ", super::style().bold(">"))?;
            out.flush()?;
        }
        bytes.clear();
        match stdin.lock().read_until(b'\n', &mut bytes) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e.into()),
        }
        // What is no UTF-8 (a pasted file, a terminal of another encoding) is shown to the model as replacement marks.
        match session.line(&String::from_utf8_lossy(&bytes), &mut out) {
            Ok(Next::Exit) => break,
            Ok(Next::Line) => {}
            // A question that cannot be answered does not end the conversation.
            Err(e) => eprintln!("error: {}", chain(&e)),
        }
    }
    Ok(Outcome::Done)
}
