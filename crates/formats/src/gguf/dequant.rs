//! Block formats of ggml, widened to f32 with ggml's own formulas (`dequantize_row_*` in `ggml-quants.c`).
//!
//! Every product and difference is rounded in the order ggml rounds it, so values agree bit for bit. Names in the code
//! follow ggml: `d` scale, `m` minimum, `qs` low bits, `qh` high bits.

use std::fmt;

use half::f16;

use crate::convert::{self, FloatType};

/// Element or block type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are ggml's own")]
#[allow(non_camel_case_types, reason = "the names are ggml's own")]
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
    /// A type that is not read here, by its number in the format.
    Other(u32),
}

/// How many elements a block holds, in how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Elements.
    pub elements: usize,
    /// Bytes.
    pub bytes: usize,
}

impl GgmlType {
    /// The types that [`dequantize`] knows, for messages.
    pub const READABLE: &str = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K";

    /// The type of that number (`enum ggml_type`).
    pub const fn from_id(id: u32) -> Self {
        match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::Bf16,
            other => Self::Other(other),
        }
    }

    /// The block of a readable type.
    pub const fn block(self) -> Option<Block> {
        let (elements, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 4 + 16),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 4 + 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q4_K => (256, 4 + 12 + 128),
            Self::Q5_K => (256, 4 + 12 + 32 + 128),
            Self::Q6_K => (256, 128 + 64 + 16 + 2),
            Self::Other(_) => return None,
        };
        Some(Block { elements, bytes })
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = match self {
            Self::Bf16 => "BF16",
            Self::Other(id) => match id {
                10 => "Q2_K",
                11 => "Q3_K",
                15 => "Q8_K",
                16 => "IQ2_XXS",
                17 => "IQ2_XS",
                18 => "IQ3_XXS",
                19 => "IQ1_S",
                20 => "IQ4_NL",
                21 => "IQ3_S",
                22 => "IQ2_S",
                23 => "IQ4_XS",
                24 => "I8",
                25 => "I16",
                26 => "I32",
                27 => "I64",
                28 => "F64",
                29 => "IQ1_M",
                34 => "TQ1_0",
                35 => "TQ2_0",
                39 => "MXFP4",
                _ => return write!(f, "number {id}"),
            },
            other => return fmt::Debug::fmt(other, f),
        };
        f.write_str(known)
    }
}

/// Widens `bytes`, whole blocks of type `ty`, into `out`.
///
/// # Panics
/// If `ty` is not readable, or `bytes` and `out` are not the same number of blocks; readers of files have checked both.
pub fn dequantize(ty: GgmlType, bytes: &[u8], out: &mut [f32]) {
    match ty {
        GgmlType::F32 => convert::to_f32(FloatType::F32, bytes, out),
        GgmlType::F16 => convert::to_f32(FloatType::F16, bytes, out),
        GgmlType::Bf16 => convert::to_f32(FloatType::Bf16, bytes, out),
        GgmlType::Q4_0 => blocks::<18, 32>(bytes, out, q4_0),
        GgmlType::Q4_1 => blocks::<20, 32>(bytes, out, q4_1),
        GgmlType::Q5_0 => blocks::<22, 32>(bytes, out, q5_0),
        GgmlType::Q5_1 => blocks::<24, 32>(bytes, out, q5_1),
        GgmlType::Q8_0 => blocks::<34, 32>(bytes, out, q8_0),
        GgmlType::Q4_K => blocks::<144, 256>(bytes, out, q4_k),
        GgmlType::Q5_K => blocks::<176, 256>(bytes, out, q5_k),
        GgmlType::Q6_K => blocks::<210, 256>(bytes, out, q6_k),
        GgmlType::Other(id) => panic!("type {id} is not readable: the file reader refuses it"),
    }
}

fn blocks<const B: usize, const E: usize>(bytes: &[u8], out: &mut [f32], one: impl Fn(&[u8; B], &mut [f32; E])) {
    let (src, src_rest) = bytes.as_chunks::<B>();
    let (dst, dst_rest) = out.as_chunks_mut::<E>();
    assert!(src_rest.is_empty() && dst_rest.is_empty() && src.len() == dst.len(), "not whole blocks");
    for (src, dst) in src.iter().zip(dst) {
        one(src, dst);
    }
}

/// The f16 at byte `at`.
fn scale(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    let d = scale(b, 0);
    for (j, &q) in b[2..].iter().enumerate() {
        y[j] = (i32::from(q & 0xF) - 8) as f32 * d;
        y[j + 16] = (i32::from(q >> 4) - 8) as f32 * d;
    }
}

fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (scale(b, 0), scale(b, 2));
    for (j, &q) in b[4..].iter().enumerate() {
        y[j] = f32::from(q & 0xF) * d + m;
        y[j + 16] = f32::from(q >> 4) * d + m;
    }
}

/// The 5-bit numbers of a block: low four bits in `qs`, the fifth of number `i` in bit `i` of `qh`.
fn five_bits(qh: &[u8], qs: &[u8], j: usize) -> (u8, u8) {
    let qh = u32::from_le_bytes([qh[0], qh[1], qh[2], qh[3]]);
    let low = (qs[j] & 0xF) | ((qh >> j) as u8 & 1) << 4;
    let high = (qs[j] >> 4) | ((qh >> (j + 16)) as u8 & 1) << 4;
    (low, high)
}

fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    let d = scale(b, 0);
    for j in 0..16 {
        let (low, high) = five_bits(&b[2..6], &b[6..], j);
        y[j] = (i32::from(low) - 16) as f32 * d;
        y[j + 16] = (i32::from(high) - 16) as f32 * d;
    }
}

fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m) = (scale(b, 0), scale(b, 2));
    for j in 0..16 {
        let (low, high) = five_bits(&b[4..8], &b[8..], j);
        y[j] = f32::from(low) * d + m;
        y[j + 16] = f32::from(high) * d + m;
    }
}

fn q8_0(b: &[u8; 34], y: &mut [f32; 32]) {
    let d = scale(b, 0);
    for (y, &q) in y.iter_mut().zip(&b[2..]) {
        *y = f32::from(q as i8) * d;
    }
}

/// Scale and minimum (6 bits each) of sub-block `j` of eight, packed into 12 bytes: the first four lie whole in the low
/// six bits, the last four are split between low nibbles and the upper two bits of the first eight bytes.
fn scale_min_k4(j: usize, s: &[u8]) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 0xF) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4)
    }
}

fn q4_k(b: &[u8; 144], y: &mut [f32; 256]) {
    let (d, dmin) = (scale(b, 0), scale(b, 2));
    let scales = &b[4..16];
    // Each run of 32 bytes holds two sub-blocks: one in the low nibbles, the next in the high ones.
    for (j, (y, qs)) in y.as_chunks_mut::<64>().0.iter_mut().zip(b[16..].as_chunks::<32>().0).enumerate() {
        let (low, high) = y.split_at_mut(32);
        for (half, y) in [low, high].into_iter().enumerate() {
            let (sc, m) = scale_min_k4(2 * j + half, scales);
            let (d1, m1) = (d * f32::from(sc), dmin * f32::from(m));
            for (y, q) in y.iter_mut().zip(qs) {
                *y = d1 * f32::from((q >> (4 * half)) & 0xF) - m1;
            }
        }
    }
}

fn q5_k(b: &[u8; 176], y: &mut [f32; 256]) {
    let (d, dmin) = (scale(b, 0), scale(b, 2));
    let (scales, qh) = (&b[4..16], &b[16..48]);
    // As q4_k; the fifth bit of sub-block `s` is bit `s` of the bytes of `qh`.
    for (j, (y, qs)) in y.as_chunks_mut::<64>().0.iter_mut().zip(b[48..].as_chunks::<32>().0).enumerate() {
        let (low, high) = y.split_at_mut(32);
        for (half, y) in [low, high].into_iter().enumerate() {
            let s = 2 * j + half;
            let (sc, m) = scale_min_k4(s, scales);
            let (d1, m1) = (d * f32::from(sc), dmin * f32::from(m));
            for ((y, q), h) in y.iter_mut().zip(qs).zip(qh) {
                *y = d1 * f32::from((q >> (4 * half)) & 0xF | ((h >> s) & 1) << 4) - m1;
            }
        }
    }
}

fn q6_k(b: &[u8; 210], y: &mut [f32; 256]) {
    let (ql, qh, scales, d) = (&b[..128], &b[128..192], &b[192..208], scale(b, 208));
    for n in 0..2 {
        let (ql, qh, sc) = (&ql[64 * n..], &qh[32 * n..], &scales[8 * n..]);
        let y = &mut y[128 * n..128 * n + 128];
        for l in 0..32 {
            // Four numbers share a byte of `qh`, two bits each.
            for part in 0..4 {
                let low = (ql[l + 32 * (part % 2)] >> (4 * (part / 2))) & 0xF;
                let q = i32::from(low | ((qh[l] >> (2 * part)) & 3) << 4) - 32;
                let s = f32::from(sc[l / 16 + 2 * part] as i8);
                y[l + 32 * part] = d * s * q as f32;
            }
        }
    }
}
