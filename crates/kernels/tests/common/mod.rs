//! Every instruction set of this machine with several teams.

use phalanx_kernels::{Device, Isa};

/// Runs `check` on each instruction set and 1, 2, 3 and 5 threads, and demands the same result (bits) from all teams of a set.
pub fn on_all_devices<R: PartialEq>(mut check: impl FnMut(&Device) -> R) {
    for isa in Isa::available() {
        let mut first = None;
        for threads in [1, 2, 3, 5] {
            let dev = Device::with_isa(isa, threads).unwrap();
            let r = check(&dev);
            let first = first.get_or_insert_with(|| check(&dev));
            assert!(*first == r, "{isa}: {threads} threads give other bits than one");
        }
    }
}

/// The bits of each value, so that NaN and −0 compare as what they are.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}
