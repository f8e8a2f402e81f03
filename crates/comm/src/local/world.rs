//! What all ranks of a process share: the failure, who is still there, what each is doing, and the groups.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use super::group::LocalGroup;
use crate::CommOptions;
use crate::call::Call;
use crate::error::CommError;

/// A lock that a panic elsewhere does not spoil: what it guards is consistent between statements.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Name and members of a group, the parent's id, and how many such groups its members had made before.
type GroupKey = (usize, Arc<str>, Vec<usize>, u64);

#[derive(Default)]
struct Groups {
    /// Every group that somebody still holds, to be woken.
    all: Vec<Weak<LocalGroup>>,
    /// Groups that not all members have fetched yet, and how many have.
    pending: BTreeMap<GroupKey, (Arc<LocalGroup>, usize)>,
    next_id: usize,
}

/// What a rank is doing: the calls it is in, and the last one it left.
#[derive(Default)]
struct Doing {
    inside: Vec<(Arc<str>, Arc<Call>)>,
    last: Option<(Arc<str>, Arc<Call>)>,
}

pub(super) struct World {
    pub(super) options: CommOptions,
    pub(super) size: usize,
    failure: OnceLock<CommError>,
    failed: AtomicBool,
    groups: Mutex<Groups>,
    doing: Vec<Mutex<Doing>>,
    /// How many groups each rank still holds.
    held: Vec<AtomicUsize>,
}

impl World {
    pub(super) fn new(size: usize, options: CommOptions) -> Arc<World> {
        Arc::new(World {
            options,
            size,
            failure: OnceLock::new(),
            failed: AtomicBool::new(false),
            groups: Mutex::default(),
            doing: (0..size).map(|_| Mutex::default()).collect(),
            held: (0..size).map(|_| AtomicUsize::new(0)).collect(),
        })
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.failure.get().cloned()
    }

    /// Records the first failure and wakes everybody. Not to be called with a group's lock held.
    pub(super) fn fail(&self, failure: CommError) -> CommError {
        let first = self.failure.get_or_init(|| failure.root_cause().clone()).clone();
        self.failed.store(true, Ordering::Release);
        self.wake_all();
        first
    }

    fn wake_all(&self) {
        let groups: Vec<Arc<LocalGroup>> = lock(&self.groups).all.iter().filter_map(Weak::upgrade).collect();
        groups.iter().for_each(|g| g.wake_all());
    }

    /// The group of these members (ranks of the world): made by the first who asks, found by the others.
    pub(super) fn group(
        self: &Arc<World>,
        parent: usize,
        name: &Arc<str>,
        members: &[usize],
        nth: u64,
    ) -> Arc<LocalGroup> {
        let mut groups = lock(&self.groups);
        let key = (parent, Arc::clone(name), members.to_vec(), nth);
        if !groups.pending.contains_key(&key) {
            let id = groups.next_id;
            groups.next_id += 1;
            let group = Arc::new(LocalGroup::new(Arc::clone(self), id, Arc::clone(name), members.to_vec()));
            groups.all.retain(|g| g.strong_count() > 0);
            groups.all.push(Arc::downgrade(&group));
            groups.pending.insert(key.clone(), (group, 0));
        }
        let entry = groups.pending.get_mut(&key).expect("put there above");
        entry.1 += 1;
        let group = Arc::clone(&entry.0);
        if entry.1 == members.len() {
            groups.pending.remove(&key);
        }
        group
    }

    /// Books that a rank holds one more group.
    pub(super) fn hold(&self, rank: usize) {
        self.held[rank].fetch_add(1, Ordering::AcqRel);
    }

    /// Books that a rank gave up a group; when it was its last, those who wait for the rank anywhere must know.
    pub(super) fn let_go(&self, rank: usize) {
        if self.held[rank].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_all();
        }
    }

    /// Whether a rank has given up its last group.
    pub(super) fn is_gone(&self, rank: usize) -> bool {
        self.held[rank].load(Ordering::Acquire) == 0
    }

    pub(super) fn enter(&self, rank: usize, group: &Arc<str>, call: &Arc<Call>) {
        lock(&self.doing[rank]).inside.push((Arc::clone(group), Arc::clone(call)));
    }

    pub(super) fn leave(&self, rank: usize, call: &Arc<Call>) {
        let mut doing = lock(&self.doing[rank]);
        if let Some(i) = doing.inside.iter().position(|(_, c)| Arc::ptr_eq(c, call)) {
            doing.last = Some(doing.inside.remove(i));
        }
    }

    /// What a rank is doing, for the message to somebody who waits for it.
    pub(super) fn describe(&self, rank: usize) -> String {
        let doing = lock(&self.doing[rank]);
        let text = |(group, call): &(Arc<str>, Arc<Call>)| format!("group `{group}`, {call}");
        match (doing.inside.is_empty(), &doing.last) {
            (false, _) => {
                let all: Vec<String> = doing.inside.iter().map(text).collect();
                format!("rank {rank} (it is in {})", all.join(" and in "))
            }
            (true, Some(last)) => format!("rank {rank} (it is in no call; its last was {})", text(last)),
            (true, None) => format!("rank {rank} (it has made no call yet)"),
        }
    }
}
