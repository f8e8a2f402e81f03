//! Ranks as threads of one process: no message is packed, sent or received; a rank reads and writes its peers' slices.

mod collectives;
mod group;
mod mail;
mod shared;
mod world;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use group::LocalGroup;
use world::{World, lock};

use crate::CommOptions;
use crate::backend::Backend;

/// One rank's handle of one group.
pub(crate) struct LocalBackend {
    group: Arc<LocalGroup>,
    rank: usize,
    /// How many groups of each name and members this rank has made from this one: the k-th of each member is the same group.
    made: Mutex<Made>,
}

/// Counts by name and members.
type Made = BTreeMap<(Arc<str>, Vec<usize>), u64>;

impl LocalBackend {
    fn new(group: Arc<LocalGroup>, rank: usize) -> LocalBackend {
        group.world.hold(group.members[rank]);
        LocalBackend { group, rank, made: Mutex::default() }
    }

    /// As the trait says: the members are ranks of this group.
    fn subgroup_of(&self, name: &Arc<str>, members: &[usize]) -> LocalBackend {
        let nth = {
            let mut made = lock(&self.made);
            let count = made.entry((Arc::clone(name), members.to_vec())).or_default();
            *count += 1;
            *count
        };
        let global: Vec<usize> = members.iter().map(|&m| self.group.members[m]).collect();
        let group = self.group.world.group(self.group.id + 1, name, &global, nth);
        let rank = members.iter().position(|&m| m == self.rank).expect("checked: a member makes its own groups");
        LocalBackend::new(group, rank)
    }
}

impl Drop for LocalBackend {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}

/// The world of `size` ranks, one handle each.
pub(crate) fn world(size: usize, options: &CommOptions, name: &Arc<str>) -> Vec<Arc<dyn Backend>> {
    let world = World::new(size, options.clone());
    let members: Vec<usize> = (0..size).collect();
    // All ranks hold the group before any of them may leave it.
    let handles: Vec<LocalBackend> =
        (0..size).map(|rank| LocalBackend::new(world.group(0, name, &members, 0), rank)).collect();
    handles.into_iter().map(|h| Arc::new(h) as Arc<dyn Backend>).collect()
}
