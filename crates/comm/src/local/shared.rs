//! Buffers that a rank lends to its peers: the one place where pointers cross threads.
//!
//! A rank that is inside a call lends the slices it was called with. Its peers read or write them directly, in the time between
//! the moment when all ranks have come and the moment when the last one has said that it is through; the owner leaves the call only
//! after that, so the memory outlives every use. [`super::group`] keeps the two moments, for success and for failure alike.

use std::ops::Range;

/// A slice lent to peers.
#[derive(Clone, Copy)]
pub(super) struct Lent {
    ptr: *mut u8,
    len: usize,
    writable: bool,
}

// SAFETY: only an address; every use is an unsafe call whose contract says when the memory may be touched, and by whom.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Lent {
    /// Lends bytes to be read.
    pub(super) fn read(bytes: &[u8]) -> Lent {
        Lent { ptr: bytes.as_ptr().cast_mut(), len: bytes.len(), writable: false }
    }

    /// Lends bytes to be written. The owner does not touch them until the loan is over.
    pub(super) fn write(bytes: &mut [u8]) -> Lent {
        Lent { ptr: bytes.as_mut_ptr(), len: bytes.len(), writable: true }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn check(&self, range: &Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} leaves a lent slice of {}", self.len);
    }

    /// A range of it, to be read.
    ///
    /// # Safety
    /// The loan lasts for `'a`, and nobody writes to the range meanwhile.
    pub(super) unsafe fn slice<'a>(&self, range: Range<usize>) -> &'a [u8] {
        self.check(&range);
        // SAFETY: inside the lent slice (checked); the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.ptr.add(range.start), range.len()) }
    }

    /// A range of it, to be written.
    ///
    /// # Safety
    /// The loan lasts for `'a`, and nobody else reads or writes the range meanwhile.
    pub(super) unsafe fn slice_mut<'a>(&self, range: Range<usize>) -> &'a mut [u8] {
        self.check(&range);
        assert!(self.writable, "lent for reading only");
        // SAFETY: inside the lent slice, which was borrowed mutably (both checked); the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}
