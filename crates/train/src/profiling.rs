//! `profile=true`: a few steps of a run, recorded.

use std::path::{Path, PathBuf};

use phalanx_formats::atomic;
use phalanx_kernels::peak::Roofline;
use phalanx_report::Profile;
use phalanx_tensor::Runtime;

use crate::Result;

/// Steps of a run that pass before it is profiled: the first ones touch memory for the first time.
const WARMUP: u64 = 2;

/// Which steps of this process are recorded, counted from 0: `wanted` of them after two that warm up, or the last ones of a run that is
/// shorter.
pub(crate) fn window(steps: u64, wanted: u64) -> std::ops::Range<u64> {
    let first = WARMUP.min(steps.saturating_sub(wanted));
    first..first.saturating_add(wanted).min(steps)
}

/// Ends the recording of a runtime's device, if there is one, and measures what it is compared with.
pub fn finish(rt: &Runtime) -> Option<Profile> {
    let recording = rt.device().profiler().stop()?;
    let (isa, threads) = (rt.device().isa().to_string(), rt.device().team().threads());
    Some(Profile { recording, roofline: Roofline::measure(rt.device()).ok(), isa, threads })
}

/// Writes the trace of a profile for Perfetto or `chrome://tracing`.
///
/// # Errors
/// If the disk refuses.
pub fn write_trace(profile: &Profile, path: &Path) -> Result<()> {
    Ok(atomic::write_file(path, |out| profile.write_trace(out))?)
}

/// Writes `profile.json` and `trace-rankN.json` into `dir`, and gives their paths.
pub(crate) fn write(profile: &Profile, dir: &Path) -> Result<[PathBuf; 2]> {
    let table = dir.join("profile.json");
    atomic::write_bytes(&table, format!("{:#}\n", profile.to_json()).as_bytes())?;
    let trace = dir.join(format!("trace-rank{}.json", profile.recording.rank));
    write_trace(profile, &trace)?;
    Ok([table, trace])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_run_is_profiled_at_its_end() {
        for (steps, wanted, expected) in
            [(100, 3, 2..5), (5, 3, 2..5), (4, 3, 1..4), (3, 3, 0..3), (1, 3, 0..1), (4, 1, 2..3), (0, 3, 0..0)]
        {
            assert_eq!(window(steps, wanted), expected, "{steps} steps, {wanted} wanted");
        }
        assert_eq!(window(10, u64::MAX), 0..10);
    }
}
