//! Records that hold a list of messages: ShareGPT's `{from, value}` and OpenAI's `{role, content, tool_calls}`.
//!
//! The two differ in names only (which `tags` can change anyway) and in how a function call is written, so one reader
//! understands both.

use serde_json::{Map, Value, json};

use super::{DatasetSpec, Fields, Problem, ProblemKind, missing, text_field, wrong_type};
use crate::error::nearest;
use crate::record::{Conversation, Message, Role, ToolCall};

pub(super) fn convert(spec: &DatasetSpec, record: &Fields) -> Result<Conversation, Problem> {
    let key = spec.columns.messages.as_deref().unwrap_or("messages");
    let list = match record.get(key) {
        None | Some(Value::Null) => return Err(missing(record, key)),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type(key, "a list of messages", other)),
    };
    let mut conversation = Conversation::default();
    if let Some(key) = &spec.columns.system {
        conversation.system = text_field(record, key)?.filter(|s| !s.is_empty()).map(String::from);
    }
    if let Some(key) = &spec.columns.tools {
        conversation.tools = tools(record.get(key), key)?;
    }
    for (i, value) in list.iter().enumerate() {
        let message = message(spec, value, &format!("{key}[{i}]"))?;
        if i == 0 && message.role == Role::System {
            // An empty one is kept: many templates put their own where there is none.
            conversation.system = Some(message.content);
        } else {
            conversation.messages.push(message);
        }
    }
    if spec.ranking {
        let key = spec.columns.chosen.as_deref().unwrap_or("chosen");
        let chosen = match record.get(key) {
            Some(Value::String(text)) => Message::new(Role::Assistant, text.as_str()),
            Some(value @ Value::Object(_)) => message(spec, value, key)?,
            Some(other) => return Err(wrong_type(key, "a message", other)),
            None => return Err(missing(record, key)),
        };
        conversation.messages.push(chosen);
    }
    let mut answers = 0;
    for message in conversation.messages.iter_mut().filter(|m| m.role == Role::Assistant) {
        let empty = message.content.trim().is_empty() && message.tool_calls.is_empty();
        message.trained &= !empty;
        answers += usize::from(!empty);
    }
    if answers == 0 {
        return Err(Problem::new(ProblemKind::EmptyAnswer, format!("\"{key}\" holds no answer of the assistant")));
    }
    Ok(conversation)
}

fn message(spec: &DatasetSpec, value: &Value, at: &str) -> Result<Message, Problem> {
    let tags = &spec.tags;
    let Some(fields) = value.as_object() else {
        return Err(wrong_type(at, "a message object", value));
    };
    let role_name = match fields.get(&tags.role_tag) {
        Some(Value::String(role)) => role.as_str(),
        Some(other) => return Err(wrong_type(&format!("{at}.{}", tags.role_tag), "a string", other)),
        None => {
            let keys = fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(Problem::new(
                ProblemKind::MissingField,
                format!(
                    "{at} has no \"{}\" (there are: {keys}); set tags.role_tag in dataset_info.json",
                    tags.role_tag
                ),
            ));
        }
    };
    let content = content(fields.get(&tags.content_tag), &format!("{at}.{}", tags.content_tag))?;
    let is_call = role_name == tags.function_tag && tags.function_tag != tags.observation_tag;
    let role = match role_name {
        r if r == tags.user_tag => Role::User,
        r if r == tags.assistant_tag => Role::Assistant,
        r if r == tags.system_tag => Role::System,
        r if r == tags.observation_tag => Role::Tool,
        _ if is_call && spec.format == super::Format::Openai => Role::Tool,
        _ if is_call => Role::Assistant,
        // Names that mean the same everywhere, whatever the tags say.
        "developer" => Role::System,
        other => {
            let known =
                [&tags.user_tag, &tags.assistant_tag, &tags.system_tag, &tags.observation_tag, &tags.function_tag];
            let near = nearest(other, known.iter().map(|s| s.as_str()));
            let hint = near.map_or(String::new(), |n| format!(", did you mean \"{n}\"?"));
            return Err(Problem::new(
                ProblemKind::UnknownRole,
                format!(
                    "{at} has the unknown role \"{other}\"{hint}; known are {}; set tags in dataset_info.json",
                    known.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(", ")
                ),
            ));
        }
    };
    let mut message = Message::new(role, "");
    if is_call && role == Role::Assistant {
        message.tool_calls = written_calls(&content, at)?;
    } else {
        message.content = content;
    }
    message.reasoning = text_field(fields, "reasoning_content")?.map(String::from);
    message.tool_call_id = text_field(fields, "tool_call_id")?.map(String::from);
    message.name = text_field(fields, "name")?.map(String::from);
    match fields.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) => {
            message.tool_calls = calls.iter().map(|call| tool_call(call, at)).collect::<Result<_, _>>()?;
        }
        Some(other) => return Err(wrong_type(&format!("{at}.tool_calls"), "a list", other)),
    }
    // OpenAI's fine-tuning files switch an answer off with a weight of 0.
    if fields.get("weight").and_then(Value::as_f64) == Some(0.0) {
        message.trained = false;
    }
    Ok(message)
}

/// A string, or OpenAI's list of parts, of which only texts are understood.
fn content(value: Option<&Value>, at: &str) -> Result<String, Problem> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(s)) => Ok(s.clone()),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for part in parts {
                match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
                    (Some("text") | None, Some(t)) => text.push_str(t),
                    (kind, _) => {
                        return Err(Problem::new(
                            ProblemKind::NotText,
                            format!(
                                "{at} holds a part of type \"{}\"; only text can be trained on so far",
                                kind.unwrap_or("?")
                            ),
                        ));
                    }
                }
            }
            Ok(text)
        }
        Some(other) => Err(wrong_type(at, "a string", other)),
    }
}

/// A call written out as text: one object or a list of them.
fn written_calls(content: &str, at: &str) -> Result<Vec<ToolCall>, Problem> {
    let value: Value = serde_json::from_str(content).map_err(|e| {
        Problem::new(ProblemKind::BadToolCall, format!("{at} is a function call but not JSON ({e}): {}", clip(content)))
    })?;
    match value {
        Value::Array(calls) => calls.iter().map(|call| tool_call(call, at)).collect(),
        call => Ok(vec![tool_call(&call, at)?]),
    }
}

fn tool_call(value: &Value, at: &str) -> Result<ToolCall, Problem> {
    let function = value.get("function").unwrap_or(value);
    let Some(name) = function.get("name").and_then(Value::as_str) else {
        return Err(Problem::new(
            ProblemKind::BadToolCall,
            format!("{at}: a function call needs a \"name\": {}", clip(&value.to_string())),
        ));
    };
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        // OpenAI's interface holds the arguments as a string of JSON, templates want the object.
        Some(Value::String(s)) => match serde_json::from_str::<Value>(s) {
            Ok(parsed @ Value::Object(_)) => parsed,
            _ => Value::String(s.clone()),
        },
        Some(other) => other.clone(),
    };
    let id = value.get("id").and_then(Value::as_str).map(String::from);
    Ok(ToolCall { id, name: name.into(), arguments })
}

/// Function descriptions: a list, or a list in a string; bare functions are wrapped as OpenAI has them.
pub(super) fn tools(value: Option<&Value>, key: &str) -> Result<Vec<Value>, Problem> {
    let list = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::String(s)) if s.trim().is_empty() => return Ok(Vec::new()),
        Some(Value::String(s)) => match serde_json::from_str::<Value>(s) {
            Ok(Value::Array(list)) => list,
            Ok(one @ Value::Object(_)) => vec![one],
            _ => {
                return Err(Problem::new(ProblemKind::WrongType, format!("\"{key}\" is not a JSON list of functions")));
            }
        },
        Some(Value::Array(list)) => list.clone(),
        Some(other) => return Err(wrong_type(key, "a list of functions", other)),
    };
    Ok(list
        .into_iter()
        .map(|tool| if tool.get("function").is_some() { tool } else { json!({"type": "function", "function": tool}) })
        .collect())
}

fn clip(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
