//! Weights laid out once for inference: y = x·Wᵀ (+ b), with W exact (f32, bf16) or in blocks of 8 or 4 bits.
//!
//! Making a token reads every weight once, so the rate of decoding is the rate of reading, and whatever has to be done to a weight
//! on its way to the multiplier is lost. W is stored [out, in] in files and for training; sixteen outputs then are sixteen rows,
//! and a vector of them needs a transpose. Here that transpose is done when the model is loaded: sixteen outputs are a *panel*, and
//! a panel lies in memory in the order in which it is multiplied. Laid out so, a matrix cannot be trained, but every row of it can
//! be read ([`Layout::read_row`]).
//!
//! | [`Form`] | a panel of 16 outputs | a product |
//! |---|---|---|
//! | `F32`, `Bf16` | for each k (bf16: pair of k) the 16 values | one chain over k, the bits of [`gemm`](super::gemm) |
//! | `Q8` | scales of all blocks, then for each block of 32 k the bytes | see below |
//! | `Q4` | scales and minima of all blocks, then for each block the nibbles | see below |
//!
//! **Blocks.** `Q8` is ggml's Q8_0: w = d·q, q from −127 to 127, one f16 d for 32 values. `Q4` is ggml's Q4_1: w = d·q + m, q from 0 to 15.
//! (Q4_0, w = d·(q − 8), is Q4_1 with m = −8·d, exactly.) The row of x is cut into the same blocks and rounded to 8 bits: x ≈ dx·xq with
//! dx = max|x| / 127. The sum of q·xq over a block is an integer and exact, in whatever order; then, in f32 and one block after another,
//! `y = fma(sum, d·dx, y)`, and for Q4 `y = fma(m, dx·Σxq, y)`. So quantised products have the same bits on every
//! instruction set, for any number of rows and threads. The scheme is llama.cpp's (`ggml_vec_dot_q8_0_q8_0`, `ggml_vec_dot_q4_1_q8_1`), but for
//! dx, which is f32 here and f16 there.
//!
//! The error of rounding x is at most dx / 2 a value: |y − x·Wᵀ| ≤ Σ_blocks dx / 2 · Σ|w|, apart from f32 rounding.

mod blocks;
mod dot;
mod exact;
#[cfg(test)]
mod tests;

use std::fmt;

use half::bf16;

use self::blocks::quantise_row;
pub use self::blocks::{Q4_0_BYTES, Q4_BYTES, Q8_BYTES, q4_0_to_q4};
use crate::error::{bad_shape, check_len};
use crate::par::Parts;
use crate::profile::{Cost, FORWARD, Shape};
use crate::{Device, Isa, Result};

/// Outputs of a panel.
const LANES: usize = 16;
/// Values that share a scale.
pub const BLOCK: usize = 32;

/// How the values of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// 8 bits, and an f16 scale for 32 values: 8.5 bits a weight.
    Q8,
    /// 4 bits, and an f16 scale and minimum for 32 values: 5 bits a weight.
    Q4,
}

impl Form {
    /// Whether values are rounded to blocks.
    pub fn is_quantised(self) -> bool {
        matches!(self, Form::Q8 | Form::Q4)
    }

    /// Bytes of `k` values of one row in *row form*: what [`Layout::fill`] takes. f32 and bf16 little-endian; blocks as in GGUF (`Q8`: d, 32 bytes; `Q4`: d, m,
    /// 16 bytes, byte j with value j in its low and j + 16 in its high half), the last one padded with zeros.
    pub fn row_bytes(self, k: usize) -> usize {
        match self {
            Form::F32 => 4 * k,
            Form::Bf16 => 2 * k,
            Form::Q8 => k.div_ceil(BLOCK) * Q8_BYTES,
            Form::Q4 => k.div_ceil(BLOCK) * Q4_BYTES,
        }
    }

    /// Writes a row of values in row form, rounded as the form asks.
    ///
    /// # Panics
    /// If `out` has not [`Form::row_bytes`].
    pub fn write_row(self, row: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_bytes(row.len()), "bytes of a row");
        match self {
            Form::F32 => row.iter().zip(out.chunks_exact_mut(4)).for_each(|(x, o)| o.copy_from_slice(&x.to_le_bytes())),
            Form::Bf16 => {
                let halves = row.iter().map(|&x| bf16::from_f32(x).to_le_bytes());
                halves.zip(out.chunks_exact_mut(2)).for_each(|(x, o)| o.copy_from_slice(&x));
            }
            Form::Q8 | Form::Q4 => quantise_row(self, row, out),
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::F32 => "f32",
            Form::Bf16 => "bf16",
            Form::Q8 => "q8",
            Form::Q4 => "q4",
        })
    }
}

/// The layout of a matrix W [n, k].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    form: Form,
    n: usize,
    k: usize,
}

impl Layout {
    /// The layout of W [`n`, `k`] in a form.
    pub fn new(form: Form, n: usize, k: usize) -> Layout {
        Layout { form, n, k }
    }

    /// Whether this device has products of a form with the bits that [`gemm`](super::gemm) gives for it. Not so for exact forms on AMX,
    /// whose tiles want another layout.
    pub fn supported(form: Form, dev: &Device) -> bool {
        form.is_quantised() || dev.isa() != Isa::Amx
    }

    /// The form.
    pub fn form(&self) -> Form {
        self.form
    }

    /// [n, k].
    pub fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    fn panels(&self) -> usize {
        self.n.div_ceil(LANES)
    }

    fn blocks(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Bytes before the quanta of a panel, whole cache lines.
    fn scale_bytes(&self) -> usize {
        match self.form {
            Form::F32 | Form::Bf16 => 0,
            Form::Q8 => (self.blocks() * 2 * LANES).next_multiple_of(64),
            Form::Q4 => self.blocks() * 4 * LANES,
        }
    }

    /// Whole cache lines, so that every panel starts with one.
    fn panel_bytes(&self) -> usize {
        self.scale_bytes()
            + match self.form {
                Form::F32 => self.k * LANES * 4,
                Form::Bf16 => self.k.div_ceil(2) * LANES * 4,
                Form::Q8 => self.blocks() * BLOCK * LANES,
                Form::Q4 => self.blocks() * BLOCK * LANES / 2,
            }
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.panels().saturating_mul(self.panel_bytes())
    }

    /// Lays out a matrix: `row(i, out)` writes row i in row form ([`Form::row_bytes`]).
    ///
    /// # Errors
    /// If `out` has not [`Layout::bytes`].
    pub fn fill(&self, dev: &Device, row: &(dyn Fn(usize, &mut [u8]) + Sync), out: &mut [u8]) -> Result<()> {
        check_len("prepared weights", "bytes", out.len(), self.bytes())?;
        if out.is_empty() {
            return Ok(());
        }
        dev.team().for_chunks_mut(out, self.panel_bytes(), &|panel, out| {
            let each = self.form.row_bytes(self.k);
            let mut rows = vec![0u8; LANES * each];
            for (i, r) in rows.chunks_exact_mut(each).enumerate().take(self.n - panel * LANES) {
                row(panel * LANES + i, r);
            }
            match self.form {
                Form::F32 | Form::Bf16 => exact::interleave(self, &rows, out),
                Form::Q8 | Form::Q4 => blocks::interleave(self, &rows, out),
            }
        });
        Ok(())
    }

    /// Reads row `i` of a matrix in this layout, widened to f32, into `out` [k].
    ///
    /// # Errors
    /// If a length does not fit or there is no such row.
    pub fn read_row(&self, bytes: &[u8], i: usize, out: &mut [f32]) -> Result<()> {
        check_len("prepared weights", "bytes", bytes.len(), self.bytes())?;
        check_len("prepared weights", "a row", out.len(), self.k)?;
        if i >= self.n {
            return bad_shape("prepared weights", format!("row {i} is asked for, there are {}", self.n));
        }
        let panel = &bytes[i / LANES * self.panel_bytes()..][..self.panel_bytes()];
        match self.form {
            Form::F32 | Form::Bf16 => exact::read_row(self, panel, i % LANES, out),
            Form::Q8 | Form::Q4 => blocks::read_row(self, panel, i % LANES, out),
        }
        Ok(())
    }
}

/// A matrix laid out for inference: a layout and its bytes, which start at a cache line.
#[derive(Clone, Copy, Debug)]
pub struct Prepared<'a> {
    /// Shape and form.
    pub layout: Layout,
    /// [`Layout::bytes`] of them, aligned to 64.
    pub bytes: &'a [u8],
}

/// One of the products that share x: y [m, n] = x·Wᵀ + bias.
pub struct Output<'a> {
    /// W [n, k].
    pub weight: Prepared<'a>,
    /// Added to every row, length n.
    pub bias: Option<&'a [f32]>,
    /// Where the product goes, [m, n].
    pub y: &'a mut [f32],
}

/// One of the products, as tasks see it.
struct Product<'a> {
    weight: Prepared<'a>,
    bias: Option<&'a [f32]>,
    y: Parts<'a, f32>,
    /// Tasks before its own.
    first: usize,
    /// Its own tasks.
    tasks: usize,
    /// Panels that tasks are cut at multiples of.
    unit: usize,
}

impl Product<'_> {
    /// The panels of its task `i`.
    fn panels(&self, i: usize) -> std::ops::Range<usize> {
        let (panels, units) = (self.weight.layout.panels(), self.weight.layout.panels().div_ceil(self.unit));
        let cut = |i: usize| (i * units / self.tasks * self.unit).min(panels);
        cut(i)..cut(i + 1)
    }
}

/// Tasks that `units` units of work fall into: a few a thread, equal ones if that is possible.
fn tasks_for(units: usize, threads: usize) -> usize {
    let even = (1..=TASKS).rev().map(|each| each * threads).find(|tasks| units.is_multiple_of(*tasks));
    even.unwrap_or(units.min(TASKS * threads)).max(1)
}

/// x [m, k] in the forms that the products take.
#[derive(Clone, Copy)]
struct Rows<'a> {
    m: usize,
    /// Rows in panels for exact weights.
    exact: &'a [f32],
    /// Rows in blocks for quantised ones.
    blocks: &'a [f32],
}

/// Values of x up to which preparing them is not worth waking the team.
const SMALL: usize = 1 << 14;

/// Tasks a worker at most: enough for an even load, few enough for long reads.
const TASKS: usize = 4;

/// Multiplies x [m, k] with every weight of `outputs`, all of the same k.
///
/// # Errors
/// If a length does not fit, a form is not [supported](Layout::supported) here, or there is no memory for the rows of x.
pub fn multiply(dev: &Device, m: usize, x: &[f32], outputs: &mut [Output<'_>]) -> Result<()> {
    const NAME: &str = "product with prepared weights";
    let Some(&Layout { k, form, .. }) = outputs.first().map(|o| &o.weight.layout) else { return Ok(()) };
    let _span = dev.profiler().kernel(FORWARD, || {
        let n: usize = outputs.iter().map(|o| o.weight.layout.n).sum();
        let weights: usize = outputs.iter().map(|o| o.weight.layout.bytes()).sum();
        Cost {
            flops: 2.0 * (m * n * k) as f64,
            bytes: (weights + 4 * m * (k + n)) as f64,
            shape: Shape::Prepared { m: Some(m), n, k, form },
        }
    });
    check_len(NAME, "x", x.len(), m.saturating_mul(k))?;
    let threads = dev.team().threads();
    let unit = exact::unit(m);
    let (mut tasks, mut products) = (0, Vec::with_capacity(outputs.len()));
    for o in outputs {
        let layout = o.weight.layout;
        if layout.k != k {
            return bad_shape(NAME, format!("weights of {k} and of {} inputs share one x", layout.k));
        }
        if !Layout::supported(layout.form, dev) {
            return bad_shape(NAME, format!("{} weights are not laid out on {}", layout.form, dev.isa()));
        }
        check_len(NAME, "y", o.y.len(), m.saturating_mul(layout.n))?;
        check_len(NAME, "weight", o.weight.bytes.len(), layout.bytes())?;
        if !o.weight.bytes.as_ptr().addr().is_multiple_of(64) {
            return bad_shape(NAME, "weights must start at a multiple of 64 bytes");
        }
        if let Some(b) = o.bias {
            check_len(NAME, "bias", b.len(), layout.n)?;
        }
        let own = tasks_for(layout.panels().div_ceil(unit), threads);
        products.push(Product { weight: o.weight, bias: o.bias, y: Parts::new(o.y), first: tasks, tasks: own, unit });
        tasks += own;
    }
    if m == 0 {
        return Ok(());
    }
    let some = |quantised: bool| products.iter().any(|p| p.weight.layout.form.is_quantised() == quantised);
    let exact_room = if some(false) && m > 1 { m * k } else { 0 };
    let block_room = if some(true) { m * k.div_ceil(BLOCK) * dot::ROOM } else { 0 };
    let mut space = dev.scratch().packed().take(exact_room + block_room)?;
    let (exact, blocks) = space.as_mut_slice().split_at_mut(exact_room);
    if m > exact::rows_at_once(dev, m) {
        dev.scratch().reserve(exact::WIDENED)?;
    }
    prepare_rows(dev, m, k, x, exact, blocks);
    let rows = Rows { m, exact: if m > 1 { exact } else { x }, blocks };
    dev.team().run(tasks, &|task, worker| {
        let p = products.iter().rfind(|p| p.first <= task).unwrap_or(&products[0]);
        let panels = p.panels(task - p.first);
        // SAFETY: lengths and alignment were checked; the columns of these panels of y belong to this task alone; rows were prepared
        // for this device.
        unsafe {
            match p.weight.layout.form {
                Form::F32 | Form::Bf16 => exact::panels(dev, p, rows, panels, worker),
                Form::Q8 | Form::Q4 => dot::panels(dev, p, rows, panels),
            }
        }
    });
    Ok(())
}

/// Brings x into the forms that have room.
fn prepare_rows(dev: &Device, m: usize, k: usize, x: &[f32], exact: &mut [f32], blocks: &mut [f32]) {
    let (by_panel, by_blocks) = (exact::rows_at_once(dev, m), dot::rows_at_once(dev));
    let (panels, grids) = (m.div_ceil(by_panel), m.div_ceil(by_blocks));
    let panels = if exact.is_empty() { 0 } else { panels };
    let grids = if blocks.is_empty() { 0 } else { grids };
    let (exact, blocks) = (Parts::new(exact), Parts::new(blocks));
    let each = k.div_ceil(BLOCK) * dot::ROOM;
    let run = |task: usize| {
        if task < panels {
            let (i, n) = (task * by_panel, by_panel.min(m - task * by_panel));
            // SAFETY: the panels of different tasks do not overlap.
            exact::pack_rows(dev, &x[i * k..(i + n) * k], n, unsafe { exact.get(i * k..(i + n) * k) });
        } else {
            let i = (task - panels) * by_blocks;
            let n = by_blocks.min(m - i);
            // SAFETY: as above.
            dot::quantise_rows(dev, &x[i * k..(i + n) * k], n, unsafe { blocks.get(i * each..(i + n) * each) });
        }
    };
    if m * k < SMALL {
        (0..panels + grids).for_each(run);
    } else {
        dev.team().run(panels + grids, &|task, _| run(task));
    }
}
