//! To nearest, or at random: the random bits of a value follow from a seed and its place alone.

/// How a scaled value becomes a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to even.
    NearestEven,
    /// Up or down at random with the distances as odds, so that the mean is the value itself. For gradients: what is always
    /// rounded away to nearest survives on average.
    Stochastic {
        /// From the run's generator, another one for each tensor and step.
        seed: u64,
        /// Place of the first value in the whole tensor, where `x` is a shard of it: element i draws number `first` + i.
        first: u64,
    },
}

/// 32 random bits for place `i` under `seed`: a hash of the counter, so any thread can draw any value.
///
/// The seed is spread to two keys (SplitMix64; Steele, Lea & Flood, OOPSLA 2014); the counter goes through two rounds of a 32-bit
/// mixer with low bias (found by C. Wellons' hash prospector). Not for cryptography.
pub fn random_bits(seed: u64, i: u64) -> u32 {
    Keys::new(seed).bits(i)
}

/// The spread seed.
#[derive(Clone, Copy)]
pub(crate) struct Keys(pub(crate) u32, pub(crate) u32);

impl Keys {
    pub(crate) fn new(seed: u64) -> Keys {
        let z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let z = z ^ (z >> 31);
        Keys(z as u32, (z >> 32) as u32)
    }

    /// A number in [0, 1) for place `i` (its lower 32 bits), in steps of 2⁻¹⁶: so few that adding one to a whole number below 2⁷ is exact.
    #[inline(always)]
    pub(crate) fn share(self, i: usize) -> f32 {
        (self.bits(u64::from(i as u32)) >> 16) as f32 / 65536.0
    }

    #[inline(always)]
    pub(crate) fn bits(self, i: u64) -> u32 {
        // For one upper half of the counter this is a permutation of all 32-bit values: uniform by construction.
        mix(mix(i as u32 ^ self.0) ^ mix((i >> 32) as u32 ^ self.1))
    }
}

#[inline(always)]
pub(crate) fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x21F0_AAAD);
    let x = (x ^ (x >> 15)).wrapping_mul(0xD35A_2D97);
    x ^ (x >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_even_and_differ_by_seed_and_place() {
        let n = 200_000u64;
        for seed in [0, 1, 1 << 32, u64::MAX] {
            for bit in 0..32 {
                let ones: u64 = (0..n).map(|i| u64::from(random_bits(seed, i) >> bit & 1)).sum();
                // Five standard deviations.
                assert!((ones as f64 - n as f64 / 2.0).abs() < 5.0 * (n as f64 / 4.0).sqrt(), "seed {seed}, bit {bit}");
            }
            let repeats = (0..n).filter(|&i| random_bits(seed, i) == random_bits(seed + u64::from(seed == 0), i + 1));
            assert!(seed != 0 || repeats.count() < 5);
        }
        assert_ne!(random_bits(3, 7), random_bits(4, 7));
        assert_ne!(random_bits(3, 7), random_bits(3, 7 + (1 << 32)));
    }
}
