//! How row kernels are cut into tasks, and how a task gets its part of an output.

use std::marker::PhantomData;
use std::ops::Range;

use crate::team::SendPtr;

/// Elements that a task of a memory-bound kernel handles: long enough to hide its start, short enough to share out.
pub(crate) const PIECE: usize = 1 << 15;

/// Rows of `width` elements that one task handles; depends on the shape alone.
pub(crate) fn rows_per_task(width: usize) -> usize {
    (PIECE / width.max(1)).max(1)
}

/// Pieces that a sum over rows is cut into at most; the partial sums are added in order.
const SUM_PIECES: usize = 32;

/// Rows of one piece of a sum over `rows`; depends on the shape alone.
pub(crate) fn rows_per_sum(rows: usize) -> usize {
    rows.div_ceil(SUM_PIECES).max(32)
}

/// The `i`th piece when `total` is cut into pieces of `each`.
pub(crate) fn piece(i: usize, each: usize, total: usize) -> Range<usize> {
    i * each..((i + 1) * each).min(total)
}

/// An output slice that tasks take disjoint parts of.
pub(crate) struct Parts<'a, T> {
    ptr: SendPtr<T>,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<'a, T: Send> Parts<'a, T> {
    pub(crate) fn new(x: &'a mut [T]) -> Self {
        Parts { ptr: SendPtr(x.as_mut_ptr()), len: x.len(), borrow: PhantomData }
    }

    /// The elements of a range.
    ///
    /// # Safety
    /// While the result lives, nothing else may take a range that overlaps it.
    ///
    /// # Panics
    /// If the range does not fit.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get(&self, r: Range<usize>) -> &mut [T] {
        assert!(r.start <= r.end && r.end <= self.len, "{r:?} of {}", self.len);
        // SAFETY: within the slice that is mutably borrowed for 'a; disjointness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.get().add(r.start), r.len()) }
    }

    /// The place of element `i`, for parts that are not one range (columns of a matrix).
    ///
    /// # Panics
    /// If it lies beyond the end.
    pub(crate) fn at(&self, i: usize) -> *mut T {
        assert!(i <= self.len, "{i} of {}", self.len);
        self.ptr.get().wrapping_add(i)
    }
}
