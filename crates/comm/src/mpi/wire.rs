//! Messages over MPI: the one place that calls it. Everything is non-blocking, so that every wait can end.

use ::mpi::ffi;
use phalanx_tensor::Tensor;

use crate::bytes;

/// The most bytes of one MPI message (counts are 32-bit); longer ones go in several.
const MESSAGE: usize = 1 << 30;

/// A communicator of all processes, apart from whatever else the program does over MPI.
pub(super) struct Wire {
    comm: ffi::MPI_Comm,
}

// SAFETY: a handle; MPI was started for calls from any number of threads at once (checked where it is started).
unsafe impl Send for Wire {}
// SAFETY: as above.
unsafe impl Sync for Wire {}

/// What a non-zero return code of MPI means, in its own words.
fn check(code: i32) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let mut text = vec![0u8; 1024];
    let mut len = 0i32;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of any implementation (256 to 512).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    text.truncate(len.max(0) as usize);
    Err(String::from_utf8_lossy(&text).into_owned())
}

/// What holds the bytes of a [`Parcel`]. (A vector: moving a box would claim that nobody else uses its bytes.)
pub(super) enum Cargo {
    Bytes(Vec<u8>),
    Tensor(Tensor),
}

/// Requests of one direction. They do not know what owns the memory: [`Parcel`] and [`Lent`] do.
#[derive(Default)]
struct Requests {
    raw: Vec<ffi::MPI_Request>,
}

// SAFETY: handles, used by one thread at a time (`&mut`).
unsafe impl Send for Requests {}

impl Requests {
    /// Whether all are done; those that are count no more.
    fn poll(&mut self) -> Result<bool, String> {
        while let Some(request) = self.raw.last_mut() {
            let mut done = 0;
            // SAFETY: a request of this communicator, not yet done.
            check(unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
            if done == 0 {
                return Ok(false);
            }
            self.raw.pop();
        }
        Ok(true)
    }

    fn cancel(&mut self) {
        for request in &mut self.raw {
            // SAFETY: as in `poll`; a cancelled request is still waited for.
            unsafe { ffi::MPI_Cancel(request) };
        }
    }
}

impl Wire {
    /// A copy of the world communicator whose errors come back as return codes. MPI has been started with
    /// `MPI_THREAD_MULTIPLE` and ends after the last use. All processes make the call.
    pub(super) fn new() -> Result<Wire, String> {
        // SAFETY: MPI is running; the out-pointer is a local.
        unsafe {
            let mut comm = ffi::RSMPI_COMM_NULL;
            check(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm))?;
            check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            Ok(Wire { comm })
        }
    }

    /// Ends all processes: for memory that MPI still uses and that cannot be kept.
    pub(super) fn abort(&self) -> ! {
        // SAFETY: MPI is running.
        unsafe { ffi::MPI_Abort(self.comm, 1) };
        std::process::abort()
    }

    /// # Safety
    /// The bytes stay, unchanged, until the requests are done.
    unsafe fn isend(&self, to: usize, tag: i32, ptr: *const u8, len: usize) -> Result<Requests, String> {
        let mut requests = Requests::default();
        for (start, n) in pieces(len) {
            // SAFETY: inside the caller's bytes, for which it vouches.
            unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let at = ptr.add(start).cast();
                check(ffi::MPI_Isend(at, n, ffi::RSMPI_UINT8_T, to as i32, tag, self.comm, &mut request))?;
                requests.raw.push(request);
            }
        }
        Ok(requests)
    }

    /// # Safety
    /// The bytes stay, and nobody else touches them, until the requests are done.
    unsafe fn irecv(&self, from: usize, tag: i32, ptr: *mut u8, len: usize) -> Result<Requests, String> {
        let mut requests = Requests::default();
        for (start, n) in pieces(len) {
            // SAFETY: inside the caller's bytes, for which it vouches.
            unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                let at = ptr.add(start).cast();
                check(ffi::MPI_Irecv(at, n, ffi::RSMPI_UINT8_T, from as i32, tag, self.comm, &mut request))?;
                requests.raw.push(request);
            }
        }
        Ok(requests)
    }

    /// Sends bytes that go along.
    pub(super) fn send(&self, to: usize, tag: i32, cargo: Cargo) -> Result<Parcel, String> {
        let bytes = match &cargo {
            Cargo::Bytes(bytes) => &bytes[..],
            Cargo::Tensor(tensor) => bytes::of_tensor(tensor).map_err(|e| e.to_string())?,
        };
        let (ptr, len) = (bytes.as_ptr(), bytes.len());
        // SAFETY: the parcel owns the bytes, which do not move with it, and keeps them until the requests are done.
        let requests = unsafe { self.isend(to, tag, ptr, len)? };
        Ok(Parcel { requests, cargo: Some(cargo) })
    }

    /// Receives bytes that go along.
    pub(super) fn receive(&self, from: usize, tag: i32, mut cargo: Cargo) -> Result<Parcel, String> {
        let bytes = match &mut cargo {
            Cargo::Bytes(bytes) => &mut bytes[..],
            Cargo::Tensor(tensor) => bytes::of_tensor_mut(tensor).map_err(|e| e.to_string())?,
        };
        let (ptr, len) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: as in `send`; nobody else holds them (a tensor's memory is unique, as `of_tensor_mut` checked).
        let requests = unsafe { self.irecv(from, tag, ptr, len)? };
        Ok(Parcel { requests, cargo: Some(cargo) })
    }

    /// A message with this tag that has come and that nobody has asked for: its sender and its bytes.
    pub(super) fn unasked(&self, tag: i32) -> Option<(usize, Vec<u8>)> {
        // SAFETY: out-pointers to locals; a status is plain numbers, filled where a message was found.
        unsafe {
            let (mut found, mut status) = (0, std::mem::zeroed::<ffi::MPI_Status>());
            check(ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.comm, &mut found, &mut status)).ok()?;
            if found == 0 {
                return None;
            }
            let mut len = 0;
            check(ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len)).ok()?;
            let mut bytes = vec![0u8; len.max(0) as usize];
            let (at, from) = (bytes.as_mut_ptr().cast(), status.MPI_SOURCE);
            check(ffi::MPI_Recv(at, len, ffi::RSMPI_UINT8_T, from, tag, self.comm, ffi::RSMPI_STATUS_IGNORE)).ok()?;
            Some((from as usize, bytes))
        }
    }
}

/// Starts and lengths of the messages for `len` bytes; one empty message for none.
fn pieces(len: usize) -> impl Iterator<Item = (usize, i32)> {
    (0..len.max(1)).step_by(MESSAGE).map(move |start| (start, MESSAGE.min(len - start) as i32))
}

/// A message that owns its bytes.
pub(super) struct Parcel {
    requests: Requests,
    cargo: Option<Cargo>,
}

impl Parcel {
    /// Whether it has arrived or left.
    pub(super) fn poll(&mut self) -> Result<bool, String> {
        self.requests.poll()
    }

    /// What it carried, once it is done.
    pub(super) fn open(mut self) -> Option<Cargo> {
        if self.requests.raw.is_empty() { self.cargo.take() } else { None }
    }
}

impl Drop for Parcel {
    /// Bytes that MPI may still use are never given back.
    fn drop(&mut self) {
        if !self.requests.raw.is_empty() {
            std::mem::forget(self.cargo.take());
        }
    }
}

/// Messages out of and into slices that somebody lends for the time of a call.
pub(super) struct Lent<'a> {
    wire: &'a Wire,
    requests: Requests,
    only_receives: bool,
    slices: std::marker::PhantomData<&'a mut [u8]>,
}

impl<'a> Lent<'a> {
    pub(super) fn new(wire: &'a Wire) -> Lent<'a> {
        Lent { wire, requests: Requests::default(), only_receives: true, slices: std::marker::PhantomData }
    }

    pub(super) fn send(&mut self, to: usize, tag: i32, bytes: &'a [u8]) -> Result<(), String> {
        // SAFETY: borrowed for longer than this value, which ends only when the requests are done.
        let requests = unsafe { self.wire.isend(to, tag, bytes.as_ptr(), bytes.len())? };
        self.only_receives = false;
        self.requests.raw.extend(requests.raw);
        Ok(())
    }

    pub(super) fn receive(&mut self, from: usize, tag: i32, bytes: &'a mut [u8]) -> Result<(), String> {
        // SAFETY: as in `send`, and borrowed mutably.
        let requests = unsafe { self.wire.irecv(from, tag, bytes.as_mut_ptr(), bytes.len())? };
        self.requests.raw.extend(requests.raw);
        Ok(())
    }

    pub(super) fn poll(&mut self) -> Result<bool, String> {
        self.requests.poll()
    }
}

impl Drop for Lent<'_> {
    /// A receive that nobody has answered can be taken back. A send cannot be, so if peers that have agreed to a call do not
    /// take part in it, all processes end here: the slices must not outlive the call.
    fn drop(&mut self) {
        if self.requests.raw.is_empty() {
            return;
        }
        if self.only_receives {
            self.requests.cancel();
            let since = std::time::Instant::now();
            while since.elapsed().as_secs() < 2 {
                if matches!(self.requests.poll(), Ok(true)) {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
        }
        eprintln!(
            "phalanx: a collective was given up while its data moved; ending all processes (see the error above)"
        );
        self.wire.abort();
    }
}
