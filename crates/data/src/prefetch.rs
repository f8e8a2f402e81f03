//! Batches made ahead of time by a thread of their own.
//!
//! The thread only runs ahead; the position that counts is that of the batches handed over. What is still on its way
//! when a checkpoint is written is made again after resuming, so nothing is lost and nothing repeated.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::corpus::Batch;
use crate::error::{DataError, Result};
use crate::stream::{Stream, StreamState};

/// A [`Stream`] whose next batches are made in the background, always of the same number of rows.
#[derive(Debug)]
pub struct Prefetch {
    /// `None` only while dropping.
    receiver: Option<Receiver<(Batch, u64)>>,
    thread: Option<JoinHandle<()>>,
    /// A copy that never gives out batches but knows the order's identity.
    stream: Stream,
    position: u64,
}

impl Prefetch {
    /// Starts at the stream's position, at most `depth` batches ahead.
    ///
    /// # Errors
    /// If `rows` is 0 or no thread can be started.
    pub fn new(stream: Stream, rows: usize, depth: usize) -> Result<Self> {
        let position = stream.position();
        let mut ahead = stream.clone();
        // Refuses 0 rows here, not in the thread.
        stream.clone().next_batch(rows)?;
        let (sender, receiver) = sync_channel(depth.max(1));
        let thread = std::thread::Builder::new()
            .name("phalanx-prefetch".into())
            .spawn(move || {
                while let Ok(batch) = ahead.next_batch(rows) {
                    if sender.send((batch, ahead.position())).is_err() {
                        return;
                    }
                }
            })
            .map_err(|e| DataError::Empty(format!("cannot start the prefetch thread: {e}")))?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread), stream, position })
    }

    /// The next batch.
    ///
    /// # Errors
    /// If the thread has ended, which only a defect makes it do.
    pub fn next_batch(&mut self) -> Result<Batch> {
        let received = self.receiver.as_ref().and_then(|r| r.recv().ok());
        let (batch, position) =
            received.ok_or_else(|| DataError::Empty("the prefetch thread has ended; run again without it".into()))?;
        self.position = position;
        Ok(batch)
    }

    /// Rows handed over since the beginning of the stream.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// What a checkpoint must hold to go on after the batches handed over so far.
    pub fn state(&self) -> StreamState {
        self.stream.state_at(self.position)
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // The thread ends when it finds the channel closed.
        drop(self.receiver.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
