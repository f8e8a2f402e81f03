//! Settings of a world.

use std::time::Duration;

/// Settings of a world; the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommOptions {
    /// How long a call waits for its peers before the world fails. Default: 600 s.
    pub timeout: Duration,
    /// Cores that the ranks of this process share: with more ranks than cores a waiting rank sleeps sooner. Default: those
    /// of the machine that the process may use.
    pub cores: usize,
}

impl Default for CommOptions {
    fn default() -> CommOptions {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        CommOptions { timeout: Duration::from_secs(600), cores }
    }
}

impl CommOptions {
    /// The defaults with another time-out.
    pub fn with_timeout(timeout: Duration) -> CommOptions {
        CommOptions { timeout, ..CommOptions::default() }
    }
}
