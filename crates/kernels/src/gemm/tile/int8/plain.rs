//! The recipe in plain Rust: the definition, and the way of machines without the instruction.

use super::{BLOCK, MR, NR, ROW, WORDS, factors, raised, room};
use crate::gemm::tile::{Form, Panel, Src, Tile};

pub(crate) struct Plain;

impl Tile for Plain {
    const MR: usize = MR;
    const NR: usize = NR;
    const LANES: usize = 16;
    const K_UNIT: usize = BLOCK;

    fn room(values: usize, _: usize) -> usize {
        room(values)
    }

    unsafe fn multiply(mr: usize, nr: usize, k: usize, a: Panel, b: Panel, c: *mut f32, ldc: usize, from_c: bool) {
        let (a_width, b_width) = (mr, nr.next_multiple_of(Self::LANES));
        for block in 0..k.div_ceil(BLOCK) {
            // SAFETY: stretches of the panels that the caller promises, laid out as the packing below does.
            let (a, b) = unsafe { (a.at.add(block * ROW * a_width), b.at.add(block * ROW * b_width)) };
            for i in 0..mr {
                for j in 0..nr {
                    // SAFETY: as above; C has mr rows of nr.
                    unsafe {
                        let mut sum = b.cast::<i32>().add((WORDS + 1) * b_width + j).read();
                        for w in 0..WORDS {
                            let a = a.cast::<[u8; 4]>().add(w * a_width + i).read();
                            let b = b.cast::<[i8; 4]>().add(w * b_width + j).read();
                            sum += (0..4).map(|q| i32::from(a[q]) * i32::from(b[q])).sum::<i32>();
                        }
                        let scaled = sum as f32 * *b.add(WORDS * b_width + j);
                        let c = &mut *c.add(i * ldc + j);
                        let before = if from_c || block > 0 { *c } else { 0.0 };
                        *c = scaled.mul_add(*a.add(WORDS * a_width + i), before);
                    }
                }
            }
        }
    }

    unsafe fn pack_across(src: Src, ld: usize, rows: usize, k: usize, width: usize, form: Form, dst: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack(src, (ld, 1), rows, k, width, form, dst) }
    }

    unsafe fn pack_along(
        src: Src,
        ld: usize,
        count: usize,
        k: usize,
        panel: usize,
        lanes: usize,
        form: Form,
        dst: *mut f32,
    ) {
        let padded = k.next_multiple_of(BLOCK);
        for i in (0..count).step_by(panel) {
            let rows = panel.min(count - i);
            let width = rows.next_multiple_of(lanes);
            // SAFETY: a panel of the block that the caller promises; those before it are full.
            unsafe {
                pack(src.add(i), (1, ld), rows, k, width, form.after_rows(i), dst.add(Self::room(i * padded, 1)));
            }
        }
    }
}

/// Packs one panel; value (i, p) lies at i·row_step + p·k_step.
///
/// # Safety
/// The source covers `rows` × `k`; `dst` takes `width` rows of `k` rounded up to stretches.
unsafe fn pack(
    src: Src,
    (row_step, k_step): (usize, usize),
    rows: usize,
    k: usize,
    width: usize,
    form: Form,
    dst: *mut f32,
) {
    let raised = raised(form.side);
    for (block, p0) in (0..k).step_by(BLOCK).enumerate() {
        let steps = BLOCK.min(k - p0);
        for i in 0..width {
            let value = |p: usize| {
                if i >= rows || p >= steps {
                    return 0.0;
                }
                let at = i * row_step + (p0 + p) * k_step;
                // SAFETY: inside the source.
                unsafe {
                    match src {
                        Src::F32(x) => *x.add(at),
                        Src::Bf16(x) => (*x.add(at)).to_f32(),
                    }
                }
            };
            let amax = match form.scales {
                // SAFETY: the row and the step lie in the matrix.
                Some(s) if i < rows => unsafe { s.amax(i, p0) },
                // By the bits, so that NaN is the greatest.
                _ => (0..steps).map(value).fold(0.0, |a: f32, x| f32::from_bits(a.to_bits().max(x.abs().to_bits()))),
            };
            let (to_code, to_value) = factors(amax);
            let code = |p: usize| {
                let x = value(p) * to_code;
                match form.noise {
                    // What is not in the matrix stays zero.
                    Some(n) if i < rows && p < steps => {
                        let place = n.at + i * row_step + (p0 + p) * k_step;
                        (x + n.keys.share(place)).floor().min(127.0) as i8
                    }
                    _ => x.round_ties_even() as i8,
                }
            };
            // SAFETY: `dst` has this row of this stretch.
            unsafe {
                let dst = dst.add(block * ROW * width + i);
                let mut sum = 0;
                for w in 0..WORDS {
                    let codes: [i8; 4] = std::array::from_fn(|q| code(4 * w + q));
                    sum += codes.iter().map(|&c| i32::from(c)).sum::<i32>();
                    dst.add(w * width).cast::<[u8; 4]>().write(codes.map(|c| c as u8 ^ raised));
                }
                *dst.add(WORDS * width) = to_value;
                dst.add((WORDS + 1) * width).cast::<i32>().write(-128 * sum);
            }
        }
    }
}
