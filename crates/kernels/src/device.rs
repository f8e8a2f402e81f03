//! What every kernel call runs on: an instruction set and a team of threads.

use crate::{Isa, Team};

/// A processor as the kernels see it. A rank owns one; nothing is global.
pub struct Device {
    isa: Isa,
    team: Team,
}

impl Device {
    /// The best instruction set here, with `threads` threads (at least 1).
    pub fn new(threads: usize) -> Device {
        Device { isa: Isa::detect(), team: Team::new(threads) }
    }

    /// A chosen instruction set, for tests and comparisons; `None` where this processor lacks it.
    pub fn with_isa(isa: Isa, threads: usize) -> Option<Device> {
        Isa::available().contains(&isa).then(|| Device { isa, team: Team::new(threads) })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads.
    pub fn team(&self) -> &Team {
        &self.team
    }
}
