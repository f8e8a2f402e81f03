//! A look at the data before training does: what is trained on, and what is wrong.
//!
//! [`check()`] reads every record of every data set, goes on where training would stop, and gathers findings. Nothing is
//! written, and the cache is not used.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::encode::{EncodeStats, Encoder};
use crate::error::{DataError, Result};
use crate::formats::{self, DatasetSpec, ProblemKind, Record};
use crate::options::{DataOptions, Stage};
use crate::prepare::{OnProgress, Progress, encode_all, workers};
use crate::record::Sample;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

mod view;

pub use view::{ExampleView, TokenView};

/// What [`check()`] looks for beyond the options of the data.
#[derive(Debug, Clone)]
pub struct CheckOptions {
    /// Rows of the model's embedding, to find ids that have none. Default: not checked.
    pub embedding_rows: Option<usize>,
    /// Positions that the model was made for (`max_position_embeddings`), to find examples that go beyond. Default: not
    /// checked.
    pub positions: Option<usize>,
    /// Examples of each data set to show token by token. Default 2.
    pub examples: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { embedding_rows: None, positions: None, examples: 2 }
    }
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know.
    Note,
    /// Training runs, but perhaps not as meant.
    Warning,
    /// Training would stop at it.
    Error,
}

/// Something that was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// A short fixed name, for programs: `empty_answer`, `duplicate`, `over_long` ...
    pub kind: String,
    /// The data set, or none if it concerns all.
    pub dataset: Option<String>,
    /// How many records, examples or tokens it concerns.
    pub count: u64,
    /// What it is and how to mend it.
    pub message: String,
}

/// Counts and lengths of one data set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DatasetReport {
    /// The name that the user gave.
    pub name: String,
    /// Its files.
    pub files: Vec<String>,
    /// What its records were read as.
    pub format: formats::Format,
    /// What was counted while encoding.
    pub stats: EncodeStats,
    /// Records equal to an earlier one of any of the data sets.
    pub duplicates: u64,
    /// Share of examples longer than `cutoff_len`.
    pub over_long_share: f64,
    /// Share of tokens that count in the loss.
    pub label_share: f64,
    /// Tokens of an example: shortest, median, 95th percentile, longest (after the cut).
    pub lengths: [u64; 4],
    /// Examples, token by token.
    pub examples: Vec<ExampleView>,
}

/// Everything that [`check()`] found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataReport {
    /// Whether training would start.
    pub ok: bool,
    /// Where the template comes from.
    pub template: Option<String>,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<String>,
    /// The data sets in the order of the configuration, those for evaluation last.
    pub datasets: Vec<DatasetReport>,
    /// What was found, the worst first.
    pub findings: Vec<Finding>,
}

/// What to say where the longest example, after the cut, has more tokens than the model has positions.
pub fn beyond_positions(longest: u64, positions: usize) -> Option<String> {
    (longest > positions as u64).then(|| {
        format!(
            "the longest example has {longest} tokens, and the model was made for {positions} (max_position_embeddings), \
             beyond which its answers get worse; set cutoff_len: {positions}"
        )
    })
}

/// Reads all data that the options name and reports.
///
/// # Errors
/// If options are impossible or a data set cannot be found. What is wrong inside the data is in the report.
pub fn check(
    options: &DataOptions,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    look: &CheckOptions,
    on_progress: OnProgress<'_>,
) -> Result<DataReport> {
    options.validate()?;
    let encoder = Encoder::new(tokenizer, template, options)?;
    let mut checker = Checker { options, tokenizer, encoder, look, seen: HashMap::new(), findings: Vec::new() };
    if let Some(Err(e)) = look.embedding_rows.map(|rows| tokenizer.check_rows(rows)) {
        checker.find(Severity::Error, "id_beyond_embedding", None, 1, e.to_string());
    }
    let eos = tokenizer.eos();
    if eos.is_none() {
        let text = "the tokenizer names no EOS token; set eos_token in tokenizer_config.json";
        checker.find(Severity::Warning, "missing_eos", None, 1, text.into());
    }
    let mut datasets = Vec::new();
    let train = options.dataset.iter().map(|n| (n, false));
    for (name, is_eval) in train.chain(options.eval_dataset.iter().map(|n| (n, true))) {
        let spec = formats::resolve(name, options)?;
        datasets.push(checker.dataset(&spec, is_eval, on_progress));
    }
    let longest = datasets.iter().map(|d: &DatasetReport| d.lengths[3]).max().unwrap_or(0);
    if let Some(text) = look.positions.and_then(|positions| beyond_positions(longest, positions)) {
        checker.find(Severity::Warning, "beyond_positions", None, 1, text);
    }
    let mut findings = checker.findings;
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    let name_of = |id: &u32| tokenizer.token(*id).unwrap_or_else(|| id.to_string());
    Ok(DataReport {
        ok: findings.iter().all(|f| f.severity < Severity::Error),
        template: template.filter(|_| options.stage == Stage::Sft).map(|t| t.name().to_owned()),
        stop_tokens: checker.encoder.stop_ids().iter().map(name_of).collect(),
        datasets,
        findings,
    })
}

struct Checker<'a> {
    options: &'a DataOptions,
    tokenizer: &'a Tokenizer,
    encoder: Encoder<'a>,
    look: &'a CheckOptions,
    /// Hashes of records with the data set that had them first and whether it is for evaluation.
    seen: HashMap<[u8; 16], (String, bool)>,
    findings: Vec<Finding>,
}

/// Records that share a trouble: how many, and the first with its place.
#[derive(Default)]
struct Trouble {
    count: u64,
    first: String,
}

impl Trouble {
    fn add(&mut self, first: impl FnOnce() -> String) {
        if self.count == 0 {
            self.first = first();
        }
        self.count += 1;
    }
}

impl Checker<'_> {
    fn find(&mut self, severity: Severity, kind: &str, dataset: Option<&str>, count: u64, message: String) {
        if count > 0 {
            let dataset = dataset.map(String::from);
            self.findings.push(Finding { severity, kind: kind.into(), dataset, count, message });
        }
    }

    fn dataset(&mut self, spec: &DatasetSpec, is_eval: bool, on_progress: OnProgress<'_>) -> DatasetReport {
        let name = Some(spec.name.as_str());
        for note in &spec.notes {
            self.find(Severity::Note, "assumed", name, 1, note.clone());
        }
        let mut stats = EncodeStats::default();
        let mut problems: BTreeMap<ProblemKind, Trouble> = BTreeMap::new();
        let (mut refused, mut duplicates, mut leaked, mut stops_inside) =
            (Trouble::default(), Trouble::default(), Trouble::default(), Trouble::default());
        let (mut lengths, mut examples) = (Vec::new(), Vec::new());
        let stop_texts: Vec<String> =
            self.encoder.stop_ids().iter().filter_map(|id| self.tokenizer.token(*id)).collect();
        let workers = workers(self.options);
        let mut records = formats::records(spec, self.options);
        loop {
            let mut batch: Vec<Record> = Vec::new();
            for record in records.by_ref().take(workers * 256) {
                match record {
                    Ok(record) => batch.push(record),
                    Err(e) => self.find(Severity::Error, "unreadable", name, 1, e.to_string()),
                }
            }
            if batch.is_empty() {
                break;
            }
            for (record, encoded) in batch.iter().zip(encode_all(&self.encoder, &batch, workers)) {
                let place = || format!("{}:{}", record.path.display(), record.place);
                match &record.sample {
                    Err(problem) => {
                        let first = || format!("{}: {}", place(), problem.detail);
                        problems.entry(problem.kind).or_default().add(first);
                    }
                    Ok(sample) => {
                        if holds_stop(sample, &stop_texts) {
                            stops_inside.add(place);
                        }
                        // Values are plain data; writing them as JSON cannot fail.
                        let hash = blake3::hash(&serde_json::to_vec(sample).unwrap_or_default());
                        let mut short = [0; 16];
                        short.copy_from_slice(&hash.as_bytes()[..16]);
                        match self.seen.get(&short) {
                            Some((_, false)) if is_eval => leaked.add(place),
                            Some(_) => duplicates.add(place),
                            None => {
                                self.seen.insert(short, (spec.name.clone(), is_eval));
                            }
                        }
                    }
                }
                match encoded {
                    Ok((encoded, counts)) => {
                        stats.add(&counts);
                        if let (Some(bad), true) = (&counts.first_bad, record.sample.is_ok()) {
                            refused.add(|| bad.clone());
                        }
                        for example in encoded {
                            lengths.push(example.ids.len() as u64);
                            if examples.len() < self.look.examples {
                                examples.push(ExampleView::new(&example, self.tokenizer, place()));
                            }
                        }
                    }
                    Err(e) => {
                        stats.records += 1;
                        if record.sample.is_ok() {
                            refused.add(|| e.to_string());
                        }
                    }
                }
            }
            let done = stats.records;
            on_progress(Progress { step: "checking", dataset: &spec.name, done, total: None });
        }
        drop(records);
        self.report_problems(spec, problems, &refused);
        let first = |t: &Trouble| format!("; the first: {}", t.first);
        self.find(
            Severity::Warning,
            "duplicate",
            name,
            duplicates.count,
            format!("{} records are exactly equal to an earlier one{}", duplicates.count, first(&duplicates)),
        );
        self.find(
            Severity::Warning,
            "evaluation_overlap",
            name,
            leaked.count,
            format!("{} records for evaluation are also trained on{}", leaked.count, first(&leaked)),
        );
        self.find(
            Severity::Warning,
            "stop_token_in_text",
            name,
            stops_inside.count,
            format!(
                "{} records hold the text of a stop token, which is read as that token{}",
                stops_inside.count,
                first(&stops_inside)
            ),
        );
        self.report_stats(spec, &stats);
        lengths.sort_unstable();
        let at = |share: f64| {
            lengths.get(((lengths.len() as f64 * share) as usize).min(lengths.len().saturating_sub(1))).copied()
        };
        let share = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        DatasetReport {
            name: spec.name.clone(),
            files: spec.files.iter().map(|f| f.display().to_string()).collect(),
            format: spec.format,
            duplicates: duplicates.count,
            over_long_share: share(stats.cut_examples, stats.examples + stats.dropped_examples),
            label_share: share(stats.targets, stats.tokens),
            lengths: [0.0, 0.5, 0.95, 1.0].map(|s| at(s).unwrap_or(0)),
            examples,
            stats,
        }
    }

    fn report_problems(&mut self, spec: &DatasetSpec, problems: BTreeMap<ProblemKind, Trouble>, refused: &Trouble) {
        let skip = self.options.skip_bad_samples;
        let bad = if skip { Severity::Warning } else { Severity::Error };
        let mend = if skip { "" } else { " (skip_bad_samples: true leaves such records out)" };
        let name = Some(spec.name.as_str());
        for (kind, trouble) in problems {
            let (severity, kind_name, text) = match kind {
                ProblemKind::EmptyAnswer => (Severity::Warning, "empty_answer", "have no answer and are left out"),
                ProblemKind::EmptyText => (Severity::Warning, "empty_text", "have no text and are left out"),
                ProblemKind::UnknownRole => (bad, "unknown_role", "have a message with an unknown role"),
                ProblemKind::MissingField => (bad, "missing_field", "lack a field"),
                ProblemKind::WrongType => (bad, "wrong_type", "have a field of the wrong type"),
                ProblemKind::BadToolCall => (bad, "bad_tool_call", "have a function call that cannot be read"),
                ProblemKind::NotText => (bad, "not_text", "hold something other than text"),
            };
            let mend = if severity == Severity::Error { mend } else { "" };
            let message = format!("{} records {text}{mend}; the first: {}", trouble.count, trouble.first);
            self.find(severity, kind_name, name, trouble.count, message);
        }
        let message = format!("{} records are refused{mend}; the first: {}", refused.count, refused.first);
        self.find(bad, "template", name, refused.count, message);
    }

    fn report_stats(&mut self, spec: &DatasetSpec, stats: &EncodeStats) {
        let name = Some(spec.name.as_str());
        let all = (stats.examples + stats.dropped_examples).max(1);
        let cut = format!(
            "cutoff_len {} cuts {} of {} examples ({:.1} %) and {} tokens; the longest has {}",
            self.options.cutoff_len,
            stats.cut_examples,
            all,
            100.0 * stats.cut_examples as f64 / all as f64,
            stats.cut_tokens,
            stats.longest
        );
        let severity = if stats.cut_examples * 20 > all { Severity::Warning } else { Severity::Note };
        self.find(severity, "over_long", name, stats.cut_examples, cut);
        if stats.examples == 0 {
            let (kind, text) = if stats.dropped_examples > 0 {
                ("all_cut", "cutoff_len cuts every answer off; raise it")
            } else {
                ("empty", "nothing can be trained on")
            };
            self.find(Severity::Error, kind, name, 1, text.into());
        } else {
            let text = format!(
                "{} examples have every answer cut off and are left out; raise cutoff_len",
                stats.dropped_examples
            );
            self.find(Severity::Warning, "answer_cut", name, stats.dropped_examples, text);
        }
        if stats.tokens > 0 && stats.targets * 100 < stats.tokens {
            let text = format!("only {} of {} tokens count in the loss", stats.targets, stats.tokens);
            self.find(Severity::Warning, "few_labels", name, stats.targets.max(1), text);
        }
        let n = stats.missing_stop;
        let text = format!("{n} answers end with no stop token: the model will not learn to stop there");
        self.find(Severity::Warning, "missing_stop", name, n, text);
        let n = stats.appended_eos;
        let text = format!("{n} examples get EOS, since the template ends answers with no stop token");
        self.find(Severity::Note, "appended_eos", name, n, text);
        let n = stats.split_conversations;
        let text = format!("{n} conversations become several examples, since the template rewrites past answers");
        self.find(Severity::Note, "split_conversation", name, n, text);
        let n = stats.untrained_answers;
        let text =
            format!("{n} answers are not trained, since the template rewrites past answers; see rewritten_history");
        self.find(Severity::Warning, "untrained_answer", name, n, text);
        let n = stats.mismatched_prompts;
        let text = format!("{n} answers do not continue the template's generation prompt to the letter");
        self.find(Severity::Note, "mismatched_prompt", name, n, text);
        let n = stats.merged_borders;
        let text = format!("{n} answers begin inside a token and are tokenised apart from their prompt");
        self.find(Severity::Note, "merged_border", name, n, text);
    }
}

fn holds_stop(sample: &Sample, stops: &[String]) -> bool {
    let holds = |text: &str| stops.iter().any(|stop| text.contains(stop.as_str()));
    match sample {
        Sample::Text(text) => holds(text),
        Sample::Chat(chat) => {
            chat.system.as_deref().is_some_and(holds) || chat.messages.iter().any(|m| holds(&m.content))
        }
    }
}

/// So that a caller can stop at an unusable report.
impl DataReport {
    /// The first error among the findings, as an error.
    ///
    /// # Errors
    /// If there is one.
    pub fn into_result(self) -> Result<Self> {
        match self.findings.iter().find(|f| f.severity == Severity::Error) {
            Some(finding) => Err(DataError::Empty(finding.message.clone())),
            None => Ok(self),
        }
    }
}
