//! Chat templates: from a conversation to the one text that the model sees.
//!
//! The model's own Jinja template is rendered as `transformers` renders it. A few built-in templates stand in for
//! models that have none, or for configurations that name one. Which part of the text the assistant wrote is found by
//! rendering prefixes of the conversation ([`ChatTemplate::examples`]), so it works with any template.

mod answers;
mod builtin;
mod jinja;
mod python;

use std::sync::{Arc, Mutex};

use minijinja::value::{Serde, Value as JinjaValue};
use serde_json::{Map, Value, json};

pub use answers::{RenderedExample, Rendering};
pub use builtin::builtin_names;

use crate::error::{DataError, Result, nearest};
use crate::options::DataOptions;
use crate::record::{Conversation, Message, Role, ToolCall};
use crate::tokenizer::Tokenizer;
use python::Day;

/// A chat template that is ready to render, with the variables that stay the same for every conversation.
#[derive(Clone)]
pub struct ChatTemplate {
    env: jinja::SharedEnvironment,
    name: String,
    source: String,
    variables: Map<String, Value>,
    default_system: Option<String>,
    today: Day,
    /// Parts that have been found to show, so that each is tried once.
    shown: Arc<Mutex<Vec<Part>>>,
}

/// What a conversation may hold beside questions and answers, and a template may be unable to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// A system message.
    System,
    /// The result of a tool.
    ToolRole,
    /// A function call of the assistant.
    ToolCalls,
    /// Descriptions of functions.
    Tools,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Whether `text` is a day, `YYYY-MM-DD`.
pub(crate) fn parse_date(text: &str) -> Option<()> {
    Day::parse(text).map(|_| ())
}

/// Today in UTC: the one place where this crate asks for the time.
fn today() -> Day {
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Day::from_days((seconds / 86_400) as i64)
}

impl ChatTemplate {
    /// The template that `options.template` names: the model's own for none, `default` and `empty`, else a built-in
    /// one. The second value says in sentences what was assumed.
    ///
    /// # Errors
    /// If the name is unknown or the template is not valid Jinja.
    pub fn choose(tokenizer: &Tokenizer, options: &DataOptions) -> Result<(Self, Vec<String>)> {
        let named = options.template.as_deref().filter(|n| !matches!(*n, "default" | "empty"));
        let (name, source, notes) = match (named, tokenizer.chat_template()) {
            (Some(name), own) => {
                let Some(source) = builtin::source(name) else {
                    let near = nearest(name, builtin_names()).map_or(String::new(), |n| format!(" (nearest: {n})"));
                    return Err(DataError::option(
                        "template",
                        format!(
                            "\"{name}\" is not built in{near}; known are {}; leave the key out to use the model's own template",
                            builtin_names().collect::<Vec<_>>().join(", ")
                        ),
                    ));
                };
                let notes = match own {
                    Some((file, own)) if own.trim() != source.trim() => {
                        vec![format!("template: {name} is used in place of the model's own ({file})")]
                    }
                    _ => Vec::new(),
                };
                (name.to_owned(), source, notes)
            }
            (None, Some((file, text))) => (file.to_owned(), text, Vec::new()),
            (None, None) => {
                let note = "the model has no chat template; the built-in \"fallback\" (Human:/Assistant:) is used, \
                            name another with template:";
                ("fallback".to_owned(), builtin::FALLBACK, vec![note.into()])
            }
        };
        Ok((Self::from_source(&name, source, tokenizer, options)?, notes))
    }

    /// A template from its Jinja text. `name` is for messages.
    ///
    /// # Errors
    /// If the text is not valid Jinja.
    pub fn from_source(name: &str, source: &str, tokenizer: &Tokenizer, options: &DataOptions) -> Result<Self> {
        let today = match &options.template_date {
            Some(date) => {
                Day::parse(date).ok_or_else(|| DataError::option("template_date", "is not a day; write YYYY-MM-DD"))?
            }
            None => today(),
        };
        let env = jinja::environment(source, today)
            .map_err(|e| DataError::Template { name: name.into(), detail: jinja::explain(&e) })?;
        let mut variables = tokenizer.named_tokens().clone();
        if let Some(thinking) = options.enable_thinking {
            variables.insert("enable_thinking".into(), thinking.into());
        }
        variables.extend(options.template_kwargs.clone());
        Ok(Self {
            env: Arc::new(env),
            name: name.into(),
            source: source.into(),
            variables,
            default_system: options.default_system.clone().filter(|s| !s.is_empty()),
            today,
            shown: Arc::default(),
        })
    }

    /// Where the template comes from: a file, or the name of a built-in one.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The Jinja text, for instance to be written beside an exported model.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The day (`YYYY-MM-DD`) that the template prints, if it is one that asks for it.
    pub fn date(&self) -> Option<String> {
        let Day { year, month, day } = self.today;
        self.source.contains("strftime_now").then(|| format!("{year:04}-{month:02}-{day:02}"))
    }

    /// The text of a conversation, with the head of the next answer if asked for.
    ///
    /// # Errors
    /// What the template raises, for instance about the order of roles.
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<String> {
        self.render_first(conversation, conversation.messages.len(), add_generation_prompt)
    }

    /// Renders the first `n` messages.
    fn render_first(&self, conversation: &Conversation, n: usize, add_generation_prompt: bool) -> Result<String> {
        let mut context = self.variables.clone();
        let system = conversation.system.as_deref().or(self.default_system.as_deref());
        let head = system.map(|text| json!({"role": "system", "content": text}));
        let turns = conversation.messages[..n].iter().map(Message::to_template_value);
        context.insert("messages".into(), head.into_iter().chain(turns).collect());
        let tools = &conversation.tools;
        // As transformers passes it: none, not an empty list, when there are no tools.
        context.insert("tools".into(), if tools.is_empty() { Value::Null } else { Value::Array(tools.clone()) });
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        self.env
            .get_template(jinja::TEMPLATE)
            .and_then(|template| template.render(JinjaValue::from(Serde(&context))))
            .map_err(|e| DataError::Template { name: self.name.clone(), detail: jinja::explain(&e) })
    }

    /// The ids that a generation starts from: the conversation and the head of the answer, BOS as the template has it.
    ///
    /// # Errors
    /// As [`Self::render`] and [`Tokenizer::encode`].
    pub fn prompt_ids(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Vec<u32>> {
        tokenizer.encode(&self.render(conversation, true)?)
    }

    /// Every id that ends an answer: those of the model's files, and the special token that the template writes
    /// after an answer (`<|im_end|>` on a base model whose EOS is another one).
    ///
    /// # Errors
    /// If the tokenizer fails. A template that cannot render the trial conversation adds nothing.
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let mut stops = tokenizer.stop_ids().to_vec();
        const ANSWER: &str = "qzanswerqz";
        let mut trial = Conversation::user("a");
        trial.messages.push(Message::new(Role::Assistant, ANSWER));
        if let Ok(text) = self.render(&trial, false)
            && let Some(at) = text.rfind(ANSWER)
        {
            let tail = tokenizer.encode(&text[at + ANSWER.len()..])?;
            if let Some(stop) = tail.into_iter().find(|id| tokenizer.is_special(*id))
                && !stops.contains(&stop)
            {
                stops.push(stop);
            }
        }
        Ok(stops)
    }

    /// Refuses a conversation that holds something the template does not show, which would be lost without a word.
    ///
    /// # Errors
    /// Names the part and the mend, or what the template raises.
    pub fn check_parts(&self, conversation: &Conversation) -> Result<()> {
        for part in parts(conversation) {
            // A lock is poisoned only if a thread panicked while pushing; the list stays usable.
            let known = self.shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner).contains(&part);
            if !known {
                self.try_part(part)?;
                self.shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(part);
            }
        }
        Ok(())
    }

    /// Renders a trial conversation with the part in it and looks whether it shows.
    fn try_part(&self, part: Part) -> Result<()> {
        const MARK: &str = "qzmarkqz";
        let mut trial = Conversation::user("a");
        let call = |name: &str| ToolCall {
            id: Some("abcdefghi".into()),
            name: name.into(),
            arguments: Value::Object(Map::new()),
        };
        let what = match part {
            Part::System => {
                trial.system = Some(MARK.into());
                "a system message"
            }
            Part::Tools => {
                let function = json!({"name": MARK, "description": "d",
                    "parameters": {"type": "object", "properties": {}, "required": []}});
                trial.tools = vec![json!({"type": "function", "function": function})];
                "tools"
            }
            Part::ToolCalls | Part::ToolRole => {
                let (name, result) = if part == Part::ToolCalls { (MARK, "r") } else { ("f", MARK) };
                trial.messages.push(Message { tool_calls: vec![call(name)], ..Message::new(Role::Assistant, "") });
                trial.messages.push(Message {
                    tool_call_id: Some("abcdefghi".into()),
                    name: Some(name.into()),
                    ..Message::new(Role::Tool, result)
                });
                if part == Part::ToolCalls { "function calls" } else { "messages with the role tool" }
            }
        };
        let mend = "choose a template that has them, for instance template: qwen";
        let text = match self.render(&trial, false) {
            Ok(text) => text,
            Err(DataError::Template { name, detail }) => {
                return Err(DataError::Template { name, detail: format!("cannot show {what}: {detail}; {mend}") });
            }
            Err(e) => return Err(e),
        };
        if text.contains(MARK) {
            return Ok(());
        }
        Err(DataError::Template {
            name: self.name.clone(),
            detail: format!("leaves out {what}, which the data holds: the model would never see them; {mend}"),
        })
    }

    /// Everything that decides what this template prints, for the cache key.
    pub(crate) fn hash_into(&self, hasher: &mut blake3::Hasher) {
        let today = self.date().unwrap_or_default();
        for part in [&self.source, &json!(self.variables).to_string(), &json!(self.default_system).to_string(), &today]
        {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
    }
}

/// The parts that a conversation holds.
fn parts(conversation: &Conversation) -> impl Iterator<Item = Part> {
    let messages = &conversation.messages;
    [
        (Part::System, conversation.system.is_some() || messages.iter().any(|m| m.role == Role::System)),
        (Part::Tools, !conversation.tools.is_empty()),
        (Part::ToolCalls, messages.iter().any(|m| !m.tool_calls.is_empty())),
        (Part::ToolRole, messages.iter().any(|m| m.role == Role::Tool)),
    ]
    .into_iter()
    .filter_map(|(part, held)| held.then_some(part))
}
