//! Alpaca records: an instruction, perhaps more input, an answer, perhaps earlier turns.

use serde_json::Value;

use super::{DatasetSpec, Fields, Problem, ProblemKind, messages, missing, text_field, wrong_type};
use crate::record::{Conversation, Message, Role};

pub(super) fn convert(spec: &DatasetSpec, record: &Fields) -> Result<Conversation, Problem> {
    let columns = &spec.columns;
    let mut conversation = Conversation::default();
    if let Some(key) = &columns.system {
        conversation.system = text_field(record, key)?.filter(|s| !s.is_empty()).map(String::from);
    }
    if let Some(key) = &columns.tools {
        conversation.tools = messages::tools(record.get(key), key)?;
    }
    if let Some(key) = &columns.history {
        history(record.get(key), key, &mut conversation.messages)?;
    }
    let mut parts = Vec::new();
    let prompt_key = columns.prompt.as_deref().unwrap_or("instruction");
    let prompt = text_field(record, prompt_key)?;
    let query = columns.query.as_deref().map(|key| text_field(record, key)).transpose()?.flatten();
    if prompt.is_none() && query.is_none() {
        return Err(missing(record, prompt_key));
    }
    parts.extend(prompt.filter(|s| !s.is_empty()));
    parts.extend(query.filter(|s| !s.is_empty()));
    conversation.messages.push(Message::new(Role::User, parts.join("\n")));

    let answer_key =
        if spec.ranking { columns.chosen.as_deref() } else { columns.response.as_deref() }.unwrap_or("output");
    let answer = match record.get(answer_key) {
        // Preference data in alpaca form may hold the answers as messages.
        Some(Value::Object(message)) => message.get("value").or_else(|| message.get("content")).and_then(Value::as_str),
        Some(Value::Array(list)) if spec.ranking => list.first().and_then(Value::as_str),
        Some(Value::String(s)) => Some(s.as_str()),
        Some(Value::Null) => None,
        None => return Err(missing(record, answer_key)),
        Some(other) => return Err(wrong_type(answer_key, "a string", other)),
    };
    let answer = answer.unwrap_or_default();
    if answer.trim().is_empty() {
        return Err(Problem::new(ProblemKind::EmptyAnswer, format!("the answer \"{answer_key}\" is empty")));
    }
    conversation.messages.push(Message::new(Role::Assistant, answer));
    Ok(conversation)
}

/// `[[question, answer], ...]`, oldest first. Its answers are trained on too, unless `mask_history` is set.
fn history(value: Option<&Value>, key: &str, messages: &mut Vec<Message>) -> Result<(), Problem> {
    let turns = match value {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Array(turns)) => turns,
        Some(other) => return Err(wrong_type(key, "a list of [question, answer] pairs", other)),
    };
    for turn in turns {
        let pair = turn.as_array().map(Vec::as_slice);
        let Some([Value::String(question), Value::String(answer)]) = pair else {
            return Err(wrong_type(key, "a list of [question, answer] pairs of strings", turn));
        };
        messages.push(Message::new(Role::User, question.as_str()));
        messages.push(Message { trained: !answer.trim().is_empty(), ..Message::new(Role::Assistant, answer.as_str()) });
    }
    Ok(())
}
