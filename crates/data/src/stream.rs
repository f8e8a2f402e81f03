//! The sample stream: an endless order of rows that is computed from a position, never stored.
//!
//! Row number `p` of the stream is slot `p mod E` of epoch `p / E`, with E rows an epoch. A permutation keyed by seed
//! and epoch maps slots to data sets (each has as many slots as its share of an epoch) and to the k-th visit of that
//! set; visits run through the set's own permutation, a new one each time round. So the order depends on nothing but
//! seed and data: not on threads, batch sizes, prefetching or what was read before. Seeking is setting a number, and
//! a checkpoint needs that number and a fingerprint of the data.

use serde::{Deserialize, Serialize};

use crate::corpus::{Batch, Corpus};
use crate::error::{DataError, Result};
use crate::options::{DataOptions, MixStrategy};
use crate::permute::{Permutation, key};

/// How a [`Stream`] orders its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// Whether each epoch has a random order of its own.
    pub shuffle: bool,
    /// Decides those orders.
    pub seed: u64,
}

impl StreamOptions {
    /// For training, as the user has it.
    pub fn of(options: &DataOptions) -> Self {
        Self { shuffle: options.shuffle, seed: options.seed }
    }

    /// For evaluation: the order of the files.
    pub fn in_order() -> Self {
        Self { shuffle: false, seed: 0 }
    }
}

/// Where a stream stands; part of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamState {
    /// Rows given out since the beginning.
    pub position: u64,
    /// Rows in an epoch.
    pub rows_per_epoch: u64,
    /// Hash of the tokenised data and its division into rows.
    pub data: String,
    /// The seed and whether rows are shuffled.
    pub order: String,
    /// The day that the chat template printed, if it is one that does. A run that goes on prepares its data with
    /// [`DataOptions::of_run`], so that midnight does not change it.
    #[serde(default)]
    pub template_date: Option<String>,
}

/// Gives out batches of rows, epoch after epoch.
#[derive(Debug, Clone)]
pub struct Stream {
    corpus: Corpus,
    options: StreamOptions,
    position: u64,
    /// For mixing in proportion without shuffling: data set and visit of each slot.
    schedule: Vec<(u32, u64)>,
}

impl Stream {
    /// A stream at its beginning.
    pub fn new(corpus: Corpus, options: StreamOptions) -> Self {
        let schedule = if !options.shuffle && corpus.mix() != MixStrategy::Concat {
            even_schedule(corpus.quotas())
        } else {
            Vec::new()
        };
        Self { corpus, options, position: 0, schedule }
    }

    /// The next `rows` rows, fewer at the end of an epoch: a batch never reaches into the next one, and no row is
    /// left out.
    ///
    /// # Errors
    /// If `rows` is 0.
    pub fn next_batch(&mut self, rows: usize) -> Result<Batch> {
        if rows == 0 {
            return Err(DataError::option("per_device_train_batch_size", "is 0; a batch needs at least one row"));
        }
        let taken = (rows as u64).min(self.rows_left());
        let range = self.position..self.position + taken;
        let batch = self.corpus.batch(range.map(|p| self.row_at(p)));
        self.position += taken;
        Ok(batch)
    }

    /// Rows given out since the beginning, all epochs together.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The epoch of the next row, from 0.
    pub fn epoch(&self) -> u64 {
        self.position / self.rows_per_epoch()
    }

    /// Rows left in the current epoch, at least 1.
    pub fn rows_left(&self) -> u64 {
        self.rows_per_epoch() - self.position % self.rows_per_epoch()
    }

    /// Rows in an epoch.
    pub fn rows_per_epoch(&self) -> u64 {
        self.corpus.rows_per_epoch()
    }

    /// Goes to any position, in constant time.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
    }

    /// What a checkpoint must hold to go on from here.
    pub fn state(&self) -> StreamState {
        self.state_at(self.position)
    }

    pub(crate) fn state_at(&self, position: u64) -> StreamState {
        StreamState {
            position,
            rows_per_epoch: self.rows_per_epoch(),
            data: self.corpus.fingerprint().to_hex().to_string(),
            order: if self.options.shuffle {
                format!("shuffled by seed {}", self.options.seed)
            } else {
                "in order".into()
            },
            template_date: self.corpus.template_date().map(str::to_owned),
        }
    }

    /// Goes on from a checkpoint.
    ///
    /// # Errors
    /// [`DataError::Resume`] if data or order are not those of the checkpoint.
    pub fn resume(&mut self, state: &StreamState) -> Result<()> {
        let now = self.state();
        if now.data != state.data {
            let rows = if now.rows_per_epoch == state.rows_per_epoch {
                String::new()
            } else {
                format!(" ({} rows an epoch then, {} now)", state.rows_per_epoch, now.rows_per_epoch)
            };
            let days = match (&state.template_date, &now.template_date) {
                (Some(then), Some(now)) if then != now => {
                    format!(" (the template printed the day {then} then and {now} now: set template_date: {then})")
                }
                _ => String::new(),
            };
            return Err(DataError::Resume(format!(
                "the data is not that of the checkpoint{rows}{days}: a data file, the tokenizer, the template or a data option \
                 (dataset, cutoff_len, packing, val_size, ...) has changed; undo the change, or start a new run"
            )));
        }
        if now.order != state.order {
            return Err(DataError::Resume(format!(
                "rows were {} and are now {}; set seed and disable_shuffling as they were",
                state.order, now.order
            )));
        }
        self.position = state.position;
        Ok(())
    }

    /// Data set and row at a position.
    fn row_at(&self, position: u64) -> (usize, u64) {
        let per_epoch = self.rows_per_epoch();
        let (epoch, slot) = (position / per_epoch, position % per_epoch);
        let StreamOptions { shuffle, seed } = self.options;
        let (part, visit) = if let Some((part, visit)) = self.schedule.get(slot as usize) {
            (*part as usize, *visit)
        } else {
            let slot = if shuffle { Permutation::new(per_epoch, key(&[seed, 1, epoch])).get(slot) } else { slot };
            self.part_of_slot(slot)
        };
        let (size, quota) = (self.corpus.sizes()[part], self.corpus.quotas()[part]);
        // Visits are counted on over the epochs, so that a set larger than its share is seen whole in time.
        let visits = epoch * quota + visit;
        let (round, index) = (visits / size, visits % size);
        let row = if shuffle { Permutation::new(size, key(&[seed, 2, part as u64, round])).get(index) } else { index };
        (part, row)
    }

    fn part_of_slot(&self, slot: u64) -> (usize, u64) {
        let mut visit = slot;
        for (part, quota) in self.corpus.quotas().iter().enumerate() {
            if visit < *quota {
                return (part, visit);
            }
            visit -= quota;
        }
        unreachable!("slot {slot} lies beyond the epoch")
    }
}

/// Spreads each data set evenly over the epoch: its visit j stands at (j + 1/2) / quota.
fn even_schedule(quotas: &[u64]) -> Vec<(u32, u64)> {
    let mut slots: Vec<(u32, u64)> =
        quotas.iter().enumerate().flat_map(|(part, quota)| (0..*quota).map(move |j| (part as u32, j))).collect();
    let place = |(part, j): &(u32, u64)| (u128::from(2 * j + 1), u128::from(quotas[*part as usize]));
    slots.sort_by(|a, b| {
        let ((x, n), (y, m)) = (place(a), place(b));
        (x * m).cmp(&(y * n))
    });
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_even_schedule_keeps_the_proportion_everywhere() {
        let slots = even_schedule(&[6, 3, 1]);
        let sets: Vec<u32> = slots.iter().map(|s| s.0).collect();
        assert_eq!(sets, [0, 1, 0, 0, 1, 2, 0, 0, 1, 0]);
        let visits: Vec<u64> = slots.iter().filter(|s| s.0 == 0).map(|s| s.1).collect();
        assert_eq!(visits, [0, 1, 2, 3, 4, 5]);
    }
}
