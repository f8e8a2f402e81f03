//! Memory straight from the kernel: 2 MiB-aligned, huge pages advised, zeroed; and the working buffers of a [`Device`].
//!
//! With 4 KiB pages a large product spends up to half its time in page walks (measured: docs/performance-notes.md), and a
//! `Vec` gives no say in the matter. A [`HugeBuf`] is one anonymous mapping, owned; the tensor pool builds on it too.
//!
//! [`Device`]: crate::Device

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::{KernelError, Result};

/// Alignment of every buffer, and the size of a huge page on x86-64 and arm64.
pub const HUGE_PAGE: usize = 2 << 20;

/// An owned, zeroed mapping, aligned to [`HUGE_PAGE`].
///
/// Pages are taken from the system when first touched. Sizes of at least [`HUGE_PAGE`] are rounded up to whole huge pages,
/// smaller ones to 4 KiB. Access is through the raw pointer: what the bytes mean is the owner's affair.
pub struct HugeBuf {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and has no ties to a thread.
unsafe impl Send for HugeBuf {}
// SAFETY: a shared `HugeBuf` gives out nothing but its address and length.
unsafe impl Sync for HugeBuf {}

impl HugeBuf {
    /// Maps at least `bytes` bytes of zeros; 0 bytes map nothing.
    ///
    /// # Errors
    /// What `mmap` reports, usually that there is no memory left.
    pub fn new(bytes: usize) -> io::Result<HugeBuf> {
        let unit = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 4096 };
        let too_big = || io::Error::new(io::ErrorKind::OutOfMemory, format!("a buffer of {bytes} bytes"));
        let len = bytes.checked_next_multiple_of(unit).ok_or_else(too_big)?;
        if len == 0 {
            return Ok(HugeBuf { ptr: NonNull::dangling(), len: 0 });
        }
        // Map one huge page more than asked, then give back what lies outside the aligned part.
        let mapped = len.checked_add(HUGE_PAGE).ok_or_else(too_big)?;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let head = raw.addr().next_multiple_of(HUGE_PAGE) - raw.addr();
        let tail = mapped - head - len;
        // SAFETY: all ranges lie inside the mapping just made; nothing has a reference into it yet. The advice is only a
        // hint, so its result does not matter.
        unsafe {
            let ptr = raw.byte_add(head);
            if head > 0 {
                libc::munmap(raw, head);
            }
            if tail > 0 {
                libc::munmap(ptr.byte_add(len), tail);
            }
            #[cfg(target_os = "linux")]
            if len >= HUGE_PAGE {
                libc::madvise(ptr, len, libc::MADV_HUGEPAGE);
            }
            Ok(HugeBuf { ptr: NonNull::new_unchecked(ptr.cast()), len })
        }
    }

    /// First byte; aligned to [`HUGE_PAGE`] (dangling when [`HugeBuf::len`] is 0).
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Number of bytes mapped, at least as many as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HugeBuf {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: exactly the range that `new` kept, unmapped once.
            unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
        }
    }
}

/// A working buffer that grows on demand and is kept from call to call, so that a kernel call allocates nothing once warm.
pub struct Space(Mutex<HugeBuf>);

impl Space {
    fn new() -> Space {
        // A buffer of 0 bytes maps nothing and cannot fail.
        Space(Mutex::new(HugeBuf { ptr: NonNull::dangling(), len: 0 }))
    }

    /// Takes the buffer with room for `floats` values of f32, whose old contents are arbitrary. Nobody else has it until the
    /// guard is dropped.
    ///
    /// # Errors
    /// If the system has no memory for it; the buffer then stays as it was.
    pub fn take(&self, floats: usize) -> Result<SpaceGuard<'_>> {
        let mut buf = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let bytes = floats.saturating_mul(size_of::<f32>());
        if buf.len() < bytes {
            // Some room to grow, so that slowly rising sizes do not map anew each time. Pages of the new mapping cost nothing
            // before they are touched, and the old one is gone by then.
            let want = bytes.saturating_add(bytes / 4);
            *buf = HugeBuf::new(want).map_err(|e| KernelError::Memory { bytes: want, why: e.to_string() })?;
        }
        Ok(SpaceGuard { buf, floats })
    }
}

/// A [`Space`] in use.
pub struct SpaceGuard<'a> {
    buf: MutexGuard<'a, HugeBuf>,
    floats: usize,
}

impl SpaceGuard<'_> {
    /// First value, aligned to [`HUGE_PAGE`].
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.buf.as_ptr().cast()
    }

    /// The values asked for.
    pub fn as_mut_slice(&mut self) -> &mut [f32] {
        if self.floats == 0 {
            return &mut [];
        }
        // SAFETY: the mapping holds at least `floats` initialised values (zeroed by mmap, later written as f32), is aligned,
        // and is borrowed mutably through the guard.
        unsafe { std::slice::from_raw_parts_mut(self.buf.as_ptr().cast(), self.floats) }
    }
}

/// The working buffers of one device: one for each worker, and some that a whole call shares.
///
/// A task cannot return an error, so a call first sees to it that [`Scratch::reserve`] has room for its tasks, and they take
/// what was reserved. Buffers only grow, so no other call can take the room away.
pub struct Scratch {
    workers: Vec<Space>,
    /// Values that every worker's buffer has room for.
    reserved: AtomicUsize,
    packed: Space,
    sums: Space,
    scales: Space,
    rounded: [Space; 2],
}

impl Scratch {
    pub(crate) fn new(workers: usize) -> Scratch {
        Scratch {
            workers: (0..workers).map(|_| Space::new()).collect(),
            reserved: AtomicUsize::new(0),
            packed: Space::new(),
            sums: Space::new(),
            scales: Space::new(),
            rounded: [Space::new(), Space::new()],
        }
    }

    /// Gives every worker's buffer room for `floats` values.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub(crate) fn reserve(&self, floats: usize) -> Result<()> {
        if self.reserved.load(Ordering::Acquire) < floats {
            for space in &self.workers {
                space.take(floats)?;
            }
            self.reserved.fetch_max(floats, Ordering::AcqRel);
        }
        Ok(())
    }

    /// The buffer of one worker, for use inside its task: `floats` values, no more than the call has reserved.
    ///
    /// # Panics
    /// If they were not reserved.
    pub(crate) fn worker(&self, worker: usize, floats: usize) -> SpaceGuard<'_> {
        assert!(floats <= self.reserved.load(Ordering::Acquire), "a task takes {floats} values that nobody reserved");
        let buf = self.workers[worker].0.lock().unwrap_or_else(|e| e.into_inner());
        SpaceGuard { buf, floats }
    }

    /// Packed operands that all tasks of a product read.
    pub(crate) fn packed(&self) -> &Space {
        &self.packed
    }

    /// Products that wait for their factor before they join C.
    pub(crate) fn sums(&self) -> &Space {
        &self.sums
    }

    /// An operand (0 or 1) as a low-precision recipe rounds it.
    pub(crate) fn rounded(&self, which: usize) -> &Space {
        &self.rounded[which]
    }

    /// Scales of an operand's blocks.
    pub(crate) fn scales(&self) -> &Space {
        &self.scales
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_long_enough() {
        for bytes in [0usize, 1, 4096, 4097, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE] {
            let b = HugeBuf::new(bytes).unwrap();
            assert!(b.len() >= bytes && b.is_empty() == (bytes == 0));
            if bytes > 0 {
                assert_eq!(b.as_ptr().addr() % HUGE_PAGE, 0);
                // SAFETY: both bytes lie inside the mapping.
                unsafe {
                    assert_eq!((*b.as_ptr(), *b.as_ptr().add(b.len() - 1)), (0, 0));
                    *b.as_ptr().add(b.len() - 1) = 7;
                }
            }
        }
        assert_eq!(HugeBuf::new(usize::MAX).err().unwrap().kind(), io::ErrorKind::OutOfMemory);
        assert!(HugeBuf::new(1 << 60).is_err());
    }

    #[test]
    fn a_space_grows_and_keeps_its_memory() {
        let s = Space::new();
        s.take(1000).unwrap().as_mut_slice().fill(3.0);
        let first = s.take(10).unwrap().as_mut_ptr();
        assert_eq!(s.take(1000).unwrap().as_mut_ptr(), first);
        assert_eq!(s.take(1 << 20).unwrap().as_mut_slice().len(), 1 << 20);
        assert!(s.take(0).unwrap().as_mut_slice().is_empty());
    }

    #[test]
    fn no_memory_is_an_error_and_what_was_reserved_stays() {
        let s = Scratch::new(2);
        s.reserve(1000).unwrap();
        s.worker(1, 1000).as_mut_slice()[999] = 3.0;
        for floats in [1 << 58, usize::MAX] {
            let e = s.reserve(floats).unwrap_err();
            assert!(matches!(e, KernelError::Memory { .. }) && e.to_string().contains("Lower the batch"), "{e}");
            assert!(s.packed().take(floats).is_err());
        }
        assert_eq!(s.worker(1, 1000).as_mut_slice()[999], 3.0);
    }
}
