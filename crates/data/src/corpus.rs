//! Rows and batches: which documents stand together, and the one place where targets are shifted.

use std::ops::Range;
use std::sync::Arc;

use crate::cache::TokenStore;
use crate::error::{DataError, Result};
use crate::options::{DataOptions, MixStrategy};
use crate::pack::pack;

/// A token that counts in no loss; the value that the kernels know as `IGNORE` (the training crate tests that they agree).
pub const IGNORED: i32 = -100;

/// Rows of a data set: one document each, or packed.
#[derive(Debug)]
pub(crate) struct Part {
    name: String,
    /// The data set's number, the same in the training and the evaluation part.
    number: u64,
    store: Arc<TokenStore>,
    items: Vec<u32>,
    /// Where each row begins in `items`, and the end; `None` if each item is a row.
    starts: Option<Vec<usize>>,
}

impl Part {
    pub(crate) fn new(
        name: &str,
        number: usize,
        store: Arc<TokenStore>,
        items: Vec<u32>,
        options: &DataOptions,
    ) -> Self {
        let number = number as u64;
        if !options.packing {
            return Self { name: name.into(), number, store, items, starts: None };
        }
        let lengths: Vec<usize> = items.iter().map(|i| store.tokens(*i as usize)).collect();
        let (mut packed, mut starts) = (Vec::with_capacity(items.len()), vec![0]);
        for row in pack(&lengths, options.cutoff_len) {
            packed.extend(row.into_iter().map(|i| items[i as usize]));
            starts.push(packed.len());
        }
        Self { name: name.into(), number, store, items: packed, starts: Some(starts) }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.starts.as_ref().map_or(self.items.len(), |starts| starts.len() - 1) as u64
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    fn row(&self, row: u64) -> &[u32] {
        let row = row as usize;
        match &self.starts {
            Some(starts) => &self.items[starts[row]..starts[row + 1]],
            None => &self.items[row..=row],
        }
    }
}

/// A micro-batch: documents end to end, without padding. `T` is the number of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// \[T\] The token ids.
    pub ids: Vec<u32>,
    /// \[T\] For each token the id that comes next in its document, **already shifted**; [`IGNORED`] where that does
    /// not count, and at the last token of each document.
    pub targets: Vec<i32>,
    /// \[T\] Positions, from 0 in each document.
    pub positions: Vec<u32>,
    /// The token range of each document. Tokens of different documents must not see each other.
    pub docs: Vec<Range<usize>>,
    /// For each document its number: data set (as configured, those for evaluation last) in the upper 24 bits,
    /// example in the lower 40.
    pub sample_ids: Vec<u64>,
    /// How many targets count.
    pub num_targets: usize,
}

impl Batch {
    /// Builds a batch from documents, each a list of ids and whether each is trained. For tests and for data that
    /// does not come from files.
    pub fn from_documents<'a>(documents: impl IntoIterator<Item = (u64, &'a [u32], &'a [bool])>) -> Self {
        let mut batch = Self::default();
        for (sample_id, ids, trained) in documents {
            let from = batch.ids.len();
            batch.ids.extend_from_slice(ids);
            batch.close_document(from, sample_id, |t| trained[t]);
        }
        batch
    }

    /// Makes a document of the ids from `from` on.
    fn close_document(&mut self, from: usize, sample_id: u64, trained: impl Fn(usize) -> bool) {
        let len = self.ids.len() - from;
        for t in 0..len {
            let counts = t + 1 < len && trained(t + 1);
            self.targets.push(if counts { self.ids[from + t + 1] as i32 } else { IGNORED });
            self.num_targets += usize::from(counts);
            self.positions.push(t as u32);
        }
        self.docs.push(from..from + len);
        self.sample_ids.push(sample_id);
    }
}

/// Tokenised data with its division into rows; cheap to clone and share.
#[derive(Debug, Clone)]
pub struct Corpus {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    parts: Vec<Part>,
    quotas: Vec<u64>,
    mix: MixStrategy,
    cutoff_len: usize,
    fingerprint: blake3::Hash,
    template_date: Option<String>,
}

impl Corpus {
    /// `template_date` is the day that the template printed.
    pub(crate) fn new(
        parts: Vec<Part>,
        mix: MixStrategy,
        probs: Option<&[f64]>,
        cutoff_len: usize,
        template_date: Option<String>,
    ) -> Result<Self> {
        let sizes: Vec<u64> = parts.iter().map(Part::rows).collect();
        if sizes.iter().sum::<u64>() == 0 {
            return Err(DataError::Empty("no data set holds a row".into()));
        }
        let quotas = quotas(&sizes, mix, probs)?;
        let mut hasher = blake3::Hasher::new();
        for (part, quota) in parts.iter().zip(&quotas) {
            hasher.update(part.store.examples_hash().as_bytes());
            for number in [part.rows(), *quota, part.items.len() as u64, part.starts.is_some().into()] {
                hasher.update(&number.to_le_bytes());
            }
            for item in &part.items {
                hasher.update(&item.to_le_bytes());
            }
        }
        hasher.update(format!("{mix:?} {cutoff_len}").as_bytes());
        let fingerprint = hasher.finalize();
        Ok(Self { inner: Arc::new(Inner { parts, quotas, mix, cutoff_len, fingerprint, template_date }) })
    }

    /// The day (`YYYY-MM-DD`) that the chat template printed, if it is one that does.
    pub fn template_date(&self) -> Option<&str> {
        self.inner.template_date.as_deref()
    }

    /// Rows that one epoch visits.
    pub fn rows_per_epoch(&self) -> u64 {
        self.inner.quotas.iter().sum()
    }

    /// The data sets: the number that stands in the upper bits of a sample id, and the name.
    pub fn names(&self) -> impl Iterator<Item = (u64, &str)> {
        self.inner.parts.iter().map(|p| (p.number, p.name.as_str()))
    }

    /// The longest a row can be, in tokens.
    pub fn cutoff_len(&self) -> usize {
        self.inner.cutoff_len
    }

    /// Documents, tokens and counted targets of all rows together, each document once.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for part in &self.inner.parts {
            totals.rows += part.rows();
            for item in &part.items {
                let (n, mask) = (part.store.tokens(*item as usize), part.store.mask(*item as usize));
                totals.documents += 1;
                totals.longest = totals.longest.max(n as u64);
                totals.tokens += n as u64;
                totals.targets += (1..n).filter(|t| mask(*t)).count() as u64;
            }
        }
        totals
    }

    /// Hash of the contents and their division into rows.
    pub(crate) fn fingerprint(&self) -> &blake3::Hash {
        &self.inner.fingerprint
    }

    pub(crate) fn sizes(&self) -> Vec<u64> {
        self.inner.parts.iter().map(Part::rows).collect()
    }

    pub(crate) fn quotas(&self) -> &[u64] {
        &self.inner.quotas
    }

    pub(crate) fn mix(&self) -> MixStrategy {
        self.inner.mix
    }

    /// Rows, each named by data set and row, as one batch.
    pub(crate) fn batch(&self, rows: impl IntoIterator<Item = (usize, u64)>) -> Batch {
        let mut batch = Batch::default();
        for (part_index, row) in rows {
            let part = &self.inner.parts[part_index];
            for item in part.row(row) {
                let from = batch.ids.len();
                part.store.extend_ids(*item as usize, &mut batch.ids);
                let sample_id = part.number << 40 | u64::from(*item);
                batch.close_document(from, sample_id, part.store.mask(*item as usize));
            }
        }
        batch
    }
}

/// Sizes of a [`Corpus`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Totals {
    /// Rows.
    pub rows: u64,
    /// Documents.
    pub documents: u64,
    /// Tokens.
    pub tokens: u64,
    /// Tokens whose prediction counts in the loss.
    pub targets: u64,
    /// Tokens of the longest document.
    pub longest: u64,
}

/// More rows than any run reads: an epoch beyond it comes of a mistyped weight.
const MOST_ROWS: f64 = (1u64 << 40) as f64;

/// How many rows of each data set an epoch visits.
///
/// The epoch is as long as the first data set lasts (`interleave_under`) or the last (`interleave_over`) when rows are
/// drawn in proportion to the weights; each set's share of that length is rounded, and is at least one row.
///
/// # Errors
/// If one weight is so small beside the others that the epoch would never end.
fn quotas(sizes: &[u64], mix: MixStrategy, probs: Option<&[f64]>) -> Result<Vec<u64>> {
    if mix == MixStrategy::Concat {
        return Ok(sizes.to_vec());
    }
    let equal = vec![1.0; sizes.len()];
    let probs = probs.unwrap_or(&equal);
    let lasts = sizes.iter().zip(probs).map(|(n, p)| *n as f64 / p);
    let under = mix == MixStrategy::InterleaveUnder;
    let length = if under { lasts.fold(f64::INFINITY, f64::min) } else { lasts.fold(0.0, f64::max) };
    // Huge or infinite where a weight is next to nothing; that of an epoch cut short is bounded by the data.
    let rows: f64 = if under { 0.0 } else { probs.iter().map(|p| length * p).sum() };
    if !length.is_finite() || rows > MOST_ROWS {
        return Err(DataError::option(
            "interleave_probs",
            format!(
                "{probs:?} with mix_strategy: {} makes an epoch of more than 2^40 rows; give shares that lie closer together, or leave out a data set",
                if under { "interleave_under" } else { "interleave_over" }
            ),
        ));
    }
    let quota = |(n, p): (&u64, &f64)| {
        let quota = ((length * p).round() as u64).max(1);
        if under { quota.min(*n) } else { quota }
    };
    Ok(sizes.iter().zip(probs).map(quota).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_shifted_inside_each_document_only() {
        let batch = Batch::from_documents([
            (7, &[10, 11, 12][..], &[false, false, true][..]),
            (8, &[20], &[true]),
            (9, &[30, 31, 32, 33], &[true; 4]),
            (10, &[40, 41], &[false; 2]),
        ]);
        assert_eq!(batch.targets, [-100, 12, -100, -100, 31, 32, 33, -100, -100, -100]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 0, 1, 2, 3, 0, 1]);
        assert_eq!(batch.docs, [0..3, 3..4, 4..8, 8..10]);
        assert_eq!((batch.sample_ids, batch.num_targets), (vec![7, 8, 9, 10], 4));
    }

    #[test]
    fn quotas_follow_the_weights() {
        let quotas = |sizes, mix, probs| quotas(sizes, mix, probs).unwrap();
        let sizes = &[100, 10, 1000];
        assert_eq!(quotas(sizes, MixStrategy::Concat, None), sizes);
        assert_eq!(quotas(sizes, MixStrategy::InterleaveUnder, None), [10, 10, 10]);
        assert_eq!(quotas(sizes, MixStrategy::InterleaveUnder, Some(&[0.5, 0.1, 0.4])), [50, 10, 40]);
        assert_eq!(quotas(sizes, MixStrategy::InterleaveOver, Some(&[0.5, 0.1, 0.4])), [1250, 250, 1000]);
        // Next to nothing of a set is one row of it, where the epoch ends with the other.
        assert_eq!(quotas(sizes, MixStrategy::InterleaveUnder, Some(&[1e-300, 1.0, 1e-300])), [1, 10, 1]);
    }

    #[test]
    fn an_epoch_without_end_is_refused() {
        let sizes = [100, 10];
        for (mix, probs) in [
            (MixStrategy::InterleaveOver, [1e-300, 1.0]),
            (MixStrategy::InterleaveOver, [1e-320, 1e300]),
            (MixStrategy::InterleaveOver, [1e-12, 1.0]),
            (MixStrategy::InterleaveUnder, [5e-324, 5e-324]),
        ] {
            let e = quotas(&sizes, mix, Some(&probs)).unwrap_err().to_string();
            assert!(e.starts_with("interleave_probs: ") && e.contains("2^40 rows"), "{e}");
        }
    }
}
