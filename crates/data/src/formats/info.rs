//! `dataset_info.json`, LlamaFactory's table of data sets, and files given without it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::files;
use crate::error::{DataError, Result, nearest};
use crate::options::{DataOptions, Stage};

/// How a record holds its conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `instruction`, `input`, `output` and perhaps `history`.
    Alpaca,
    /// A list of `{from, value}` under `conversations`.
    Sharegpt,
    /// A list of `{role, content}` under `messages`, tool calls as OpenAI's interface has them.
    Openai,
    /// A text in one field.
    Text,
}

/// Which field of a record holds what. A `None` field is not looked at.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Columns {
    /// Alpaca: the instruction. For stage `pt`: the text.
    pub prompt: Option<String>,
    /// Alpaca: more input, put below the instruction.
    pub query: Option<String>,
    /// Alpaca: the answer.
    pub response: Option<String>,
    /// Alpaca: earlier turns, `[[question, answer], ...]`.
    pub history: Option<String>,
    /// The system message.
    pub system: Option<String>,
    /// Function descriptions, a JSON list or such a list in a string.
    pub tools: Option<String>,
    /// The list of messages.
    pub messages: Option<String>,
    /// Preference data: the better answer.
    pub chosen: Option<String>,
    /// Preference data: the worse answer.
    pub rejected: Option<String>,
    /// KTO data: the judgement.
    pub kto_tag: Option<String>,
    /// Pictures (refused so far).
    pub images: Option<String>,
    /// Films (refused so far).
    pub videos: Option<String>,
    /// Sounds (refused so far).
    pub audios: Option<String>,
}

/// How messages name their parts and roles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the names are LlamaFactory's and say it all")]
pub struct Tags {
    pub role_tag: String,
    pub content_tag: String,
    pub user_tag: String,
    pub assistant_tag: String,
    pub observation_tag: String,
    pub function_tag: String,
    pub system_tag: String,
}

impl Tags {
    /// The usual names of a format.
    pub fn of(format: Format) -> Self {
        let [role, content, user, assistant, observation, function] = if format == Format::Openai {
            ["role", "content", "user", "assistant", "tool", "function"]
        } else {
            ["from", "value", "human", "gpt", "observation", "function_call"]
        };
        Self {
            role_tag: role.into(),
            content_tag: content.into(),
            user_tag: user.into(),
            assistant_tag: assistant.into(),
            observation_tag: observation.into(),
            function_tag: function.into(),
            system_tag: "system".into(),
        }
    }
}

/// A data set that has been found: its files and how to read them.
#[derive(Debug, Clone, Serialize)]
pub struct DatasetSpec {
    /// The name the user gave.
    pub name: String,
    /// Its files, in reading order.
    pub files: Vec<PathBuf>,
    /// How records are built.
    pub format: Format,
    /// Which field is what.
    pub columns: Columns,
    /// How messages are labelled.
    pub tags: Tags,
    /// Whether it is preference data, of which only the chosen side is read.
    pub ranking: bool,
    /// Use so many records, chosen at random, some twice if there are fewer.
    pub num_samples: Option<usize>,
    /// What was assumed in finding it, in sentences for the user.
    pub notes: Vec<String>,
}

/// The keys of one entry. Keys that only concern downloading are accepted and unused.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Entry {
    file_name: Option<String>,
    hf_hub_url: Option<String>,
    ms_hub_url: Option<String>,
    om_hub_url: Option<String>,
    script_url: Option<String>,
    cloud_file_name: Option<String>,
    formatting: Option<Format>,
    ranking: bool,
    subset: Option<String>,
    split: Option<String>,
    folder: Option<String>,
    num_samples: Option<usize>,
    columns: Columns,
    tags: Map<String, Value>,
}

/// Finds what `name` means: an entry of `dataset_info.json`, else a file or folder.
///
/// # Errors
/// If it is neither, if its entry is wrong, or if it is preference data and `train_on_chosen` is not set.
pub fn resolve(name: &str, options: &DataOptions) -> Result<DatasetSpec> {
    let info_path = options.dataset_dir.join("dataset_info.json");
    let table = read_table(&info_path)?;
    let spec = match table.as_ref().and_then(|t| t.get(name)) {
        Some(entry) => from_entry(name, entry, &info_path, options)?,
        None => match [PathBuf::from(name), options.dataset_dir.join(name)].into_iter().find(|p| p.exists()) {
            Some(path) => detect(name, &path, options)?,
            None => return Err(unknown(name, table.as_ref(), &info_path)),
        },
    };
    if spec.ranking && options.stage == Stage::Sft && !options.train_on_chosen {
        return Err(DataError::Info {
            path: info_path,
            name: name.into(),
            detail: "is preference data (chosen and rejected answers), which stage sft cannot compare; \
                     set train_on_chosen: true to fine-tune on the chosen answers only"
                .into(),
        });
    }
    Ok(spec)
}

fn read_table(path: &Path) -> Result<Option<Map<String, Value>>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(DataError::io("read", path, e)),
    };
    let table = serde_json::from_str(&text)
        .map_err(|e| DataError::record(path, e.line().to_string(), format!("not a JSON object of data sets: {e}")))?;
    Ok(Some(table))
}

fn unknown(name: &str, table: Option<&Map<String, Value>>, info_path: &Path) -> DataError {
    let detail = match table {
        None => format!(
            "\"{name}\" is no file, and there is no {}; set dataset_dir to the folder that holds it",
            info_path.display()
        ),
        Some(table) => match nearest(name, table.keys().map(String::as_str)) {
            Some(near) => {
                format!("\"{name}\" is neither in {} nor a file; did you mean \"{near}\"?", info_path.display())
            }
            None => format!(
                "\"{name}\" is neither a file nor in {}, which knows {}",
                info_path.display(),
                table.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
            ),
        },
    };
    DataError::option("dataset", detail)
}

fn from_entry(name: &str, entry: &Value, info_path: &Path, options: &DataOptions) -> Result<DatasetSpec> {
    let wrong = |detail: String| DataError::Info { path: info_path.to_path_buf(), name: name.into(), detail };
    let entry: Entry = serde_json::from_value(entry.clone()).map_err(|e| wrong(e.to_string()))?;
    let Some(file_name) = entry.file_name else {
        let remote = entry.hf_hub_url.or(entry.ms_hub_url).or(entry.om_hub_url).or(entry.script_url);
        let remote = remote.or(entry.cloud_file_name);
        return Err(wrong(match remote {
            Some(url) => format!(
                "names a remote source ({url}) only; nothing is downloaded here: fetch the files yourself and set file_name"
            ),
            None => "has no file_name".into(),
        }));
    };
    let mut notes = Vec::new();
    for (key, value) in [("subset", &entry.subset), ("split", &entry.split), ("folder", &entry.folder)] {
        if let Some(value) = value.as_deref().filter(|v| *v != "train") {
            notes.push(format!("{key}: {value} selects parts of a hub data set and has no effect on local files"));
        }
    }
    let files = list_files(&options.dataset_dir.join(&file_name), &wrong)?;
    let text = options.stage == Stage::Pt;
    let format = if text { Format::Text } else { entry.formatting.unwrap_or(Format::Alpaca) };
    let mut columns = entry.columns;
    for (key, column) in [("images", &columns.images), ("videos", &columns.videos), ("audios", &columns.audios)] {
        if column.is_some() {
            return Err(wrong(format!("has a column for {key}; only text can be trained on so far")));
        }
    }
    if columns.kto_tag.is_some() {
        return Err(wrong("is KTO data (kto_tag), which stages pt and sft cannot use".into()));
    }
    fill_columns(&mut columns, format, entry.ranking);
    let mut tags = Tags::of(format);
    for (key, value) in &entry.tags {
        let value = value.as_str().ok_or_else(|| wrong(format!("tags.{key} must be a string")))?.to_owned();
        match key.as_str() {
            "role_tag" => tags.role_tag = value,
            "content_tag" => tags.content_tag = value,
            "user_tag" => tags.user_tag = value,
            "assistant_tag" => tags.assistant_tag = value,
            "observation_tag" => tags.observation_tag = value,
            "function_tag" => tags.function_tag = value,
            "system_tag" => tags.system_tag = value,
            _ => {
                let known = ["role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag"];
                let near = nearest(key, known).map_or(String::new(), |n| format!("; did you mean {n}?"));
                return Err(wrong(format!("unknown key tags.{key}{near}")));
            }
        }
    }
    Ok(DatasetSpec {
        name: name.into(),
        files,
        format,
        columns,
        tags,
        ranking: entry.ranking,
        num_samples: entry.num_samples,
        notes,
    })
}

/// The defaults of LlamaFactory for columns that an entry does not name.
fn fill_columns(columns: &mut Columns, format: Format, ranking: bool) {
    let default = |slot: &mut Option<String>, name: &str| {
        slot.get_or_insert_with(|| name.into());
    };
    match format {
        Format::Alpaca => {
            default(&mut columns.prompt, "instruction");
            default(&mut columns.query, "input");
            default(&mut columns.response, "output");
        }
        Format::Sharegpt => default(&mut columns.messages, "conversations"),
        Format::Openai => {
            default(&mut columns.messages, "messages");
            default(&mut columns.tools, "tools");
        }
        Format::Text => default(&mut columns.prompt, "text"),
    }
    if ranking {
        default(&mut columns.chosen, "chosen");
        default(&mut columns.rejected, "rejected");
    }
}

/// A file, or every file of the commonest known ending in a folder, by name.
fn list_files(path: &Path, wrong: &dyn Fn(String) -> DataError) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    if !path.is_dir() {
        return Err(wrong(format!("its file {} does not exist", path.display())));
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(path)
        .map_err(|e| DataError::io("read", path, e))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|p| p.is_file() && p.file_name().is_none_or(|n| n != "dataset_info.json"))
        .filter(|p| p.extension().and_then(|e| e.to_str()).is_some_and(|e| files::KNOWN_ENDINGS.contains(&e)))
        .collect();
    files.sort();
    let Some(first) = files.first() else {
        return Err(wrong(format!("the folder {} holds no data file", path.display())));
    };
    let ending = first.extension().map(std::ffi::OsStr::to_os_string);
    if let Some(other) = files.iter().find(|f| f.extension().map(std::ffi::OsStr::to_os_string) != ending) {
        return Err(wrong(format!(
            "the folder {} mixes file types ({} and {}); keep one type in a folder",
            path.display(),
            first.display(),
            other.display()
        )));
    }
    Ok(files)
}

/// Reads the first record of a file that no `dataset_info.json` describes and says what it was taken for.
fn detect(name: &str, path: &Path, options: &DataOptions) -> Result<DatasetSpec> {
    let files = list_files(path, &|detail| DataError::file(path, detail))?;
    let mut first = None;
    for file in &files {
        if let Some(raw) = files::open(file, options.text_unit)?.next() {
            first = Some((file, raw?));
            break;
        }
    }
    let Some((file, raw)) = first else {
        return Err(DataError::Empty(format!("{} holds no record", path.display())));
    };
    let Some(record) = raw.value.as_object() else {
        return Err(DataError::record(file, raw.place.to_string(), "a record must be a JSON object"));
    };
    let has = |key: &str| record.contains_key(key);
    let mut columns = Columns::default();
    let ranking = has("chosen") && has("rejected");
    let list_key =
        ["messages", "conversations", "conversation"].into_iter().find(|k| record.get(*k).is_some_and(Value::is_array));
    let format = if options.stage == Stage::Pt {
        columns.prompt = ["text", "content"].into_iter().find(|k| has(k)).map(String::from);
        Format::Text
    } else if let Some(key) = list_key {
        columns.messages = Some(key.into());
        columns.system = has("system").then(|| "system".into());
        columns.tools = has("tools").then(|| "tools".into());
        let by_role = record[key].as_array().and_then(|m| m.first()).is_some_and(|m| m.get("role").is_some());
        if by_role { Format::Openai } else { Format::Sharegpt }
    } else {
        let pairs = [
            ("instruction", "output"),
            ("prompt", "response"),
            ("prompt", "completion"),
            ("question", "answer"),
            ("query", "response"),
        ];
        if let Some((prompt, response)) =
            pairs.into_iter().find(|(p, r)| has(p) && (has(r) || (ranking && *r == "output")))
        {
            columns.prompt = Some(prompt.into());
            columns.response = Some(response.into());
            columns.query = Some("input".into());
            columns.system = has("system").then(|| "system".into());
            columns.history = has("history").then(|| "history".into());
            Format::Alpaca
        } else if has("text") {
            Format::Text
        } else {
            let keys = record.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(DataError::record(
                file,
                raw.place.to_string(),
                format!("cannot tell the format from the fields ({keys}); describe the file in dataset_info.json"),
            ));
        }
    };
    fill_columns(&mut columns, format, ranking);
    if options.stage == Stage::Sft && format == Format::Text {
        return Err(DataError::record(
            file,
            raw.place.to_string(),
            "holds plain text, which stage sft has no answers to train on; use stage: pt",
        ));
    }
    let shape = match format {
        Format::Alpaca => format!(
            "alpaca with {} -> {}",
            columns.prompt.as_deref().unwrap_or_default(),
            columns.response.as_deref().unwrap_or_default()
        ),
        Format::Sharegpt => format!("sharegpt with {}", columns.messages.as_deref().unwrap_or_default()),
        Format::Openai => format!("OpenAI messages in {}", columns.messages.as_deref().unwrap_or_default()),
        Format::Text => format!("text in {}", columns.prompt.as_deref().unwrap_or_default()),
    };
    Ok(DatasetSpec {
        name: name.into(),
        files,
        format,
        columns,
        tags: Tags::of(format),
        ranking,
        num_samples: None,
        notes: vec![format!("not in dataset_info.json, read as {shape}")],
    })
}
