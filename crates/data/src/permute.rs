//! A random order that is computed, not stored: entry i of a permutation of 0..n in constant time and memory.
//!
//! A Feistel network is a bijection of 0..4^h whatever its round function is; stepping again from a value that is not
//! below n ("cycle walking") makes it one of 0..n. (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains",
//! CT-RSA 2002.) Since 4^h < 4n, fewer than four steps are needed on average, except for tiny n.

/// A permutation of `0..n` chosen by a key.
#[derive(Debug, Clone, Copy)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    key: u64,
}

/// Enough for short halves too, whose round function has little to say each time.
const ROUNDS: u64 = 8;

impl Permutation {
    /// The permutation of `0..n` that belongs to `key`.
    pub fn new(n: u64, key: u64) -> Self {
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        Self { n, half_bits: bits.div_ceil(2).max(2), key }
    }

    /// Entry `i`.
    ///
    /// # Panics
    /// If `i` is not below `n`.
    pub fn get(&self, i: u64) -> u64 {
        assert!(i < self.n, "entry {i} of a permutation of {}", self.n);
        let mut x = i;
        loop {
            x = self.step(x);
            if x < self.n {
                return x;
            }
        }
    }

    fn step(&self, x: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 0..ROUNDS {
            let f = mix(self.key ^ mix(right.wrapping_add(round << 56))) & mask;
            (left, right) = (right, left ^ f);
        }
        left << self.half_bits | right
    }
}

/// A key from numbers that say what it is for.
pub(crate) fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(0x243F_6A88_85A3_08D3, |key, part| mix(key ^ mix(*part)))
}

/// The finaliser of splitmix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014) with its increment.
fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_bijection(n: u64, key: u64) -> bool {
        let p = Permutation::new(n, key);
        let mut seen = vec![false; n as usize];
        (0..n).all(|i| !std::mem::replace(&mut seen[p.get(i) as usize], true))
    }

    #[test]
    fn small_sizes() {
        for n in 0..300 {
            assert!(is_bijection(n, n ^ 77));
        }
    }

    /// A chi-square test of where entry 0 goes, over many keys, for a size that needs cycle walking.
    #[test]
    fn places_are_about_equally_likely() {
        for n in [3u64, 5, 12, 100] {
            let trials = 2000 * n;
            let mut counts = vec![0f64; n as usize];
            for t in 0..trials {
                counts[Permutation::new(n, key(&[42, t])).get(0) as usize] += 1.0;
            }
            let chi: f64 = counts.iter().map(|c| (c - 2000.0).powi(2) / 2000.0).sum();
            let freedom = (n - 1) as f64;
            assert!(chi < freedom + 5.0 * (2.0 * freedom).sqrt(), "n = {n}: chi-square {chi}");
        }
    }

    proptest! {
        #[test]
        fn any_size_is_a_bijection(n in 1u64..20_000, key: u64) {
            prop_assert!(is_bijection(n, key));
        }

        #[test]
        fn great_sizes_stay_in_range(n in 1u64..u64::MAX / 4, i: u64, key: u64) {
            prop_assert!(Permutation::new(n, key).get(i % n) < n);
        }
    }
}
