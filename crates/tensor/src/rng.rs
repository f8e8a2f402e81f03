//! Counter-based randomness: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//!
//! A value is a pure function of (seed, name, offset). So initial weights do not depend on the order in which tensors are made,
//! a shard can draw its part alone, dropout needs no stored mask, and a resumed run draws what an uninterrupted one would.

/// A stream of values, addressed by offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    high: u64,
}

impl Stream {
    /// The stream of `name` (a tensor's name, a module's path) under `seed`.
    pub fn new(seed: u64, name: &str) -> Stream {
        // FNV-1a, 64 bits: stable over versions and platforms, which std's hasher is not.
        let high =
            name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Stream { key: [seed as u32, (seed >> 32) as u32], high }
    }

    /// The same name at another moment (a step or micro-batch number).
    pub fn at(self, moment: u64) -> Stream {
        let mixed = self.high ^ (moment.wrapping_add(1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Stream { high: mixed ^ (mixed >> 32), ..self }
    }

    /// 128 random bits for block `i`.
    pub fn block(self, i: u64) -> [u32; 4] {
        let mut c = [i as u32, (i >> 32) as u32, self.high as u32, (self.high >> 32) as u32];
        let mut k = self.key;
        for _ in 0..10 {
            let p0 = u64::from(c[0]) * 0xD251_1F53;
            let p1 = u64::from(c[2]) * 0xCD9E_8D57;
            c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
            k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
        }
        c
    }

    /// 32 random bits at offset `i`.
    pub fn bits(self, i: u64) -> u32 {
        self.block(i / 4)[(i % 4) as usize]
    }

    /// Uniform in [0, 1) at offset `i`, 24 bits.
    pub fn uniform(self, i: u64) -> f32 {
        (self.bits(i) >> 8) as f32 / 16_777_216.0
    }

    /// Standard normal at offset `i` (Box–Muller on the pair that `i` belongs to).
    pub fn normal(self, i: u64) -> f32 {
        let b = self.block(i / 2);
        let u1 = (f64::from(b[0]) + 1.0) / 4_294_967_297.0;
        let u2 = f64::from(b[1]) / 4_294_967_296.0;
        let r = (-2.0 * u1.ln()).sqrt();
        let a = 2.0 * std::f64::consts::PI * u2;
        (r * if i.is_multiple_of(2) { a.cos() } else { a.sin() }) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // From the Random123 distribution's kat_vectors, philox4x32 with 10 rounds.
        let zero = Stream { key: [0, 0], high: 0 };
        assert_eq!(zero.block(0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = Stream { key: [u32::MAX; 2], high: u64::MAX };
        assert_eq!(ones.block(u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn normal_has_mean_zero_and_unit_variance() {
        let s = Stream::new(7, "w");
        let n = 100_000;
        let x: Vec<f64> = (0..n).map(|i| f64::from(s.normal(i))).collect();
        let mean = x.iter().sum::<f64>() / n as f64;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.01 && (var - 1.0).abs() < 0.02, "mean {mean}, variance {var}");
    }

    #[test]
    fn names_seeds_and_moments_differ() {
        let a = Stream::new(1, "a");
        let others = [Stream::new(2, "a"), Stream::new(1, "b"), a.at(0), a.at(1)];
        for (i, o) in others.iter().enumerate() {
            assert_ne!(o.block(0), a.block(0), "{i}");
        }
    }
}
