//! What every kernel call runs on: an instruction set, a team of threads, the working buffers that calls reuse, and the profiler.

use crate::gemm::tuning::Tuning;
use crate::gemm::{Arithmetic, Blocking};
use crate::profile::Profiler;
use crate::scratch::Scratch;
use crate::{Isa, Result, Team};

/// A processor as the kernels see it. A rank owns one; nothing is global.
pub struct Device {
    isa: Isa,
    team: Team,
    scratch: Scratch,
    tuning: Tuning,
    profiler: Profiler,
}

impl Device {
    /// The best instruction set here, with `threads` threads (at least 1).
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn try_new(threads: usize) -> Result<Device> {
        Ok(Device::build(Isa::detect(), Team::try_new(threads)?))
    }

    /// As [`Device::try_new`], for tests and examples.
    ///
    /// # Panics
    /// If the system refuses a thread.
    pub fn new(threads: usize) -> Device {
        Device::build(Isa::detect(), Team::new(threads))
    }

    /// A chosen instruction set, for tests and comparisons; `None` where this processor lacks it.
    ///
    /// # Panics
    /// If the system refuses a thread.
    pub fn with_isa(isa: Isa, threads: usize) -> Option<Device> {
        Isa::available().contains(&isa).then(|| Device::build(isa, Team::new(threads)))
    }

    fn build(isa: Isa, team: Team) -> Device {
        Device {
            isa,
            scratch: Scratch::new(team.threads()),
            team,
            tuning: Tuning::installed(),
            profiler: Profiler::default(),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The block sizes of its matrix products.
    pub(crate) fn blocking(&self, arithmetic: Arithmetic) -> Blocking {
        self.tuning.sizes(self.isa, arithmetic)
    }

    /// The threads.
    pub fn team(&self) -> &Team {
        &self.team
    }

    /// The working buffers, kept from call to call.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// What records the time of kernels, while it is on.
    pub fn profiler(&self) -> &Profiler {
        &self.profiler
    }
}
