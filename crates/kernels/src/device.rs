//! What every kernel call runs on: an instruction set, a team of threads, and the working buffers that calls reuse.

use crate::scratch::Scratch;
use crate::{Isa, Team};

/// A processor as the kernels see it. A rank owns one; nothing is global.
pub struct Device {
    isa: Isa,
    team: Team,
    scratch: Scratch,
}

impl Device {
    /// The best instruction set here, with `threads` threads (at least 1).
    pub fn new(threads: usize) -> Device {
        Device::build(Isa::detect(), threads)
    }

    /// A chosen instruction set, for tests and comparisons; `None` where this processor lacks it.
    pub fn with_isa(isa: Isa, threads: usize) -> Option<Device> {
        Isa::available().contains(&isa).then(|| Device::build(isa, threads))
    }

    fn build(isa: Isa, threads: usize) -> Device {
        let team = Team::new(threads);
        Device { isa, scratch: Scratch::new(team.threads()), team }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// The working buffers, kept from call to call.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }
}
