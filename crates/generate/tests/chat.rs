//! A conversation driven by lines.

mod common;

use std::sync::atomic::Ordering;

use phalanx_data::Role;
use phalanx_generate::chat::Next;
use phalanx_generate::{ChatOptions, ChatSession, SamplingParams};

fn options(max_new_tokens: usize) -> ChatOptions {
    ChatOptions { sampling: SamplingParams::at_temperature(1.0), max_new_tokens, ..ChatOptions::default() }
}

fn line(session: &mut ChatSession<'_>, text: &str) -> (String, Next) {
    let mut out = Vec::new();
    let next = session.line(text, &mut out).unwrap();
    (String::from_utf8(out).unwrap(), next)
}

#[test]
fn history_grows_and_commands_change_it() {
    let (tokenizer, template, _folder) = common::tokenizer("chat");
    let (model, env) = common::model(1024);
    let mut s = ChatSession::new(common::generator(&model, &env), &tokenizer, &template, options(20)).unwrap();
    assert_eq!(line(&mut s, "  "), (String::new(), Next::Line));
    let (first, _) = line(&mut s, "hello");
    let answer = s.conversation().messages[1].content.clone();
    assert!(first.starts_with(&answer), "{first:?} {answer:?}");
    assert_eq!(s.conversation().messages[1].role, Role::Assistant);
    line(&mut s, "//not a command");
    assert_eq!(s.conversation().messages[2].content, "/not a command");
    assert_eq!(s.conversation().messages.len(), 4);

    let before = s.conversation().messages[3].content.clone();
    line(&mut s, "/regenerate");
    assert_eq!(s.conversation().messages[2].content, "/not a command");
    assert_ne!(s.conversation().messages[3].content, before, "a new try draws anew");
    line(&mut s, "/undo");
    assert_eq!(s.conversation().messages.len(), 2);
    assert!(line(&mut s, "/history").0.starts_with("user: hello\nassistant: "));

    line(&mut s, "/system Be brief.");
    assert_eq!((s.conversation().system.as_deref(), s.conversation().messages.len()), (Some("Be brief."), 0));
    line(&mut s, "hi");
    line(&mut s, "/clear");
    assert_eq!((s.conversation().system.as_deref(), s.conversation().messages.len()), (Some("Be brief."), 0));
    line(&mut s, "/system");
    assert_eq!(s.conversation().system, None);
    assert!(line(&mut s, "/regenerate").0.contains("Nothing"));
    assert!(line(&mut s, "/sytem x").0.contains("/help"));
    assert!(line(&mut s, "/help").0.contains("/clear"));
    assert_eq!(line(&mut s, "/exit").1, Next::Exit);
}

#[test]
fn the_cache_is_reused_and_changes_no_answer() {
    let (tokenizer, template, _folder) = common::tokenizer("reuse");
    let (model, env) = common::model(1024);
    let fresh = || ChatSession::new(common::generator(&model, &env), &tokenizer, &template, options(15)).unwrap();
    let (mut a, mut out) = (fresh(), Vec::new());
    let one = a.say("first question", &mut out).unwrap();
    assert_eq!(one.cached_tokens, 0);
    let two = a.say("second", &mut out).unwrap();
    let head = "<|im_start|>user\nfirst question<|im_end|>\n<|im_start|>assistant\n";
    assert!(two.cached_tokens >= tokenizer.encode(head).unwrap().len());
    // The same seed and text without a cache: after /undo the third draw is made with another seed, so compare first turns.
    let again = fresh().say("first question", &mut out).unwrap();
    assert_eq!((again.ids, again.logprobs), (one.ids, one.logprobs));
}

#[test]
fn a_full_context_forgets_the_oldest_turns_and_says_so() {
    let (tokenizer, template, _folder) = common::tokenizer("full");
    let (model, env) = common::model(160);
    let mut s = ChatSession::new(common::generator(&model, &env), &tokenizer, &template, options(10)).unwrap();
    let mut told = String::new();
    for i in 0..5 {
        told.push_str(&line(&mut s, &format!("question {i}")).0);
        assert_eq!(s.conversation().messages[0].role, Role::User);
    }
    assert!(told.contains("forgotten"), "{told}");
    // One question that never fits is refused and does not stay.
    let before = s.conversation().messages.len();
    let error = s.line(&"long ".repeat(40), &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("shorten"), "{error}");
    assert!(s.conversation().messages.len() <= before);
    assert!(s.conversation().messages.iter().all(|m| !m.content.starts_with("long ")));
}

#[test]
fn an_interrupt_ends_the_answer_and_keeps_it() {
    struct Stopper(std::sync::Arc<std::sync::atomic::AtomicBool>, Vec<u8>);
    impl std::io::Write for Stopper {
        fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
            self.0.store(true, Ordering::Relaxed);
            self.1.extend_from_slice(b);
            Ok(b.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let (tokenizer, template, _folder) = common::tokenizer("interrupt");
    let (model, env) = common::model(1024);
    let mut s = ChatSession::new(common::generator(&model, &env), &tokenizer, &template, options(200)).unwrap();
    let mut out = Stopper(s.interrupt(), vec![]);
    let done = s.say("go on for long", &mut out).unwrap();
    assert_eq!(done.finish_reason.as_str(), "cancelled");
    assert!(done.ids.len() < 20);
    assert!(String::from_utf8(out.1).unwrap().contains("(interrupted)"));
    assert_eq!(s.conversation().messages.len(), 2);
}
