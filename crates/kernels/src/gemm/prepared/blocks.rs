//! Blocks of 32 weights: rounding to them, and their place in a panel.

use half::f16;

use super::{BLOCK, Form, LANES, Layout};

/// Bytes of a block of [`Form::Q8`] in row form: d, then 32 signed bytes.
pub const Q8_BYTES: usize = 2 + BLOCK;
/// Bytes of a block of [`Form::Q4`] in row form: d, m, then 16 bytes of two values each.
pub const Q4_BYTES: usize = 4 + BLOCK / 2;
/// Bytes of a block of ggml's Q4_0: d, then 16 bytes of two values each.
pub const Q4_0_BYTES: usize = 2 + BLOCK / 2;

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Rounds a row of f32 to blocks of a quantised form, in row form; a last block that is not full is filled up with zeros. ggml's rules
/// (`quantize_row_q8_0_ref`, `quantize_row_q4_1_ref`), but for a value exactly between two, which goes to the even one.
///
/// # Panics
/// If `out` has not [`Form::row_bytes`], or the form is not quantised.
pub fn quantise_row(form: Form, row: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), form.row_bytes(row.len()), "bytes of a quantised row");
    let each = form.row_bytes(BLOCK);
    for (values, out) in row.chunks(BLOCK).zip(out.chunks_exact_mut(each)) {
        let mut block = [0f32; BLOCK];
        block[..values.len()].copy_from_slice(values);
        match form {
            Form::Q8 => {
                let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
                out[..2].copy_from_slice(&f16::from_f32(most / 127.0).to_le_bytes());
                for (q, x) in out[2..].iter_mut().zip(block) {
                    *q = (x * inverse).round_ties_even() as i8 as u8;
                }
            }
            Form::Q4 => {
                let (least, most) = values.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                let d = (most - least) / 15.0;
                let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
                out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
                out[2..4].copy_from_slice(&f16::from_f32(least).to_le_bytes());
                let quantum = |x: f32| ((x - least) * inverse).round_ties_even().clamp(0.0, 15.0) as u8;
                for (j, q) in out[4..].iter_mut().enumerate() {
                    *q = quantum(block[j]) | quantum(block[j + BLOCK / 2]) << 4;
                }
            }
            Form::F32 | Form::Bf16 => panic!("{form} is not quantised"),
        }
    }
}

/// Turns a row of ggml's Q4_0 blocks, w = d·(q − 8), into row form of [`Form::Q4`], w = d·q + m with m = −8·d. Exact, unless d is beyond 8,188: then m is infinite.
///
/// # Panics
/// If the numbers of blocks differ.
pub fn q4_0_to_q4(row: &[u8], out: &mut [u8]) {
    let (from, to) = (row.as_chunks::<Q4_0_BYTES>(), out.as_chunks_mut::<Q4_BYTES>());
    assert!(from.1.is_empty() && to.1.is_empty() && from.0.len() == to.0.len(), "blocks of Q4_0");
    for (from, to) in from.0.iter().zip(to.0) {
        to[..2].copy_from_slice(&from[..2]);
        to[2..4].copy_from_slice(&f16::from_f32(-8.0 * half_at(from, 0)).to_le_bytes());
        to[4..].copy_from_slice(&from[2..]);
    }
}

/// Where byte `at` (of 4) of step `j` of output `lane` in block `b` lies among the quanta of a panel.
fn place(form: Form, b: usize, j: usize, lane: usize) -> usize {
    let block = if form == Form::Q8 { BLOCK * LANES } else { BLOCK * LANES / 2 };
    b * block + (j * LANES + lane) * 4
}

/// Sixteen rows in row form into a panel. A step of the multiplication takes four neighbouring values of each output. A byte of `Q8` is
/// stored with 128 added: the instruction takes unsigned weights and signed activations. `Q4` has values j and j + 16 in one byte as in
/// row form, so steps j and j + 4 come from one read.
pub(super) fn interleave(layout: &Layout, rows: &[u8], out: &mut [u8]) {
    let (form, each) = (layout.form, layout.form.row_bytes(BLOCK));
    let (scales, quanta) = out.split_at_mut(layout.scale_bytes());
    scales.fill(0);
    for (lane, row) in rows.chunks_exact(layout.form.row_bytes(layout.k)).enumerate() {
        for (b, block) in row.chunks_exact(each).enumerate() {
            let (head, bytes) = block.split_at(each - if form == Form::Q8 { BLOCK } else { BLOCK / 2 });
            for (s, head) in head.chunks_exact(2).enumerate() {
                let kinds = if form == Form::Q8 { 1 } else { 2 };
                let at = ((b * kinds + s) * LANES + lane) * 2;
                scales[at..at + 2].copy_from_slice(head);
            }
            for (j, four) in bytes.chunks_exact(4).enumerate() {
                let at = place(form, b, j, lane);
                quanta[at..at + 4].copy_from_slice(four);
                if form == Form::Q8 {
                    quanta[at..at + 4].iter_mut().for_each(|q| *q ^= 0x80);
                }
            }
        }
    }
}

/// One output of a panel, widened.
pub(super) fn read_row(layout: &Layout, panel: &[u8], lane: usize, out: &mut [f32]) {
    let (scales, quanta) = panel.split_at(layout.scale_bytes());
    for (b, out) in out.chunks_mut(BLOCK).enumerate() {
        let byte = |e: usize| quanta[place(layout.form, b, e / 4, lane) + e % 4];
        match layout.form {
            Form::Q8 => {
                let d = half_at(scales, (b * LANES + lane) * 2);
                for (e, out) in out.iter_mut().enumerate() {
                    *out = f32::from((byte(e) ^ 0x80) as i8) * d;
                }
            }
            _ => {
                let d = half_at(scales, (2 * b * LANES + lane) * 2);
                let m = half_at(scales, ((2 * b + 1) * LANES + lane) * 2);
                for (e, out) in out.iter_mut().enumerate() {
                    let q = byte(e % 16) >> (e / 16 * 4) & 0xF;
                    *out = f32::from(q) * d + m;
                }
            }
        }
    }
}
