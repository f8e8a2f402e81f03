//! From options to data that is ready to stream: find the data sets, tokenise or map the cache, split, pack.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

use crate::cache::{StoreWriter, TokenStore, write_store};
use crate::corpus::{Corpus, Part};
use crate::encode::{EncodeStats, Encoder, Example};
use crate::error::{DataError, Result};
use crate::formats::{self, DatasetSpec, Record};
use crate::options::{DataOptions, MixStrategy, Stage};
use crate::permute::{Permutation, key};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;

/// Raised when a change of this crate changes what is in a cache.
const ENCODING_VERSION: u32 = 2;

/// Records handed out together; and for each thread, so many such handfuls at a time.
const CHUNK: usize = 32;
const CHUNKS_PER_WORKER: usize = 8;

/// Rows of an epoch that mixes in order: each is an entry of a list in memory (16 bytes).
const MOST_SCHEDULED: u64 = 1 << 28;

/// A step of long work, for a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// What is being done: "reading" (to hash the files) or "tokenising".
    pub step: &'static str,
    /// The data set's name.
    pub dataset: &'a str,
    /// Bytes read or records tokenised so far.
    pub done: u64,
    /// Of how many, where that is known.
    pub total: Option<u64>,
}

/// Called now and then while data is prepared.
pub type OnProgress<'a> = &'a dyn Fn(Progress<'_>);

/// What [`prepare`] gives.
#[derive(Debug)]
pub struct Prepared {
    /// The data to train on.
    pub train: Corpus,
    /// The data to evaluate on: the held-back part, or `eval_dataset`.
    pub eval: Option<Corpus>,
    /// For each data set: its name, whether the cache was used, what was counted.
    pub datasets: Vec<DatasetSummary>,
    /// What a user should know, in sentences: assumptions, cuts, records left out.
    pub messages: Vec<String>,
}

/// How one data set went.
#[derive(Debug, Clone, Serialize)]
pub struct DatasetSummary {
    /// The name that the user gave.
    pub name: String,
    /// Whether tokenised data was found in the cache.
    pub from_cache: bool,
    /// What was counted when it was tokenised.
    pub stats: EncodeStats,
}

/// Does everything between the configuration and the sample stream.
///
/// `template` may be `None` for stage `pt`.
///
/// # Errors
/// Whatever is wrong with options, files, records, template or cache, each with its place and mend; and
/// [`DataError::Empty`] or [`DataError::Option`] if nothing is left to train on.
///
/// ```
/// use phalanx_data::{DataOptions, Stage, Stream, StreamOptions, Tokenizer, prepare};
/// let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/");
/// let tokenizer = Tokenizer::from_dir(format!("{dir}tiny-chatml"))?;
/// let options = DataOptions {
///     stage: Stage::Pt,
///     dataset: vec![format!("{dir}data/tale.txt")],
///     cutoff_len: 16,
///     ..DataOptions::default()
/// };
/// let data = prepare(&options, &tokenizer, None, &|_| {})?;
/// let mut stream = Stream::new(data.train, StreamOptions::of(&options));
/// let batch = stream.next_batch(2)?;
/// assert_eq!(batch.docs.len(), 2);
/// assert_eq!(batch.targets[0], batch.ids[1] as i32); // targets are shifted already
/// # Ok::<(), phalanx_data::DataError>(())
/// ```
pub fn prepare(
    options: &DataOptions,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    on_progress: OnProgress<'_>,
) -> Result<Prepared> {
    options.validate()?;
    let mut out = Loader::new(options, tokenizer, template, on_progress)?;
    let train_sets = out.load_all(&options.dataset)?;
    let eval_sets = out.load_all(&options.eval_dataset)?;
    let mut train_parts = Vec::new();
    let mut held_out = Vec::new();
    let held_back = hold_back(&train_sets, options)?;
    for (index, (spec, store)) in train_sets.into_iter().enumerate() {
        let (train, eval) = match &held_back {
            None => ((0..store.len() as u32).collect(), Vec::new()),
            Some(held) => (0..store.len() as u32).partition(|i| !held.holds(index, &store, *i)),
        };
        if !eval.is_empty() {
            held_out.push(Part::new(&spec.name, index, Arc::clone(&store), eval, options));
        }
        let train = draw(train, spec.num_samples, &store, options.seed, index as u64);
        train_parts.push(Part::new(&spec.name, index, store, train, options));
    }
    held_out.extend(eval_parts(eval_sets, options));
    for (part, name) in train_parts.iter().zip(&options.dataset) {
        if part.is_empty() {
            return Err(DataError::Empty(format!("data set {name} has none left after val_size was held back")));
        }
    }
    let date = template.and_then(ChatTemplate::date);
    let (probs, cutoff_len) = (options.interleave_probs.as_deref(), options.cutoff_len);
    let train = Corpus::new(train_parts, options.mix_strategy, probs, cutoff_len, date)?;
    if !options.shuffle && options.mix_strategy != MixStrategy::Concat && train.rows_per_epoch() > MOST_SCHEDULED {
        return Err(DataError::option(
            "disable_shuffling",
            format!(
                "an epoch of {} rows is too long to be laid out in order; remove it, or give interleave_probs shares that lie closer together",
                train.rows_per_epoch()
            ),
        ));
    }
    let eval = match held_out.is_empty() {
        true => None,
        false => Some(eval_corpus(held_out, template, options)?),
    };
    Ok(Prepared { train, eval, datasets: out.summaries, messages: out.messages })
}

/// Only the data sets of `eval_dataset`, as [`prepare`] gives them, with its messages: for measuring a model without
/// tokenising what it was trained on.
///
/// # Errors
/// As [`prepare`].
pub fn prepare_eval(
    options: &DataOptions,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    on_progress: OnProgress<'_>,
) -> Result<(Corpus, Vec<String>)> {
    if options.eval_dataset.is_empty() {
        return Err(DataError::option(
            "eval_dataset",
            "names no data set; give a name from dataset_info.json or a file",
        ));
    }
    // How training data is mixed and divided is of no concern here.
    let alone = DataOptions {
        dataset: options.eval_dataset.clone(),
        eval_dataset: Vec::new(),
        mix_strategy: MixStrategy::Concat,
        interleave_probs: None,
        ..options.clone()
    };
    alone.validate()?;
    let mut loader = Loader::new(&alone, tokenizer, template, on_progress)?;
    let sets = loader.load_all(&alone.dataset)?;
    let eval = eval_corpus(eval_parts(sets, options), template, options)?;
    Ok((eval, loader.messages))
}

/// Evaluation data sets are whole, and numbered after those to train on.
fn eval_parts(sets: Vec<LoadedSet>, options: &DataOptions) -> Vec<Part> {
    let part = |(index, (spec, store)): (usize, LoadedSet)| {
        let items = (0..store.len() as u32).collect();
        Part::new(&spec.name, options.dataset.len() + index, store, items, options)
    };
    sets.into_iter().enumerate().map(part).collect()
}

fn eval_corpus(parts: Vec<Part>, template: Option<&ChatTemplate>, options: &DataOptions) -> Result<Corpus> {
    Corpus::new(parts, MixStrategy::Concat, None, options.cutoff_len, template.and_then(ChatTemplate::date))
}

type LoadedSet = (DatasetSpec, Arc<TokenStore>);

struct Loader<'a> {
    options: &'a DataOptions,
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    encoder: Encoder<'a>,
    on_progress: OnProgress<'a>,
    summaries: Vec<DatasetSummary>,
    messages: Vec<String>,
}

impl<'a> Loader<'a> {
    fn new(
        options: &'a DataOptions,
        tokenizer: &'a Tokenizer,
        template: Option<&'a ChatTemplate>,
        on_progress: OnProgress<'a>,
    ) -> Result<Self> {
        let encoder = Encoder::new(tokenizer, template, options)?;
        Ok(Loader { options, tokenizer, template, encoder, on_progress, summaries: Vec::new(), messages: Vec::new() })
    }

    fn load_all(&mut self, names: &[String]) -> Result<Vec<LoadedSet>> {
        names.iter().map(|name| self.load(name)).collect()
    }

    fn load(&mut self, name: &str) -> Result<LoadedSet> {
        let spec = formats::resolve(name, self.options)?;
        self.messages.extend(spec.notes.iter().map(|note| format!("{name}: {note}")));
        let (key, path) = match &self.options.cache_dir {
            None => (blake3::hash(name.as_bytes()), None),
            Some(dir) => {
                let key = self.key(&spec)?;
                (key, Some(cache_path(dir, name, &key)))
            }
        };
        let mut found = None;
        if let Some(path) = path.as_deref().filter(|_| !self.options.overwrite_cache) {
            match TokenStore::open(path, &key) {
                Ok(store) => found = store,
                Err(why) => self.messages.push(format!("{} {why}: tokenising again", path.display())),
            }
        }
        let from_cache = found.is_some();
        let store = match found {
            Some(store) => store,
            None => self.tokenise(&spec, path.as_deref(), key)?,
        };
        let stats = store.stats();
        if store.is_empty() {
            return Err(self.nothing_left(name, stats));
        }
        self.messages.extend(stats.messages().into_iter().map(|m| format!("{name}: {m}")));
        self.summaries.push(DatasetSummary { name: name.into(), from_cache, stats: stats.clone() });
        Ok((spec, Arc::new(store)))
    }

    fn nothing_left(&self, name: &str, stats: &EncodeStats) -> DataError {
        if stats.dropped_examples > 0 {
            return DataError::option(
                "cutoff_len",
                format!(
                    "{} tokens cut off every answer of data set {name} (the longest example has {} tokens); raise it",
                    self.options.cutoff_len, stats.longest
                ),
            );
        }
        DataError::Empty(match (stats.records, &stats.first_bad) {
            (0, _) => format!("data set {name} holds no record"),
            (n, Some(bad)) => format!("none of the {n} records of data set {name} can be used; the first: {bad}"),
            (n, None) => format!("none of the {n} records of data set {name} has an answer or a text"),
        })
    }

    /// Everything that decides what the cache holds.
    fn key(&self, spec: &DatasetSpec) -> Result<blake3::Hash> {
        let o = self.options;
        let mut hasher = blake3::Hasher::new();
        let described = serde_json::json!({
            "version": ENCODING_VERSION,
            "stage": o.stage, "format": spec.format, "columns": spec.columns, "tags": spec.tags, "ranking": spec.ranking,
            "cutoff_len": o.cutoff_len, "train_on_prompt": o.train_on_prompt, "mask_history": o.mask_history,
            "rewritten_history": o.rewritten_history, "train_on_chosen": o.train_on_chosen, "text_unit": o.text_unit,
            "skip_bad_samples": o.skip_bad_samples, "max_samples": o.max_samples,
            "stops": self.encoder.stop_ids(), "adds_bos": self.tokenizer.adds_bos(), "bos": self.tokenizer.bos(),
            "eos": self.tokenizer.eos(),
        });
        hasher.update(described.to_string().as_bytes());
        hasher.update(self.tokenizer.hash().as_bytes());
        if let (Stage::Sft, Some(template)) = (o.stage, self.template) {
            template.hash_into(&mut hasher);
        }
        for path in &spec.files {
            hasher.update(hash_file(path, &spec.name, self.on_progress)?.as_bytes());
        }
        Ok(hasher.finalize())
    }

    fn tokenise(&self, spec: &DatasetSpec, path: Option<&Path>, key: blake3::Hash) -> Result<TokenStore> {
        write_store(path, key, |writer| self.encode_into(spec, writer))
    }

    fn encode_into(&self, spec: &DatasetSpec, writer: &mut StoreWriter<'_>) -> Result<EncodeStats> {
        let workers = workers(self.options);
        let mut stats = EncodeStats::default();
        let mut records = formats::records(spec, self.options);
        loop {
            let batch: Vec<Record> =
                records.by_ref().take(workers * CHUNK * CHUNKS_PER_WORKER).collect::<Result<_>>()?;
            if batch.is_empty() {
                break;
            }
            for encoded in encode_all(&self.encoder, &batch, workers) {
                let (examples, counts) = encoded?;
                let record = u32::try_from(stats.records).map_err(|_| {
                    DataError::option("dataset", format!("{} has more than 2^32 records; split it", spec.name))
                })?;
                stats.add(&counts);
                for example in &examples {
                    writer.push(record, example)?;
                }
            }
            let done = stats.records;
            (self.on_progress)(Progress { step: "tokenising", dataset: &spec.name, done, total: None });
        }
        Ok(stats)
    }
}

pub(crate) type Encoded = Result<(Vec<Example>, EncodeStats)>;

/// Encodes records in parallel; the results stand in the order of the records, whatever the number of threads.
pub(crate) fn encode_all(encoder: &Encoder<'_>, batch: &[Record], workers: usize) -> Vec<Encoded> {
    let chunks: Vec<&[Record]> = batch.chunks(CHUNK).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(i) else { return done };
            done.push((i, chunk.iter().map(|record| encoder.encode_record(record)).collect::<Vec<_>>()));
        }
    };
    let mut done: Vec<(usize, Vec<Encoded>)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..workers.min(chunks.len())).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for handle in others {
            match handle.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(i, _)| *i);
    done.into_iter().flat_map(|(_, encoded)| encoded).collect()
}

pub(crate) fn workers(options: &DataOptions) -> usize {
    match options.preprocessing_num_workers {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

fn cache_path(dir: &Path, name: &str, key: &blake3::Hash) -> PathBuf {
    let stem: String = name
        .rsplit(['/', '\\'])
        .next()
        .unwrap_or(name)
        .chars()
        .take(40)
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .collect();
    dir.join(format!("{stem}-{}.tokens", &key.to_hex()[..16]))
}

fn hash_file(path: &Path, dataset: &str, on_progress: OnProgress<'_>) -> Result<blake3::Hash> {
    use std::io::Read;
    let wrong = |e| DataError::io("read", path, e);
    let mut file = std::fs::File::open(path).map_err(wrong)?;
    let total = file.metadata().ok().map(|m| m.len());
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finalize()),
            Ok(n) => {
                hasher.update(&buffer[..n]);
                done += n as u64;
                on_progress(Progress { step: "reading", dataset, done, total });
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(wrong(e)),
        }
    }
}

/// The held-back units of all data sets together.
struct HeldBack {
    units: HashSet<(usize, u32)>,
    by_record: bool,
}

impl HeldBack {
    fn holds(&self, set: usize, store: &TokenStore, example: u32) -> bool {
        let unit = if self.by_record { store.record(example as usize) } else { example };
        self.units.contains(&(set, unit))
    }
}

/// Chooses what `val_size` holds back: whole records, so that no part of one is on both sides. Where texts are too
/// few for that (one long text, cut into pieces), pieces.
fn hold_back(sets: &[LoadedSet], options: &DataOptions) -> Result<Option<HeldBack>> {
    if options.val_size == 0.0 {
        return Ok(None);
    }
    let units = |by_record: bool| -> Vec<(usize, u32)> {
        let mut units = Vec::new();
        for (set, (_, store)) in sets.iter().enumerate() {
            let mut of_set: Vec<(usize, u32)> =
                (0..store.len()).map(|i| (set, if by_record { store.record(i) } else { i as u32 })).collect();
            of_set.dedup();
            units.extend(of_set);
        }
        units
    };
    let wanted = |n: usize| match options.val_size {
        share if share < 1.0 => ((n as f64 * share).round() as usize).max(1),
        number => number as usize,
    };
    let (mut all, mut by_record) = (units(true), true);
    if options.stage == Stage::Pt && all.len() < 2 * wanted(all.len()).max(10) {
        (all, by_record) = (units(false), false);
    }
    let n = wanted(all.len());
    if n >= all.len() {
        return Err(DataError::option(
            "val_size",
            format!("holds back {n} of {} samples, which leaves none to train on; lower it", all.len()),
        ));
    }
    let order = Permutation::new(all.len() as u64, key(&[options.seed, u64::from_le_bytes(*b"val_size")]));
    let units = (0..n).map(|i| all[order.get(i as u64) as usize]).collect();
    Ok(Some(HeldBack { units, by_record }))
}

/// `num_samples`: so many records, chosen at random; where there are fewer, some come more than once.
fn draw(items: Vec<u32>, wanted: Option<usize>, store: &TokenStore, seed: u64, set: u64) -> Vec<u32> {
    let Some(wanted) = wanted else { return items };
    let groups: Vec<&[u32]> = items.chunk_by(|a, b| store.record(*a as usize) == store.record(*b as usize)).collect();
    if groups.is_empty() {
        return items;
    }
    let n = groups.len() as u64;
    let mut out = Vec::new();
    for i in 0..wanted as u64 {
        let order = Permutation::new(n, key(&[seed, u64::from_le_bytes(*b"num_smpl"), set, i / n]));
        out.extend_from_slice(groups[order.get(i % n) as usize]);
    }
    out
}
