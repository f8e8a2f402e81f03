//! Little-endian file bytes to numbers and back.
//!
//! File data start at any byte (a safetensors header may have any length), so nothing here casts pointers: the loops go
//! over fixed-size byte chunks, which the compiler turns into vector loads. Narrowing rounds to nearest, ties to even;
//! NaN stays NaN.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements converted at a time where an aligned stack buffer stands between (f16, whose hardware conversion works on
/// aligned slices).
const CHUNK: usize = 512;

/// Which of the three float types a tensor can be converted from and to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatType {
    /// IEEE single precision.
    F32,
    /// Upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl FloatType {
    /// Bytes an element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The safetensors type.
    pub const fn dtype(self) -> safetensors::Dtype {
        match self {
            Self::F32 => safetensors::Dtype::F32,
            Self::Bf16 => safetensors::Dtype::BF16,
            Self::F16 => safetensors::Dtype::F16,
        }
    }

    /// The one of the three that `dtype` is, if it is one.
    pub const fn from_dtype(dtype: safetensors::Dtype) -> Option<Self> {
        match dtype {
            safetensors::Dtype::F32 => Some(Self::F32),
            safetensors::Dtype::BF16 => Some(Self::Bf16),
            safetensors::Dtype::F16 => Some(Self::F16),
            _ => None,
        }
    }

    /// The name that `config.json` uses (`torch_dtype`).
    pub const fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }
}

/// The parts of `bytes` that hold whole elements. `bytes.len()` must be `n * N`.
fn chunks<const N: usize>(bytes: &[u8], n: usize) -> &[[u8; N]] {
    let (chunks, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty() && chunks.len() == n, "byte count does not match element count");
    chunks
}

/// Converts little-endian `bytes` of type `from` into `out`.
///
/// # Panics
/// If `bytes.len() != out.len() * from.size()`; callers check and report that with the tensor's name.
pub fn to_f32(from: FloatType, bytes: &[u8], out: &mut [f32]) {
    let n = out.len();
    match from {
        FloatType::F32 => {
            for (o, b) in out.iter_mut().zip(chunks::<4>(bytes, n)) {
                *o = f32::from_le_bytes(*b);
            }
        }
        FloatType::Bf16 => {
            for (o, b) in out.iter_mut().zip(chunks::<2>(bytes, n)) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        FloatType::F16 => {
            let mut aligned = [f16::ZERO; CHUNK];
            for (o, b) in out.chunks_mut(CHUNK).zip(chunks::<2>(bytes, n).chunks(CHUNK)) {
                let aligned = &mut aligned[..b.len()];
                for (a, b) in aligned.iter_mut().zip(b) {
                    *a = f16::from_le_bytes(*b);
                }
                aligned.convert_to_f32_slice(o);
            }
        }
    }
}

/// Converts little-endian `bytes` of type `from` into `out`, through f32 where the types differ.
///
/// # Panics
/// If `bytes.len() != out.len() * from.size()`.
pub fn to_bf16(from: FloatType, bytes: &[u8], out: &mut [bf16]) {
    let n = out.len();
    if from == FloatType::Bf16 {
        for (o, b) in out.iter_mut().zip(chunks::<2>(bytes, n)) {
            *o = bf16::from_le_bytes(*b);
        }
        return;
    }
    assert!(bytes.len() == n * from.size(), "byte count does not match element count");
    let mut wide = [0f32; CHUNK];
    for (o, b) in out.chunks_mut(CHUNK).zip(bytes.chunks(CHUNK * from.size())) {
        let wide = &mut wide[..o.len()];
        to_f32(from, b, wide);
        for (o, &w) in o.iter_mut().zip(&*wide) {
            *o = bf16::from_bits(round_to_bf16(w));
        }
    }
}

/// Appends `values` as little-endian elements of type `to`.
pub fn from_f32(to: FloatType, values: &[f32], out: &mut Vec<u8>) {
    let out = grow(out, values.len() * to.size());
    match to {
        FloatType::F32 => {
            for (o, v) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *o = v.to_le_bytes();
            }
        }
        FloatType::Bf16 => {
            for (o, &v) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *o = round_to_bf16(v).to_le_bytes();
            }
        }
        FloatType::F16 => {
            let mut narrow = [f16::ZERO; CHUNK];
            for (o, v) in out.as_chunks_mut::<2>().0.chunks_mut(CHUNK).zip(values.chunks(CHUNK)) {
                let narrow = &mut narrow[..v.len()];
                narrow.convert_from_f32_slice(v);
                for (o, n) in o.iter_mut().zip(narrow) {
                    *o = n.to_le_bytes();
                }
            }
        }
    }
}

/// Appends `values` as little-endian BF16.
pub fn from_bf16(values: &[bf16], out: &mut Vec<u8>) {
    for (o, v) in grow(out, values.len() * 2).as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *o = v.to_le_bytes();
    }
}

/// Appends `n` bytes and returns them. (Filling a slice vectorises; extending from an iterator of bytes does not.)
fn grow(out: &mut Vec<u8>, n: usize) -> &mut [u8] {
    let at = out.len();
    out.resize(at + n, 0);
    &mut out[at..]
}

/// Round to nearest even without a branch, so that the loops around it vectorise; equals `bf16::from_f32`.
#[inline]
fn round_to_bf16(v: f32) -> u16 {
    let bits = v.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry a NaN's payload into infinity: keep its top bits and set the quiet bit instead.
    let nan = (bits >> 16) | 0x0040;
    (if v.is_nan() { nan } else { rounded }) as u16
}

/// Index of the first NaN or infinity among the elements of `bytes`.
///
/// # Panics
/// If `bytes` is not a whole number of elements.
pub fn first_non_finite(from: FloatType, bytes: &[u8]) -> Option<usize> {
    // An exponent of all ones is NaN or infinity, in all three types.
    match from {
        FloatType::F32 => {
            let chunks = chunks::<4>(bytes, bytes.len() / 4);
            first_where(chunks, |b| u32::from_le_bytes(b) & 0x7F80_0000 == 0x7F80_0000)
        }
        FloatType::Bf16 => {
            let chunks = chunks::<2>(bytes, bytes.len() / 2);
            first_where(chunks, |b| u16::from_le_bytes(b) & 0x7F80 == 0x7F80)
        }
        FloatType::F16 => {
            let chunks = chunks::<2>(bytes, bytes.len() / 2);
            first_where(chunks, |b| u16::from_le_bytes(b) & 0x7C00 == 0x7C00)
        }
    }
}

/// Scans block by block without an early exit inside a block (vectorisable), then looks closely at the block that hit.
fn first_where<const N: usize>(items: &[[u8; N]], bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
    items.chunks(CHUNK).enumerate().find_map(|(i, block)| {
        let any = block.iter().fold(false, |any, &b| any | bad(b));
        any.then(|| i * CHUNK + block.iter().position(|&b| bad(b)).unwrap_or(0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interesting() -> Vec<f32> {
        let mut v = vec![0.0, -0.0, 1.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45];
        v.extend((0..2000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9E37_79B9))).filter(|v| !v.is_nan()));
        v
    }

    #[test]
    fn bf16_rounding_equals_half_crate_and_keeps_nan() {
        for v in interesting() {
            assert_eq!(round_to_bf16(v), bf16::from_f32(v).to_bits(), "{v:e}");
        }
        for bits in [0x7F80_0001u32, 0x7FFF_FFFF, 0xFF80_0001, 0x7FC0_0000] {
            assert!(bf16::from_bits(round_to_bf16(f32::from_bits(bits))).is_nan());
        }
    }

    #[test]
    fn round_trips_at_every_alignment() {
        let values = interesting();
        for ty in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            for shift in 0..4 {
                let mut bytes = vec![0u8; shift];
                from_f32(ty, &values, &mut bytes);
                let mut back = vec![0f32; values.len()];
                to_f32(ty, &bytes[shift..], &mut back);
                for (&b, &v) in back.iter().zip(&values) {
                    let want = match ty {
                        FloatType::F32 => v,
                        FloatType::Bf16 => bf16::from_f32(v).to_f32(),
                        FloatType::F16 => f16::from_f32(v).to_f32(),
                    };
                    assert_eq!(b.to_bits(), want.to_bits(), "{ty:?} {v:e}");
                }
                let mut narrow = vec![bf16::ZERO; values.len()];
                to_bf16(ty, &bytes[shift..], &mut narrow);
                for (n, b) in narrow.iter().zip(&back) {
                    assert_eq!(n.to_bits(), bf16::from_f32(*b).to_bits());
                }
            }
        }
    }

    #[test]
    fn finds_the_first_non_finite() {
        for ty in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            let mut v = vec![1f32; 3000];
            let scan = |v: &[f32]| {
                let mut bytes = Vec::new();
                from_f32(ty, v, &mut bytes);
                first_non_finite(ty, &bytes)
            };
            assert_eq!(scan(&v), None);
            v[1700] = f32::NAN;
            v[2999] = f32::INFINITY;
            assert_eq!(scan(&v), Some(1700));
        }
    }
}
