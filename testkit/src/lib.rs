//! Helpers that tests of every crate share: comparing numbers, and temporary folders.
//!
//! Development only; no product crate depends on it at run time.

/// Relative norm of the difference, ‖x − r‖ / ‖r‖, in f64 (‖x‖ where the reference is all zero).
///
/// # Panics
/// If the lengths differ.
pub fn rel_norm(x: &[f32], reference: &[f32]) -> f64 {
    assert_eq!(x.len(), reference.len(), "lengths differ");
    let (mut num, mut den) = (0f64, 0f64);
    for (&a, &b) in x.iter().zip(reference) {
        num += (f64::from(a) - f64::from(b)).powi(2);
        den += f64::from(b).powi(2);
    }
    if den == 0.0 { num.sqrt() } else { (num / den).sqrt() }
}

/// Fails with the worst element's index and both values unless every |x − r| ≤ `abs` + `rel`·|r|.
///
/// # Panics
/// If the lengths differ, a value is NaN, or an element is out of bounds.
#[track_caller]
pub fn assert_close(x: &[f32], reference: &[f32], abs: f64, rel: f64, what: &str) {
    assert_eq!(x.len(), reference.len(), "{what}: lengths differ");
    let mut worst = (f64::NEG_INFINITY, 0usize);
    for (i, (&a, &b)) in x.iter().zip(reference).enumerate() {
        let excess = (f64::from(a) - f64::from(b)).abs() - abs - rel * f64::from(b).abs();
        if excess.is_nan() || excess > worst.0 {
            worst = (if excess.is_nan() { f64::INFINITY } else { excess }, i);
        }
    }
    assert!(
        worst.0 <= 0.0,
        "{what}: worst at {}: got {}, want {} (abs {abs}, rel {rel})",
        worst.1,
        x[worst.1],
        reference[worst.1]
    );
}

/// Deterministic pseudo-random values in (−1, 1) for tests (splitmix64; no distribution claims).
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    (0..n)
        .map(|_| {
            s = s.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = s;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^= z >> 31;
            ((z >> 40) as f32) / ((1u64 << 23) as f32) - 1.0
        })
        .collect()
}
