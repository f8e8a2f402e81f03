//! [`Config`]: loading, looking up, printing.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use crate::check::{self, Purpose};
use crate::error::{ConfigError, Origin, Problem, Problems, Result};
use crate::foreign::{self, Foreign};
use crate::nearest::nearest;
use crate::node::{Entry, Node, Value};
use crate::overrides::{self, Override};
use crate::schema::{KeyInfo, Section};
use crate::sections::*;
use crate::value::ValueError;
use crate::yaml::Document;

/// Something worth telling the user that is no mistake: a key that is accepted and not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Where the key stands.
    pub origin: Origin,
    /// The key.
    pub key: String,
    /// Why nothing is lost.
    pub text: String,
    /// The only purpose it is true of, where that is not all.
    pub only: Option<Purpose>,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: `{}`: {}", self.origin, self.key, self.text)
    }
}

/// One row of [`Config::describe`].
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// Title of the key's section.
    pub section: &'static str,
    /// The key.
    pub key: &'static str,
    /// Its present value.
    pub value: Json,
    /// Where the value came from.
    pub origin: Origin,
}

/// A whole configuration: every key has a value, every value has an origin.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// Which model.
    pub model: ModelConfig,
    /// What is trained.
    pub method: MethodConfig,
    /// Which data.
    pub data: DataConfig,
    /// The training loop.
    pub train: TrainConfig,
    /// Mixtures of experts.
    pub experts: ExpertsConfig,
    /// How answers are sampled.
    pub generation: GenerationConfig,
    /// A trained model as a Hugging Face folder.
    pub export: ExportConfig,
    /// How it runs here.
    pub run: RunConfig,
    /// Name of the file it came from, where it did.
    name: Arc<str>,
    origins: BTreeMap<String, Origin>,
    notes: Vec<Note>,
}

/// The sections of a [`Config`], in order, for code that treats all alike.
macro_rules! for_each_section {
    ($config:expr, $section:ident => $body:expr) => {{
        let config = $config;
        let $section = &mut config.model;
        $body;
        let $section = &mut config.method;
        $body;
        let $section = &mut config.data;
        $body;
        let $section = &mut config.train;
        $body;
        let $section = &mut config.experts;
        $body;
        let $section = &mut config.generation;
        $body;
        let $section = &mut config.export;
        $body;
        let $section = &mut config.run;
        $body;
    }};
}

impl Config {
    /// Reads a YAML or JSON file, puts the overrides on top, and checks everything that can be checked without knowing
    /// what the configuration is for ([`Config::check_for`] does the rest).
    ///
    /// # Errors
    /// [`ConfigError`], with all problems at once where the text is YAML.
    pub fn load(path: impl AsRef<Path>, overrides: &[Override]) -> Result<Config> {
        Config::from_document(Document::read(path.as_ref())?, overrides)
    }

    /// Like [`Config::load`], from text; `name` stands in messages where a path would.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn parse(text: &str, name: &str, overrides: &[Override]) -> Result<Config> {
        Config::from_document(Document::parse(text, name)?, overrides)
    }

    /// A configuration without a file.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_overrides(overrides: &[Override]) -> Result<Config> {
        Config::parse("", "command line", overrides)
    }

    fn from_document(document: Document, overrides: &[Override]) -> Result<Config> {
        let Value::Map(mut entries) = document.root.value else {
            return Err(ConfigError::Syntax {
                origin: Origin::File { path: document.name, line: document.root.line, col: document.root.col },
                message: "a configuration is a map of keys to values".into(),
            });
        };
        let mut config = Config { name: document.name, ..Config::default() };
        let mut problems = Vec::new();
        config.rename_aliases(&mut entries, &mut problems);
        for change in overrides {
            let change = Override { key: canonical(&change.key), value: change.value.clone() };
            if let Err(problem) = overrides::apply(&mut entries, &change) {
                problems.push(problem);
            } else if change.value.is_none() && !config.knows(change.key.split('.').next().unwrap_or_default()) {
                problems.push(config.unknown(&change.key, Origin::Override));
            }
        }
        for entry in &entries {
            if let Err(problem) = config.take(entry) {
                problems.push(problem);
            }
        }
        if problems.is_empty() {
            let (found, notes) = check::check(&config);
            problems = found;
            config.notes.extend(notes);
        }
        if problems.is_empty() {
            config.remark();
            Ok(config)
        } else {
            Err(ConfigError::Invalid(Problems(problems)))
        }
    }

    /// Gives keys their present name. `evaluation_strategy` beside `eval_strategy` would be one key twice.
    fn rename_aliases(&mut self, entries: &mut [Entry], problems: &mut Vec<Problem>) {
        for i in 0..entries.len() {
            let name = canonical(&entries[i].key);
            if name == entries[i].key {
                continue;
            }
            if let Some(other) = entries.iter().find(|e| e.key == name) {
                problems.push(Problem {
                    origin: self.place(entries[i].line, entries[i].col),
                    key: entries[i].key.clone(),
                    what: format!("it is another spelling of `{name}`, which stands on line {}", other.line),
                    mend: "keep one of the two".into(),
                });
            }
            entries[i].key = name;
        }
    }

    /// Reads one key into its section, or says what it is otherwise.
    fn take(&mut self, entry: &Entry) -> Result<(), Problem> {
        let origin = self.place(entry.line, entry.col);
        if let Some(outcome) = self.set(&entry.key, &entry.value) {
            outcome.map_err(|e| self.misfit(entry, e))?;
            self.origins.insert(entry.key.clone(), origin);
            return Ok(());
        }
        match foreign::look_up(&entry.key) {
            Some(Foreign::Harmless(why)) => {
                self.notes.push(Note {
                    origin,
                    key: entry.key.clone(),
                    text: format!("it is not used: {why}"),
                    only: None,
                });
                Ok(())
            }
            Some(Foreign::Unsupported { neutral, .. }) if asks_for_nothing(&entry.value, neutral) => Ok(()),
            Some(Foreign::Unsupported { instead, .. }) => Err(Problem {
                origin,
                key: entry.key.clone(),
                what: format!("LlamaFactory knows it; it is not supported here (found {})", entry.value.brief()),
                mend: instead.into(),
            }),
            None => Err(self.unknown(&entry.key, origin)),
        }
    }

    fn set(&mut self, key: &str, node: &Node) -> Option<Result<(), ValueError>> {
        for_each_section!(self, section => {
            if let Some(outcome) = section.set(key, node) {
                return Some(outcome);
            }
        });
        None
    }

    fn misfit(&self, entry: &Entry, e: ValueError) -> Problem {
        // A value from the command line has no line; its key's origin says so.
        let origin = if entry.line == 0 { Origin::Override } else { self.place(e.line.max(1), e.col) };
        let dot = if e.sub_key.is_empty() { "" } else { "." };
        Problem { origin, key: format!("{}{dot}{}", entry.key, e.sub_key), what: e.what, mend: e.mend }
    }

    fn unknown(&self, key: &str, origin: Origin) -> Problem {
        let keys = Config::keys();
        let known = keys.iter().map(|k| k.key).chain(foreign::ALIASES.iter().map(|a| a.0));
        let foreign = foreign::UNSUPPORTED.iter().map(|u| u.key).chain(foreign::HARMLESS.iter().map(|h| h.key));
        let mend = match nearest(key, known).or_else(|| nearest(key, foreign)) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "docs/config.md lists all keys".into(),
        };
        Problem { origin, key: key.into(), what: "unknown key".into(), mend }
    }

    fn knows(&self, key: &str) -> bool {
        Config::keys().iter().any(|k| k.key == key) || foreign::look_up(key).is_some()
    }

    fn place(&self, line: usize, col: usize) -> Origin {
        if line == 0 { Origin::Override } else { Origin::File { path: self.name.clone(), line, col } }
    }

    /// Remarks on a configuration that is valid but may surprise.
    fn remark(&mut self) {
        let mut remarks = Vec::new();
        let mut training = Vec::new();
        if self.train.max_steps > 0 && self.is_set("num_train_epochs") {
            remarks.push(("num_train_epochs", "it is not used: `max_steps` wins over it"));
        }
        if self.method.stage == Stage::Pt && self.is_set("template") {
            remarks.push(("template", "it is not used: plain text (`stage: pt`) has no template"));
        }
        let has_data = self.data.val_size > 0.0 || !self.data.eval_dataset.is_empty();
        if has_data && self.train.eval_strategy == Strategy::No && !self.method.do_eval {
            let key = if self.data.val_size > 0.0 { "val_size" } else { "eval_dataset" };
            training.push((key, "it is not used while training, because `eval_strategy` is `no` (what it holds back stays held back); write `eval_strategy: steps` to evaluate while training"));
        }
        let remarks = remarks.into_iter().map(|r| (r, None));
        for ((key, text), only) in remarks.chain(training.into_iter().map(|r| (r, Some(Purpose::Train)))) {
            self.notes.push(Note { origin: self.origin(key), key: key.into(), text: text.into(), only });
        }
    }

    /// Whether somebody wrote the key, in the file or on the command line.
    pub fn is_set(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// Where the value of `key` came from.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// What is worth telling the user: keys that are accepted and not used, or used otherwise than one may think.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// The file it came from, as given (or the name given to [`Config::parse`]).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The plan as a document whose nodes know their file and line; an empty map where there is none.
    ///
    /// # Errors
    /// The plan's file cannot be read or is not YAML.
    pub fn plan(&self) -> Result<Document> {
        match &self.run.plan {
            Some(plan) => plan.load(&self.name),
            None => Document::parse("", "plan"),
        }
    }

    /// What is said about recompute outside the plan: `Some(true)`, `Some(false)`, or nothing.
    pub fn gradient_checkpointing(&self) -> Option<bool> {
        if self.model.disable_gradient_checkpointing { Some(false) } else { self.train.gradient_checkpointing }
    }

    /// The present value of a key.
    pub fn value(&self, key: &str) -> Option<Json> {
        self.describe().into_iter().find(|d| d.key == key).map(|d| d.value)
    }

    /// Every key with its value and origin, section by section: the table that a run prints and stores.
    pub fn describe(&self) -> Vec<Described> {
        let mut rows = Vec::new();
        self.section(&self.model, &mut rows);
        self.section(&self.method, &mut rows);
        self.section(&self.data, &mut rows);
        self.section(&self.train, &mut rows);
        self.section(&self.experts, &mut rows);
        self.section(&self.generation, &mut rows);
        self.section(&self.export, &mut rows);
        self.section(&self.run, &mut rows);
        rows
    }

    fn section<S: Section>(&self, section: &S, rows: &mut Vec<Described>) {
        rows.extend(section.values().into_iter().map(|(key, value)| Described {
            section: S::TITLE,
            key,
            value,
            origin: self.origin(key),
        }));
    }

    /// The whole configuration as one flat JSON object.
    pub fn to_json(&self) -> Json {
        Json::Object(self.describe().into_iter().map(|d| (d.key.to_owned(), d.value)).collect::<Map<_, _>>())
    }

    /// The keys that somebody wrote, as YAML that loads to the same configuration: what a run stores beside its output.
    pub fn to_yaml(&self) -> String {
        let mut text = String::new();
        let mut section = "";
        for row in self.describe().into_iter().filter(|d| d.origin != Origin::Default) {
            if row.section != section {
                section = row.section;
                text += &format!("{}### {section}\n", if text.is_empty() { "" } else { "\n" });
            }
            // JSON is YAML, on one line.
            text += &format!("{}: {}\n", row.key, row.value);
        }
        text
    }

    /// Everything known about every key.
    pub fn keys() -> Vec<KeyInfo> {
        let mut keys = ModelConfig::keys();
        keys.extend(MethodConfig::keys());
        keys.extend(DataConfig::keys());
        keys.extend(TrainConfig::keys());
        keys.extend(ExpertsConfig::keys());
        keys.extend(GenerationConfig::keys());
        keys.extend(ExportConfig::keys());
        keys.extend(RunConfig::keys());
        keys
    }
}

fn canonical(key: &str) -> String {
    foreign::ALIASES.iter().find(|(alias, _)| *alias == key).map_or(key, |(_, name)| name).to_owned()
}

/// Whether a value under an unsupported key changes nothing: null, or one of the neutral words.
fn asks_for_nothing(node: &Node, neutral: &[&str]) -> bool {
    if node.is_null() || matches!(&node.value, Value::List(items) if items.is_empty()) {
        return true;
    }
    node.text().is_some_and(|text| neutral.contains(&text))
}
