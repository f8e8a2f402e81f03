//! Templates for models that have none, and for configurations that name one of LlamaFactory's.
//!
//! Each renders an answer as it renders a past answer, so that a conversation of many turns is one example.

/// Used when a model has no template and none is named.
pub(super) const FALLBACK: &str = include_str!("named/fallback.jinja");

/// Name, Jinja text. Names are LlamaFactory's; several names may mean the same.
const TABLE: &[(&str, &str)] = &[
    ("alpaca", include_str!("named/alpaca.jinja")),
    ("chatml", include_str!("named/chatml.jinja")),
    ("fallback", FALLBACK),
    ("gemma", include_str!("named/gemma.jinja")),
    ("llama2", include_str!("named/llama2.jinja")),
    ("llama3", include_str!("named/llama3.jinja")),
    ("mistral", include_str!("named/mistral.jinja")),
    ("qwen", include_str!("named/qwen.jinja")),
    ("qwen3", include_str!("named/qwen3.jinja")),
    ("qwen3_nothink", include_str!("named/qwen3_nothink.jinja")),
    ("smollm", include_str!("named/smollm.jinja")),
    ("smollm2", include_str!("named/smollm2.jinja")),
    ("vicuna", include_str!("named/vicuna.jinja")),
    ("zephyr", include_str!("named/zephyr.jinja")),
];

/// The names that `template:` may have, beside `default` and `empty`.
pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|(name, _)| *name)
}

pub(super) fn source(name: &str) -> Option<&'static str> {
    TABLE.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}
