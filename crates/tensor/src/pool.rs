//! Pooled memory, counted by category.
//!
//! Blocks of 2 MiB and more are huge-page-advised mappings; smaller ones are rounded to a few size classes. A freed block is
//! kept for the next request of about its size, so a training step asks nothing of the system once it has run twice.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use phalanx_kernels::scratch::{HUGE_PAGE, HugeBuf};

use crate::error::{Result, TensorError};

/// What a piece of memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Parameters as the model computes with them.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Values of the forward and backward pass in flight.
    Activations,
    /// Buffers of collectives.
    Communication,
    /// Scratch of one call: logits of a chunk, packing.
    Workspace,
    /// Keys and values of generation.
    KvCache,
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 7] = [
        Category::Weights,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Communication,
        Category::Workspace,
        Category::KvCache,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Communication => "communication",
            Category::Workspace => "workspace",
            Category::KvCache => "kv_cache",
        }
    }
}

/// Bytes in use and their peak, by category and in all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes in use now.
    pub current: BTreeMap<&'static str, usize>,
    /// The most that was ever in use, each category by itself.
    pub peak: BTreeMap<&'static str, usize>,
    /// The most that was in use over all categories at one moment.
    pub peak_total: usize,
    /// Bytes held for reuse.
    pub cached: usize,
    /// How many blocks the system was asked for.
    pub system_allocations: usize,
}

/// Granularity of small blocks.
const SMALL_PAGE: usize = 4096;

/// Bytes that no system gives; below it, sums of sizes do not wrap.
const MOST: usize = isize::MAX as usize / 4;

#[derive(Default)]
struct Inner {
    free: BTreeMap<usize, Vec<HugeBuf>>,
    cached: usize,
    current: [usize; 7],
    peak: [usize; 7],
    total: usize,
    peak_total: usize,
    system_allocations: usize,
    limit: Option<usize>,
}

/// A pool of memory blocks; clones share it.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Inner>>);

/// A block on loan from a [`Pool`]; dropping it gives it back.
pub(crate) struct Block {
    buf: Option<HugeBuf>,
    bytes: usize,
    category: Category,
    pool: Pool,
}

impl Block {
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.buf.as_ref().map_or(std::ptr::NonNull::<u64>::dangling().as_ptr().cast(), HugeBuf::as_ptr)
    }
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }
    pub(crate) fn category(&self) -> Category {
        self.category
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            self.pool.give_back(buf, self.bytes, self.category);
        }
    }
}

/// Rounds up to what a mapping is rounded to anyway (4 KiB, or huge pages), and so that at most an eighth of a larger block is
/// wasted and blocks of similar sizes are interchangeable.
fn size_class(bytes: usize) -> usize {
    let unit = if bytes >= HUGE_PAGE { HUGE_PAGE } else { SMALL_PAGE };
    let step = (bytes.next_power_of_two() / 16).max(unit).min(8 * HUGE_PAGE);
    bytes.next_multiple_of(step)
}

/// How far the bytes held from the system may go beyond the peak in use: sizes peak at different moments of a step (activations
/// before gradients), and with no headroom each step would map and fault in again what the last one gave back (measured:
/// docs/performance-notes.md).
fn headroom(peak: usize) -> usize {
    (peak / 8).max(64 << 20)
}

impl Pool {
    /// An empty pool.
    pub fn new() -> Pool {
        Pool::default()
    }

    /// Refuses requests that would take the bytes in use beyond `limit`.
    pub fn set_limit(&self, limit: Option<usize>) {
        self.lock().limit = limit;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A block of at least `bytes` bytes. Its contents are whatever was there before.
    pub(crate) fn take(&self, bytes: usize, category: Category) -> Result<Block> {
        if bytes == 0 {
            return Ok(Block { buf: None, bytes: 0, category, pool: self.clone() });
        }
        let mut p = self.lock();
        if bytes > MOST {
            return Err(oom(&p, bytes, category, "the address space".into()));
        }
        let class = size_class(bytes);
        if let Some(limit) = p.limit.filter(|&l| p.total + class > l) {
            return Err(oom(&p, class, category, format!("{limit} bytes")));
        }
        // A block up to a quarter larger will do; beyond that the waste outweighs the reuse.
        let found = p.free.range(class..=class + class / 4).next().map(|(&size, _)| size);
        let buf = match found {
            Some(size) => {
                let list = p.free.entry(size).or_default();
                let buf = list.pop();
                if list.is_empty() {
                    p.free.remove(&size);
                }
                p.cached -= size;
                buf
            }
            None => None,
        };
        let buf = match buf {
            Some(b) => b,
            None => {
                // What is held for reuse must not come on top of the peak: sizes that did not fit this request go first.
                let most = (p.peak_total + headroom(p.peak_total)).max(p.total + class);
                while p.total + class + p.cached > most {
                    let Some((size, list)) = p.free.pop_last() else { break };
                    p.cached -= size * list.len();
                }
                p.system_allocations += 1;
                match HugeBuf::new(class) {
                    Ok(b) => b,
                    Err(e) => return Err(oom(&p, class, category, format!("what the system gives ({e})"))),
                }
            }
        };
        let class = buf.len();
        p.current[category as usize] += class;
        p.peak[category as usize] = p.peak[category as usize].max(p.current[category as usize]);
        p.total += class;
        p.peak_total = p.peak_total.max(p.total);
        Ok(Block { buf: Some(buf), bytes: class, category, pool: self.clone() })
    }

    fn give_back(&self, buf: HugeBuf, bytes: usize, category: Category) {
        let mut p = self.lock();
        p.current[category as usize] -= bytes;
        p.total -= bytes;
        // Keep what a step of fixed shapes needs again; under changing shapes do not hoard.
        if p.total + p.cached + bytes <= p.peak_total + headroom(p.peak_total) {
            p.cached += bytes;
            p.free.entry(bytes).or_default().push(buf);
        }
    }

    /// Gives cached blocks back to the system.
    pub fn trim(&self) {
        let mut p = self.lock();
        p.free.clear();
        p.cached = 0;
    }

    /// Bytes in use in a category, rounded up to blocks.
    pub fn current(&self, category: Category) -> usize {
        self.lock().current[category as usize]
    }

    /// Figures for reports.
    pub fn stats(&self) -> PoolStats {
        let p = self.lock();
        let by = |a: &[usize; 7]| Category::ALL.iter().map(|&c| (c.name(), a[c as usize])).collect();
        PoolStats {
            current: by(&p.current),
            peak: by(&p.peak),
            peak_total: p.peak_total,
            cached: p.cached,
            system_allocations: p.system_allocations,
        }
    }
}

fn oom(p: &Inner, asked: usize, category: Category, budget: String) -> TensorError {
    let mut held: Vec<_> = Category::ALL.iter().map(|&c| (p.current[c as usize], c.name())).collect();
    held.sort_unstable_by(|a, b| b.cmp(a));
    let largest = held.iter().take(3).map(|(b, n)| format!("{n} {} MiB", b >> 20)).collect::<Vec<_>>().join(", ");
    TensorError::OutOfMemory { asked, category: category.name(), in_use: p.total, budget, largest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_reused_and_counted() {
        let pool = Pool::new();
        let a = pool.take(5 << 20, Category::Weights).unwrap();
        let in_use = pool.current(Category::Weights);
        assert!((5 << 20..=6 << 20).contains(&in_use));
        drop(a);
        assert_eq!(pool.current(Category::Weights), 0);
        for _ in 0..10 {
            let _b = pool.take(5 << 20, Category::Activations).unwrap();
        }
        let s = pool.stats();
        assert_eq!(s.system_allocations, 1);
        assert_eq!(s.peak["activations"], in_use);
        assert_eq!(s.peak_total, in_use);
    }

    #[test]
    fn changing_sizes_do_not_hoard() {
        let pool = Pool::new();
        for i in 1..200usize {
            let _a = pool.take(i * 37 % 101 * (1 << 18), Category::Activations).unwrap();
            let _b = pool.take(i * 53 % 97 * (1 << 16), Category::Activations).unwrap();
            let s = pool.stats();
            assert!(s.current["activations"] + s.cached <= s.peak_total + headroom(s.peak_total), "{s:?}");
        }
    }

    #[test]
    fn a_limit_names_the_holders() {
        let pool = Pool::new();
        pool.set_limit(Some(10 << 20));
        let _a = pool.take(8 << 20, Category::Gradients).unwrap();
        assert!(pool.take(usize::MAX, Category::Activations).is_err());
        let e = pool.take(8 << 20, Category::Activations).err().unwrap().to_string();
        assert!(e.contains("gradients 8 MiB") && e.contains("activations"), "{e}");
    }

    #[test]
    fn size_classes_waste_little() {
        for b in [1usize, 255, 256, 257, 1000, 4097, 1 << 20, (1 << 20) + 1, 3 << 20, 100 << 20, (100 << 20) + 1] {
            let c = size_class(b);
            let waste = if b < HUGE_PAGE { 4096.max(b / 8) } else { HUGE_PAGE.max(b / 8) };
            assert!(c >= b && c - b <= waste, "{b} -> {c}");
            assert_eq!(size_class(c), c);
        }
    }
}
