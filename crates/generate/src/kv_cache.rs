//! Keys and values of the tokens that were already seen.
//!
//! Every attention layer (named by its scope path) has one storage for keys and one for values, [rows, K, D] (values may be narrower). A slot is a
//! place for one sequence; its rows are one run ([`crate::rows`]), which grows by doubling, so appending a token writes one
//! row and copies nothing else. A slot whose sequence has ended is *idle*: its rows stay, for a later prompt that begins
//! with the same tokens, until another slot needs the room.
//!
//! The attention kernel gets the whole storage and the place of each sequence in it. It holds the tensors only while it
//! runs; afterwards the cache is again their sole holder and may write into them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_kernels::attention::Seq;
use phalanx_nn::NnError;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::error::Result;
use crate::rows::{Change, Rows, Run};

/// Rows that a run is rounded up to.
const ROUND: usize = 64;

struct Storage {
    k: Tensor,
    v: Tensor,
}

/// The sequences of the pass in progress.
struct Pass {
    /// (slot, new rows, first row among the pass's rows)
    parts: Vec<(usize, usize, usize)>,
    seqs: Arc<[Seq]>,
}

/// The cache. [`KvCache::handle`] is what a forward pass takes along.
pub struct KvCache(Arc<Mutex<Inner>>);

struct Inner {
    rt: Runtime,
    rows: Rows,
    /// Rows filled, by slot.
    lens: Vec<usize>,
    idle: Vec<bool>,
    layers: HashMap<String, Storage>,
    pass: Pass,
}

impl KvCache {
    /// An empty cache for `slots` sequences.
    pub fn new(rt: &Runtime, slots: usize) -> KvCache {
        KvCache(Arc::new(Mutex::new(Inner {
            rt: rt.clone(),
            rows: Rows::new(slots),
            lens: vec![0; slots],
            idle: vec![true; slots],
            layers: HashMap::new(),
            pass: Pass { parts: vec![], seqs: Arc::from([]) },
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while the lock was held cannot leave rows half counted: lengths change only in `commit`.
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes room for one more sequence.
    pub fn add_slot(&self) {
        let mut c = self.lock();
        c.rows.add_slot();
        c.lens.push(0);
        c.idle.push(true);
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.lock().lens.len()
    }

    /// Rows that a slot holds, idle or not.
    pub fn len(&self, slot: usize) -> usize {
        self.lock().lens[slot]
    }

    /// Whether a slot may be claimed.
    pub fn is_idle(&self, slot: usize) -> bool {
        self.lock().idle[slot]
    }

    /// Takes an idle slot into use, keeping the first `keep` of its rows.
    pub fn claim(&self, slot: usize, keep: usize) {
        let mut c = self.lock();
        c.idle[slot] = false;
        c.lens[slot] = c.lens[slot].min(keep);
    }

    /// Ends a slot's use; its rows stay until their room is needed.
    pub fn release(&self, slot: usize) {
        self.lock().idle[slot] = true;
    }

    /// Forgets all rows of idle slots, and gives the memory back if nothing is in use.
    pub fn clear_idle(&self) {
        let mut c = self.lock();
        c.drop_idle();
        if c.idle.iter().all(|&i| i) {
            c.reset();
        }
    }

    /// Prepares a pass over new rows: (slot, number of rows, most rows the slot will ever hold) in the order of the batch.
    ///
    /// # Errors
    /// If memory runs out; the cache is then empty.
    pub fn begin(&self, parts: &[(usize, usize, usize)]) -> Result<()> {
        let mut c = self.lock();
        for &(slot, n, most) in parts {
            let need = c.lens[slot] + n;
            if let Err(e) = c.reserve(slot, need, most) {
                // Some layers may be laid out anew already, others not: no row can be trusted.
                c.reset();
                return Err(e);
            }
        }
        let mut q = 0;
        let mut pass = Vec::with_capacity(parts.len());
        let mut seqs = Vec::with_capacity(parts.len());
        for &(slot, n, _) in parts {
            let kv_start = c.rows.run(slot).map_or(0, |r| r.start);
            seqs.push(Seq { q_start: q, q_len: n, kv_start, kv_len: c.lens[slot] + n, ahead: 0 });
            pass.push((slot, n, q));
            q += n;
        }
        c.pass = Pass { parts: pass, seqs: seqs.into() };
        Ok(())
    }

    /// The pass ran through every layer: its rows count from now on. Without it they are as if never written.
    pub fn commit(&self) {
        let mut c = self.lock();
        for (slot, n, _) in std::mem::take(&mut c.pass.parts) {
            c.lens[slot] += n;
        }
    }

    /// What a forward pass takes along.
    pub fn handle(&self) -> Box<dyn phalanx_nn::KvCache> {
        Box::new(Handle(KvCache(Arc::clone(&self.0))))
    }
}

impl Inner {
    fn reset(&mut self) {
        self.rows = Rows::new(self.lens.len());
        self.lens.fill(0);
        self.layers.clear();
    }

    fn drop_idle(&mut self) {
        for slot in 0..self.lens.len() {
            if self.idle[slot] {
                self.rows.free(slot);
                self.lens[slot] = 0;
            }
        }
    }

    fn reserve(&mut self, slot: usize, need: usize, most: usize) -> Result<()> {
        let capacity = self.rows.capacity(slot);
        if need <= capacity {
            return Ok(());
        }
        let wanted = need.max(2 * capacity).next_multiple_of(ROUND).min(most.max(need));
        if !self.rows.fits(slot, wanted) {
            self.drop_idle();
        }
        match self.rows.grow(slot, wanted) {
            Change::None => Ok(()),
            Change::Move(from, to) => self.shift(slot, from, to),
            Change::Relay(before) => self.relay(&before),
        }
    }

    fn shift(&mut self, slot: usize, from: usize, to: usize) -> Result<()> {
        let len = self.lens[slot];
        for t in self.layers.values_mut().flat_map(|s| [&mut s.k, &mut s.v]) {
            let row = width(t);
            t.f32_mut()?.copy_within(from * row..(from + len) * row, to * row);
        }
        Ok(())
    }

    fn relay(&mut self, before: &[Option<Run>]) -> Result<()> {
        let total = self.rows.total();
        for t in self.layers.values_mut().flat_map(|s| [&mut s.k, &mut s.v]) {
            let row = width(t);
            let mut new = self.rt.empty(&[total, t.dim(1), t.dim(2)], DType::F32, Category::KvCache)?;
            let (to, from) = (new.f32_mut()?, t.f32()?);
            for (slot, old) in before.iter().enumerate() {
                if let (Some(old), Some(run)) = (old, self.rows.run(slot)) {
                    let n = self.lens[slot] * row;
                    let (old, run) = (old.start * row, run.start * row);
                    to[run..run + n].copy_from_slice(&from[old..old + n]);
                }
            }
            *t = new;
        }
        Ok(())
    }
}

/// Elements of a row.
fn width(t: &Tensor) -> usize {
    t.dim(1) * t.dim(2)
}

struct Handle(KvCache);

impl phalanx_nn::KvCache for Handle {
    fn append(&mut self, scope: &str, k: &Tensor, v: &Tensor) -> phalanx_nn::Result<(Tensor, Tensor, Arc<[Seq]>)> {
        let mut c = self.0.lock();
        let c = &mut *c;
        let rows: usize = c.pass.parts.iter().map(|p| p.1).sum();
        if k.dim(0) != rows || v.dim(0) != rows {
            return Err(NnError::Cache(format!(
                "the cache expects keys and values of {rows} rows, got {:?} and {:?}",
                k.shape(),
                v.shape()
            )));
        }
        if !c.layers.contains_key(scope) {
            let total = c.rows.total();
            let empty = |like: &Tensor| c.rt.empty(&[total, like.dim(1), like.dim(2)], DType::F32, Category::KvCache);
            let storage = Storage { k: empty(k)?, v: empty(v)? };
            c.layers.insert(scope.to_owned(), storage);
        }
        let Some(storage) = c.layers.get_mut(scope) else {
            return Err(NnError::Cache(format!("no storage for {scope}")));
        };
        for (to, from) in [(&mut storage.k, k), (&mut storage.v, v)] {
            let row = width(from);
            let (to, from) = (to.f32_mut()?, from.f32()?);
            for (&(slot, n, q), seq) in c.pass.parts.iter().zip(c.pass.seqs.iter()) {
                let at = (seq.kv_start + c.lens[slot]) * row;
                to[at..at + n * row].copy_from_slice(&from[q * row..(q + n) * row]);
            }
        }
        Ok((storage.k.clone(), storage.v.clone(), Arc::clone(&c.pass.seqs)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys whose value names sequence and position.
    fn rows(rt: &Runtime, parts: &[(f32, std::ops::Range<usize>)]) -> Tensor {
        let values: Vec<f32> =
            parts.iter().flat_map(|(s, r)| r.clone().flat_map(|p| [*s * 1000.0 + p as f32; 2])).collect();
        rt.from_f32(&[values.len() / 2, 1, 2], &values, Category::Activations).unwrap()
    }

    /// Appends the next `n` rows of each (slot, sequence) and checks that all rows of all are where the Seqs say.
    fn pass(rt: &Runtime, cache: &KvCache, parts: &[(usize, f32, usize)], most: usize) {
        let plan: Vec<_> = parts.iter().map(|&(slot, _, n)| (slot, n, most)).collect();
        cache.begin(&plan).unwrap();
        let new: Vec<_> = parts.iter().map(|&(slot, s, n)| (s, cache.len(slot)..cache.len(slot) + n)).collect();
        let k = rows(rt, &new);
        let mut handle = cache.handle();
        for scope in ["a", "b"] {
            let (k, v, seqs) = handle.append(scope, &k, &k).unwrap();
            for (seq, &(_, s, n)) in seqs.iter().zip(parts) {
                assert_eq!(seq.q_len, n);
                for t in [&k, &v] {
                    for p in 0..seq.kv_len {
                        assert_eq!(t.f32().unwrap()[(seq.kv_start + p) * 2], s * 1000.0 + p as f32);
                    }
                }
            }
        }
        cache.commit();
    }

    #[test]
    fn sequences_grow_leave_and_come_back() {
        let rt = Runtime::new(1);
        let cache = KvCache::new(&rt, 3);
        (0..3).for_each(|slot| cache.claim(slot, 0));
        pass(&rt, &cache, &[(0, 1.0, 5), (1, 2.0, 70), (2, 3.0, 1)], 400);
        for _ in 0..80 {
            pass(&rt, &cache, &[(0, 1.0, 1), (2, 3.0, 1)], 400);
        }
        cache.release(1);
        pass(&rt, &cache, &[(0, 1.0, 100)], 400);
        // The slot's rows are there or were given up, never something else.
        let kept = cache.len(1);
        assert!(kept == 0 || kept == 70);
        cache.claim(1, 0);
        pass(&rt, &cache, &[(1, 4.0, 33), (0, 1.0, 1), (2, 3.0, 2)], 400);
        pass(&rt, &cache, &[(1, 4.0, 200), (2, 3.0, 120)], 400);
        assert_eq!(cache.len(1), 233);
        // A prefix is kept on a new claim.
        cache.release(2);
        let len = cache.len(2);
        cache.claim(2, 10);
        assert_eq!(cache.len(2), 10.min(len));
        pass(&rt, &cache, &[(2, 3.0, 3)], 400);
    }

    #[test]
    fn a_pass_that_failed_leaves_no_trace() {
        let rt = Runtime::new(1);
        let cache = KvCache::new(&rt, 1);
        cache.claim(0, 0);
        pass(&rt, &cache, &[(0, 1.0, 3)], 10);
        cache.begin(&[(0, 2, 10)]).unwrap();
        assert!(cache.handle().append("a", &rows(&rt, &[(9.0, 0..1)]), &rows(&rt, &[(9.0, 0..1)])).is_err());
        cache.handle().append("a", &rows(&rt, &[(9.0, 0..2)]), &rows(&rt, &[(9.0, 0..2)])).unwrap();
        assert_eq!(cache.len(0), 3);
        pass(&rt, &cache, &[(0, 1.0, 2)], 10);
        cache.release(0);
        cache.clear_idle();
        assert_eq!(rt.pool().current(Category::KvCache), 0);
    }
}
