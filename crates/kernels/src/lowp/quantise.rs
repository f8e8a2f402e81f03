//! The kernels: values to codes and scales, back, and both in one pass.
//!
//! A task is a rectangle of whole tiles. For each band of tiles it looks at the values, makes the scales, spreads them to one
//! scale a column, and then goes through the rows of the band, still in the cache, element by element.

use std::marker::PhantomData;
use std::ops::Range;

use super::amax::seen_in;
use super::rounding::Keys;
use super::scaling::{Seen, any_amax, magnitude};
use super::tile::MAX_TILE_COLS;
use super::wide::{self, Loop};
use super::{E4M3, E5M2, Element, Format, Fp16, Int8, Rounding, Scaling, Spec, Tile};
use crate::error::{bad_shape, check_len};
use crate::par::{PIECE, Parts, piece};
use crate::{Device, Result};

/// Quantises `x` [rows, cols], row-major: writes a code for each value and a scale for each tile ([`Tile::grid`], row-major).
///
/// # Errors
/// If a length does not fit, a tile has no rows or too many columns, or a fixed scale is not finite and above 0.
pub fn quantise<F: Format>(
    dev: &Device,
    tile: Tile,
    scaling: Scaling,
    rounding: Rounding,
    x: &[f32],
    rows: usize,
    cols: usize,
    codes: &mut [F::Code],
    scales: &mut [f32],
) -> Result<()> {
    const NAME: &str = "lowp::quantise";
    let cut = Cut::new(NAME, tile, rows, cols)?;
    check_len(NAME, "x", x.len(), rows * cols)?;
    check_len(NAME, "codes", codes.len(), rows * cols)?;
    check_len(NAME, "scales", scales.len(), tile.scales(rows, cols))?;
    let scaling = whole_tensor(NAME, dev, tile, F::ELEMENT, scaling, x)?;
    if let Source::One(scale) = scaling {
        scales.fill(scale);
        run::<F, AsCode>(dev, &cut, scaling, rounding, x, codes, &mut []);
    } else {
        run::<F, AsCode>(dev, &cut, scaling, rounding, x, codes, scales);
    }
    Ok(())
}

/// out [rows, cols] = codes · scales, each product rounded once to f32 (not at all where the scale is a power of two, unless
/// it leaves f32's range).
///
/// # Errors
/// If a length does not fit, or a tile has no rows or too many columns.
pub fn dequantise<F: Format>(
    dev: &Device,
    tile: Tile,
    codes: &[F::Code],
    scales: &[f32],
    rows: usize,
    cols: usize,
    out: &mut [f32],
) -> Result<()> {
    const NAME: &str = "lowp::dequantise";
    let cut = Cut::new(NAME, tile, rows, cols)?;
    check_len(NAME, "codes", codes.len(), rows * cols)?;
    check_len(NAME, "scales", scales.len(), tile.scales(rows, cols))?;
    check_len(NAME, "out", out.len(), rows * cols)?;
    let out = Parts::new(out);
    dev.team().run(cut.tasks(), &|task, _| {
        let (rows, cols) = cut.rectangle(task);
        wide::run(dev.isa(), Back::<F> { cut: &cut, tile, rows, cols, codes, scales, out: &out, format: PhantomData });
    });
    Ok(())
}

/// out [rows, cols] = what [`quantise`] and then [`dequantise`] make of `x`, to the bit, in one pass and without codes.
///
/// The operands of a low-precision training product: an ordinary f32 product follows.
///
/// # Errors
/// As [`quantise`].
pub fn fake_quantise(
    dev: &Device,
    spec: &Spec,
    rounding: Rounding,
    x: &[f32],
    rows: usize,
    cols: usize,
    out: &mut [f32],
) -> Result<()> {
    const NAME: &str = "lowp::fake_quantise";
    let cut = Cut::new(NAME, spec.tile, rows, cols)?;
    check_len(NAME, "x", x.len(), rows * cols)?;
    check_len(NAME, "out", out.len(), rows * cols)?;
    let scaling = whole_tensor(NAME, dev, spec.tile, spec.element, spec.scaling, x)?;
    match spec.element {
        Element::E4M3 => run::<E4M3, AsValue>(dev, &cut, scaling, rounding, x, out, &mut []),
        Element::E5M2 => run::<E5M2, AsValue>(dev, &cut, scaling, rounding, x, out, &mut []),
        Element::Int8 => run::<Int8, AsValue>(dev, &cut, scaling, rounding, x, out, &mut []),
        Element::Fp16 => run::<Fp16, AsValue>(dev, &cut, scaling, rounding, x, out, &mut []),
    }
    Ok(())
}

/// Where a task takes its scales from.
#[derive(Clone, Copy)]
enum Source {
    /// Known beforehand, the same everywhere.
    One(f32),
    /// From the values of each tile.
    Tiles(Scaling),
}

/// Finds the scale where there is but one: given, or that of the whole tensor.
fn whole_tensor(
    kernel: &'static str,
    dev: &Device,
    tile: Tile,
    element: Element,
    scaling: Scaling,
    x: &[f32],
) -> Result<Source> {
    if let Scaling::Fixed(scale) = scaling
        && !(scale.is_finite() && scale > 0.0)
    {
        return bad_shape(kernel, format!("a fixed scale must be finite and above 0, this one is {scale}"));
    }
    Ok(match (scaling, tile) {
        (Scaling::Fixed(scale), _) if !scaling.needs_amax(element) => Source::One(scale),
        (_, Tile::Tensor) => Source::One(scaling.scale(element, seen_in(dev, x))),
        _ => Source::Tiles(scaling),
    })
}

/// How a matrix is cut into tiles and tasks; by shape alone.
struct Cut {
    rows: usize,
    cols: usize,
    tile_rows: usize,
    tile_cols: usize,
    task_rows: usize,
    task_cols: usize,
}

impl Cut {
    fn new(kernel: &'static str, tile: Tile, rows: usize, cols: usize) -> Result<Cut> {
        tile.check(kernel)?;
        if rows.checked_mul(cols).is_none() {
            return bad_shape(kernel, format!("{rows} × {cols} values are more than memory can hold"));
        }
        let (tile_rows, tile_cols) = match tile {
            // One scale: any tile will do.
            Tile::Tensor => (1, MAX_TILE_COLS),
            Tile::Block { rows, cols } => (rows, cols),
        };
        let task_cols = MAX_TILE_COLS / tile_cols * tile_cols;
        // Fewer where columns are fewer, so that a narrow matrix has tasks as long as a wide one.
        let width = task_cols.min(cols).max(1);
        let task_rows = tile_rows.saturating_mul((PIECE / width / tile_rows).max(1));
        Ok(Cut { rows, cols, tile_rows, tile_cols, task_rows, task_cols })
    }

    fn tasks(&self) -> usize {
        self.rows.div_ceil(self.task_rows) * self.cols.div_ceil(self.task_cols)
    }

    /// Rows and columns of a task.
    fn rectangle(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let across = self.cols.div_ceil(self.task_cols);
        (piece(task / across, self.task_rows, self.rows), piece(task % across, self.task_cols, self.cols))
    }

    /// Columns of the grid of scales.
    fn grid_cols(&self) -> usize {
        self.cols.div_ceil(self.tile_cols)
    }
}

/// What is kept of a quantised value.
trait Output<F: Format> {
    type Item: Send + Sync;
    fn item(code: F::Code, scale: f32) -> Self::Item;
}

struct AsCode;
impl<F: Format> Output<F> for AsCode {
    type Item = F::Code;
    #[inline(always)]
    fn item(code: F::Code, _: f32) -> F::Code {
        code
    }
}

struct AsValue;
impl<F: Format> Output<F> for AsValue {
    type Item = f32;
    #[inline(always)]
    fn item(code: F::Code, scale: f32) -> f32 {
        F::decode(code) * scale
    }
}

/// All tasks. `scales` is empty where nobody asks for them.
fn run<F: Format, O: Output<F>>(
    dev: &Device,
    cut: &Cut,
    source: Source,
    rounding: Rounding,
    x: &[f32],
    out: &mut [O::Item],
    scales: &mut [f32],
) {
    let keep = !scales.is_empty();
    let (out, scales) = (Parts::new(out), Parts::new(scales));
    dev.team().run(cut.tasks(), &|task, _| {
        let (rows, cols) = cut.rectangle(task);
        let kept = keep.then_some(&scales);
        wide::run(dev.isa(), There::<F, O> { cut, source, rounding, rows, cols, x, out: &out, scales: kept });
    });
}

/// One task of quantising.
struct There<'a, F: Format, O: Output<F>> {
    cut: &'a Cut,
    source: Source,
    rounding: Rounding,
    rows: Range<usize>,
    cols: Range<usize>,
    x: &'a [f32],
    out: &'a Parts<'a, O::Item>,
    scales: Option<&'a Parts<'a, f32>>,
}

impl<F: Format, O: Output<F>> Loop for There<'_, F, O> {
    #[inline(always)]
    fn run(self) {
        let (cut, width) = (self.cut, self.cols.len());
        let place = |row: usize| row * cut.cols + self.cols.start..row * cut.cols + self.cols.end;
        // One scale a column.
        let mut scales = [1f32; MAX_TILE_COLS];
        let scales = &mut scales[..width];
        if let Source::One(scale) = self.source {
            scales.fill(scale);
        }
        for top in self.rows.clone().step_by(cut.tile_rows) {
            let band = top..(top + cut.tile_rows).min(self.rows.end);
            if let Source::Tiles(scaling) = self.source {
                let of_tile = |seen| scaling.scale(F::ELEMENT, seen);
                scale_columns(cut, |i| &self.x[place(top + i)], band.len(), scales, of_tile);
            }
            if let Some(kept) = self.scales {
                let first = top / cut.tile_rows * cut.grid_cols() + self.cols.start / cut.tile_cols;
                // SAFETY: tasks hold different tiles.
                let kept = unsafe { kept.get(first..first + width.div_ceil(cut.tile_cols)) };
                for (kept, &scale) in kept.iter_mut().zip(scales.iter().step_by(cut.tile_cols)) {
                    *kept = scale;
                }
            }
            for row in band {
                let at = place(row);
                let x = &self.x[at.clone()];
                // SAFETY: tasks hold different elements.
                let out = unsafe { self.out.get(at.clone()) };
                match self.rounding {
                    Rounding::NearestEven => {
                        for ((out, &x), &scale) in out.iter_mut().zip(x).zip(scales.iter()) {
                            *out = O::item(F::encode(x / scale), scale);
                        }
                    }
                    Rounding::Stochastic { seed, first } => {
                        let (keys, first) = (Keys::new(seed), first.wrapping_add(at.start as u64));
                        for (j, ((out, &x), &scale)) in out.iter_mut().zip(x).zip(scales.iter()).enumerate() {
                            let random = keys.bits(first.wrapping_add(j as u64));
                            *out = O::item(F::encode_stochastic(x / scale, random), scale);
                        }
                    }
                }
            }
        }
    }
}

/// Writes the scale of each column's tile; `row` gives the rows of one band of tiles.
#[inline(always)]
fn scale_columns<'a>(
    cut: &Cut,
    row: impl Fn(usize) -> &'a [f32],
    num_rows: usize,
    scales: &mut [f32],
    of_tile: impl Fn(Seen) -> f32,
) {
    if num_rows == 1 {
        for (x, scales) in row(0).chunks(cut.tile_cols).zip(scales.chunks_mut(cut.tile_cols)) {
            scales.fill(of_tile(Seen::new(any_amax(x), [x].into_iter())));
        }
        return;
    }
    // First down the columns, so that tall tiles are read in the order in which they lie.
    let mut columns = [0u32; MAX_TILE_COLS];
    let columns = &mut columns[..scales.len()];
    for i in 0..num_rows {
        for (most, &x) in columns.iter_mut().zip(row(i)) {
            *most = (*most).max(magnitude(x));
        }
    }
    let mut start = 0;
    for (columns, scales) in columns.chunks(cut.tile_cols).zip(scales.chunks_mut(cut.tile_cols)) {
        let any = columns.iter().fold(0, |most, &m| most.max(m));
        let at = start..start + columns.len();
        scales.fill(of_tile(Seen::new(any, (0..num_rows).map(|i| &row(i)[at.clone()]))));
        start = at.end;
    }
}

/// One task of the way back.
struct Back<'a, F: Format> {
    cut: &'a Cut,
    tile: Tile,
    rows: Range<usize>,
    cols: Range<usize>,
    codes: &'a [F::Code],
    scales: &'a [f32],
    out: &'a Parts<'a, f32>,
    format: PhantomData<F>,
}

impl<F: Format> Loop for Back<'_, F> {
    #[inline(always)]
    fn run(self) {
        let cut = self.cut;
        let mut scales = [1f32; MAX_TILE_COLS];
        let scales = &mut scales[..self.cols.len()];
        for top in self.rows.clone().step_by(cut.tile_rows) {
            let first = top / cut.tile_rows * cut.grid_cols() + self.cols.start / cut.tile_cols;
            for (i, scales) in scales.chunks_mut(cut.tile_cols).enumerate() {
                scales.fill(self.scales[if self.tile == Tile::Tensor { 0 } else { first + i }]);
            }
            for row in top..(top + cut.tile_rows).min(self.rows.end) {
                let at = row * cut.cols + self.cols.start..row * cut.cols + self.cols.end;
                // SAFETY: tasks hold different elements.
                let out = unsafe { self.out.get(at.clone()) };
                for ((out, &code), &scale) in out.iter_mut().zip(&self.codes[at]).zip(scales.iter()) {
                    *out = F::decode(code) * scale;
                }
            }
        }
    }
}
