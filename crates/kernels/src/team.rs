//! The thread team that kernels run on.
//!
//! A call hands the team a number of tasks whose boundaries depend on shapes alone and whose outputs do not overlap; workers
//! claim tasks one by one. So the same bits come out for any number of threads. A team is a value: a rank owns its own.
//! Workers look out for the next job for a moment (it usually follows at once), then sleep.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{KernelError, Result};

/// How often a worker looks for new work at full speed, about 20 µs; then it still looks, letting others run in between.
const SPINS: usize = 2_000;
/// How long after its last job a worker sleeps for good. Waking a thread costs 50 µs and more on a virtual machine, and a product
/// of a few phases would pay it at each; staying awake much longer would take cores from other ranks.
const AWAKE: Duration = Duration::from_micros(200);

type Job = *const (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// The job in progress and its number of tasks; guarded for sleeping workers, mirrored by `epoch` for spinning ones.
    slot: Mutex<Slot>,
    wake: Condvar,
    epoch: AtomicUsize,
    next: AtomicUsize,
    tasks: AtomicUsize,
    /// Workers still inside the current job.
    busy: AtomicUsize,
    panicked: AtomicBool,
    quit: AtomicBool,
}

struct Slot {
    job: Option<SendJob>,
}

#[derive(Clone, Copy)]
struct SendJob(Job);
// SAFETY: the pointee is `Sync`, and `Team::run` does not return before every worker has left the job.
unsafe impl Send for SendJob {}

/// A fixed group of threads, the caller among them.
pub struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// One job at a time: kernels called from two threads on one team take turns.
    turn: Mutex<()>,
}

impl Team {
    /// A team of `threads` workers (at least 1), the calling thread being worker 0.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn try_new(threads: usize) -> Result<Team> {
        Team::start(threads, &|worker, shared| {
            std::thread::Builder::new().name(format!("phalanx-{worker}")).spawn(move || work(&shared, worker))
        })
    }

    /// As [`Team::try_new`], for tests and examples.
    ///
    /// # Panics
    /// If the system refuses a thread.
    pub fn new(threads: usize) -> Team {
        Team::try_new(threads).unwrap_or_else(|e| panic!("{e}"))
    }

    fn start(threads: usize, spawn: &dyn Fn(usize, Arc<Shared>) -> std::io::Result<JoinHandle<()>>) -> Result<Team> {
        let wanted = threads.max(1);
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot { job: None }),
            wake: Condvar::new(),
            epoch: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            quit: AtomicBool::new(false),
        });
        // Made before its workers, so that those already there end with it when the system refuses another.
        let mut team = Team { shared, handles: Vec::new(), turn: Mutex::new(()) };
        for worker in 1..wanted {
            match spawn(worker, Arc::clone(&team.shared)) {
                Ok(handle) => team.handles.push(handle),
                Err(e) => return Err(KernelError::Threads { wanted, started: worker, why: e.to_string() }),
            }
        }
        Ok(team)
    }

    /// Number of workers, the caller included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs `f(task, worker)` once for each task in `0..tasks`; returns when all are done.
    ///
    /// Tasks must not depend on each other. `worker` is below [`Team::threads`] and tells scratch spaces apart; no result may
    /// depend on it. Must not be called from inside a task.
    ///
    /// # Panics
    /// If a task panicked.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if tasks == 0 {
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(|e| e.into_inner());
        if self.handles.is_empty() || tasks == 1 {
            for t in 0..tasks {
                f(t, 0);
            }
            return;
        }
        let s = &*self.shared;
        // SAFETY: only the lifetime is changed; this function waits for `busy == 0` before it returns, also on panic.
        let job: Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), Job>(f) };
        {
            let mut slot = s.slot.lock().unwrap_or_else(|e| e.into_inner());
            s.next.store(0, Ordering::Relaxed);
            s.tasks.store(tasks, Ordering::Relaxed);
            s.busy.store(self.handles.len(), Ordering::Relaxed);
            slot.job = Some(SendJob(job));
            s.epoch.fetch_add(1, Ordering::Release);
            s.wake.notify_all();
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| claim(s, f, 0)));
        if outcome.is_err() {
            s.next.store(tasks, Ordering::Relaxed);
        }
        let mut spins = 0usize;
        while s.busy.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < 10_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        s.slot.lock().unwrap_or_else(|e| e.into_inner()).job = None;
        if let Err(p) = outcome {
            s.panicked.store(false, Ordering::Relaxed);
            std::panic::resume_unwind(p);
        }
        assert!(!s.panicked.swap(false, Ordering::Relaxed), "a kernel task panicked on another thread");
    }

    /// Splits `data` into consecutive pieces of `chunk` elements and runs `f(index, piece)` on each.
    ///
    /// The usual way to write disjoint outputs; `chunk` must come from shapes alone.
    pub fn for_chunks_mut<T: Send>(&self, data: &mut [T], chunk: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let chunk = chunk.max(1);
        let (len, base) = (data.len(), SendPtr(data.as_mut_ptr()));
        self.run(len.div_ceil(chunk), &|i, _| {
            let start = i * chunk;
            let n = chunk.min(len - start);
            // SAFETY: pieces of different `i` do not overlap, and each `i` runs once while `data` is mutably borrowed.
            f(i, unsafe { std::slice::from_raw_parts_mut(base.get().add(start), n) });
        });
    }
}

/// A raw pointer that tasks with disjoint outputs may share.
pub(crate) struct SendPtr<T>(pub *mut T);
// SAFETY: users write disjoint ranges only, each while the owner of the memory is borrowed by the running job.
unsafe impl<T: Send> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SendPtr<T> {}
impl<T> Clone for SendPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SendPtr<T> {}
impl<T> SendPtr<T> {
    /// The pointer (a method, so that closures capture the wrapper and not the bare pointer).
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

fn claim(s: &Shared, f: &(dyn Fn(usize, usize) + Sync), worker: usize) {
    let tasks = s.tasks.load(Ordering::Relaxed);
    loop {
        let t = s.next.fetch_add(1, Ordering::Relaxed);
        if t >= tasks {
            return;
        }
        f(t, worker);
    }
}

fn work(s: &Shared, worker: usize) {
    let mut seen = 0usize;
    loop {
        let (mut spins, idle) = (0, Instant::now());
        while s.epoch.load(Ordering::Acquire) == seen && !s.quit.load(Ordering::Relaxed) {
            if spins < SPINS {
                std::hint::spin_loop();
                spins += 1;
            } else if idle.elapsed() < AWAKE {
                std::thread::yield_now();
            } else {
                break;
            }
        }
        let job = {
            let mut slot = s.slot.lock().unwrap_or_else(|e| e.into_inner());
            while s.epoch.load(Ordering::Acquire) == seen && !s.quit.load(Ordering::Relaxed) {
                slot = s.wake.wait(slot).unwrap_or_else(|e| e.into_inner());
            }
            if s.quit.load(Ordering::Relaxed) {
                return;
            }
            seen = s.epoch.load(Ordering::Acquire);
            slot.job
        };
        if let Some(SendJob(job)) = job {
            // SAFETY: `Team::run` keeps the closure alive until this worker has counted itself out of `busy`.
            let f = unsafe { &*job };
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| claim(s, f, worker))).is_err() {
                s.panicked.store(true, Ordering::Relaxed);
                s.next.store(s.tasks.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        s.busy.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        {
            let _slot = self.shared.slot.lock().unwrap_or_else(|e| e.into_inner());
            self.shared.quit.store(true, Ordering::Relaxed);
            self.shared.wake.notify_all();
        }
        for h in self.handles.drain(..) {
            let _ = h.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_for_any_team() {
        for threads in [1, 2, 3, 5] {
            let team = Team::new(threads);
            for tasks in [0, 1, 2, 7, 100] {
                let mut hits = vec![0u8; tasks];
                team.for_chunks_mut(&mut hits, 1, &|_, h| h[0] += 1);
                assert!(hits.iter().all(|&h| h == 1), "{threads} threads, {tasks} tasks: {hits:?}");
            }
        }
    }

    #[test]
    fn a_refused_thread_is_an_error_that_says_how_many_there_were() {
        let ended = Arc::new(AtomicUsize::new(0));
        let spawn = |worker: usize, shared: Arc<Shared>| {
            if worker == 3 {
                return Err(std::io::Error::from(std::io::ErrorKind::WouldBlock));
            }
            let ended = Arc::clone(&ended);
            std::thread::Builder::new().spawn(move || {
                work(&shared, worker);
                ended.fetch_add(1, Ordering::Relaxed);
            })
        };
        let e = Team::start(5, &spawn).err().unwrap();
        assert!(matches!(e, KernelError::Threads { wanted: 5, started: 3, .. }), "{e:?}");
        assert!(e.to_string().contains("at most 3 threads"), "{e}");
        assert_eq!(ended.load(Ordering::Relaxed), 2, "the workers that were there have ended");
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new(3);
        for bad in 0..8 {
            let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                team.run(8, &|t, _| assert!(t != bad, "task {t}"));
            }));
            assert!(r.is_err());
        }
        let mut x = vec![0; 10];
        team.for_chunks_mut(&mut x, 3, &|i, c| c.fill(i));
        assert_eq!(x, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]);
    }
}
