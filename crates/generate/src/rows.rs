//! Which rows of the cache belong to which slot.
//!
//! The storage of every attention layer is cut in the same way: each slot (a place for one sequence) has a run of rows of
//! its own, with room to grow. Runs have different lengths, so a long sequence beside short ones costs no more than itself.

/// A slot's run of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: usize,
    pub(crate) capacity: usize,
}

/// What has to happen to the storage so that the runs are where [`Rows`] now says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing.
    None,
    /// The slot's rows go from the first place to the second, which do not overlap.
    Move(usize, usize),
    /// The storage is made anew: the rows of each slot come from the place named here.
    Relay(Vec<Option<Run>>),
}

/// The runs of all slots.
#[derive(Debug)]
pub(crate) struct Rows {
    runs: Vec<Option<Run>>,
    total: usize,
}

impl Rows {
    pub(crate) fn new(slots: usize) -> Rows {
        Rows { runs: vec![None; slots], total: 0 }
    }

    pub(crate) fn add_slot(&mut self) {
        self.runs.push(None);
    }

    /// Rows of the storage.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn run(&self, slot: usize) -> Option<Run> {
        self.runs[slot]
    }

    pub(crate) fn capacity(&self, slot: usize) -> usize {
        self.runs[slot].map_or(0, |r| r.capacity)
    }

    /// Gives a slot's rows up.
    pub(crate) fn free(&mut self, slot: usize) {
        self.runs[slot] = None;
    }

    /// Whether [`Rows::grow`] to `capacity` can do with the storage as it is.
    pub(crate) fn fits(&self, slot: usize, capacity: usize) -> bool {
        self.capacity(slot) >= capacity || self.gap(slot, capacity).is_some()
    }

    /// Gives a slot a run of at least `capacity` rows.
    pub(crate) fn grow(&mut self, slot: usize, capacity: usize) -> Change {
        let old = self.runs[slot];
        if old.is_some_and(|r| r.capacity >= capacity) {
            return Change::None;
        }
        if let Some(start) = self.gap(slot, capacity) {
            self.runs[slot] = Some(Run { start, capacity });
            return match old {
                Some(r) if r.start != start => Change::Move(r.start, start),
                _ => Change::None,
            };
        }
        let before = self.runs.clone();
        self.runs[slot] = Some(Run { start: 0, capacity });
        let mut end = 0;
        for run in self.runs.iter_mut().flatten() {
            run.start = end;
            end += run.capacity;
        }
        self.total = end;
        Change::Relay(before)
    }

    /// The first place where `capacity` rows are free; the slot's own rows may be part of it only where they stay in place.
    fn gap(&self, slot: usize, capacity: usize) -> Option<usize> {
        let mut taken: Vec<Run> = self.runs.iter().flatten().copied().collect();
        taken.sort_unstable_by_key(|r| r.start);
        let own = self.runs[slot];
        // In place, when the rows behind are free.
        if let Some(own) = own {
            let next = taken.iter().find(|r| r.start > own.start).map_or(self.total, |r| r.start);
            if next - own.start >= capacity {
                return Some(own.start);
            }
        }
        let mut end = 0;
        for run in taken {
            if run.start - end >= capacity {
                return Some(end);
            }
            end = run.start + run.capacity;
        }
        (self.total - end >= capacity).then_some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_grow_in_place_move_into_gaps_or_are_laid_anew() {
        let mut rows = Rows::new(3);
        assert_eq!(rows.grow(0, 4), Change::Relay(vec![None; 3]));
        assert!(matches!(rows.grow(1, 4), Change::Relay(_)));
        assert!(matches!(rows.grow(2, 2), Change::Relay(_)));
        assert_eq!(rows.total(), 10);
        assert_eq!(rows.grow(1, 3), Change::None);
        rows.free(1);
        assert!(rows.fits(0, 8));
        assert_eq!(rows.grow(0, 6), Change::None);
        assert_eq!(rows.run(0), Some(Run { start: 0, capacity: 6 }));
        assert_eq!(rows.grow(1, 2), Change::None);
        assert_eq!(rows.run(1), Some(Run { start: 6, capacity: 2 }));
        rows.free(0);
        assert_eq!(rows.grow(2, 5), Change::Move(8, 0));
        assert!(!rows.fits(1, 6));
        let Change::Relay(before) = rows.grow(1, 6) else { panic!() };
        assert_eq!(before[1], Some(Run { start: 6, capacity: 2 }));
        assert_eq!(
            (rows.run(1), rows.run(2)),
            (Some(Run { start: 0, capacity: 6 }), Some(Run { start: 6, capacity: 5 }))
        );
    }
}
