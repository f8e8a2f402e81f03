//! The one form that every data format is brought into: a conversation, or a text.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Who speaks in a [`Message`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Standing instructions; a template places them its own way.
    System,
    /// The person.
    User,
    /// The model. Only these messages are ever trained on.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name chat templates know the role by.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// A function that the model asks to have called.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The caller's name for this call, if the data has one.
    pub id: Option<String>,
    /// The function's name.
    pub name: String,
    /// The arguments, as a JSON object where the data allowed it (templates want an object, files often hold a string).
    pub arguments: Value,
}

/// One turn of a [`Conversation`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; may be empty where `tool_calls` is not.
    pub content: String,
    /// The thinking before the answer, where the data keeps it apart (`reasoning_content`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Functions the assistant wants called.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Function name on a tool message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether its tokens count in the loss. True for the assistant unless the data says otherwise (`"weight": 0`).
    pub trained: bool,
}

impl Message {
    /// A plain message; trained if it is the assistant's.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            trained: role == Role::Assistant,
        }
    }

    /// The dictionary a chat template sees, with the keys `transformers` users put there.
    pub(crate) fn to_template_value(&self) -> Value {
        let mut map = Map::new();
        map.insert("role".into(), self.role.as_str().into());
        map.insert("content".into(), self.content.as_str().into());
        if let Some(reasoning) = &self.reasoning {
            map.insert("reasoning_content".into(), reasoning.as_str().into());
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| {
                let mut entry = Map::new();
                if let Some(id) = &call.id {
                    entry.insert("id".into(), id.as_str().into());
                }
                entry.insert("type".into(), "function".into());
                entry.insert("function".into(), json!({"name": call.name, "arguments": call.arguments}));
                Value::Object(entry)
            });
            map.insert("tool_calls".into(), calls.collect());
        }
        if let Some(id) = &self.tool_call_id {
            map.insert("tool_call_id".into(), id.as_str().into());
        }
        if let Some(name) = &self.name {
            map.insert("name".into(), name.as_str().into());
        }
        Value::Object(map)
    }
}

/// A dialogue with what stands around it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Conversation {
    /// The system message, kept apart so that `default_system` can fill it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Function descriptions in OpenAI's form: `{"type": "function", "function": {...}}`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Value>,
    /// The turns, without the system message at the head.
    pub messages: Vec<Message>,
}

impl Conversation {
    /// A conversation of one question and nothing else.
    pub fn user(content: impl Into<String>) -> Self {
        Self { messages: vec![Message::new(Role::User, content)], ..Self::default() }
    }

    /// The same conversation cut after `n` messages.
    pub fn prefix(&self, n: usize) -> Self {
        Self { messages: self.messages[..n].to_vec(), ..self.clone() }
    }
}

/// One record of a data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sample {
    /// For supervised fine-tuning.
    Chat(Conversation),
    /// For pre-training.
    Text(String),
}
