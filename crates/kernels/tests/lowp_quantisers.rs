//! The low-precision quantisers: against the plain references and by their properties, on every instruction set, with the same
//! bits for any team and any set.

mod common;

use common::{bits, on_all_devices};
use phalanx_kernels::lowp::{
    E4M3, E5M2, Element, Format, Fp16, Int8, MxExponent, Operand, Recipe, Rounding, Scaling, Spec, Tile, dequantise,
    fake_quantise, plain, quantise, random_bits, saved,
};
use phalanx_kernels::{Device, KernelError};
use phalanx_testkit::values;
use proptest::prelude::*;

const SCALINGS: [Scaling; 5] = [
    Scaling::Amax,
    Scaling::PowerOfTwo,
    Scaling::Mx(MxExponent::Up),
    Scaling::Mx(MxExponent::Floor),
    Scaling::Fixed(0.37),
];
const TILES: [Tile; 8] = [
    Tile::Tensor,
    Tile::ROW_128,
    Tile::COLUMN_128,
    Tile::SQUARE_128,
    Tile::ROW_32,
    Tile::COLUMN_32,
    Tile::Block { rows: 3, cols: 5 },
    Tile::Block { rows: 1000, cols: 512 },
];
/// Empty, smaller than a tile, ragged, more than one task both ways.
const SHAPES: [(usize, usize); 8] = [(0, 5), (5, 0), (1, 1), (3, 129), (130, 33), (257, 300), (2, 1100), (1300, 40)];

/// Values of many sizes, some zero; ordinary enough for every scaling.
fn mixed(seed: u64, n: usize) -> Vec<f32> {
    let scale = |i: usize| 2f32.powi((random_bits(seed + 1, i as u64) % 40) as i32 - 20);
    values(seed, n).iter().enumerate().map(|(i, v)| if i % 17 == 3 { 0.0 } else { v * scale(i) }).collect()
}

/// The kernels against the plain scales and one-by-one codes: every tile, rule and format, odd shapes, every team; and
/// fake_quantise against quantise and dequantise.
#[test]
fn quantisers_equal_the_plain_references() {
    fn check<F: Format>(rounding: Rounding, scaling: Scaling, tile: Tile, rows: usize, cols: usize) {
        let x = mixed(rows as u64 * 7 + cols as u64, rows * cols);
        let want = plain::scales(F::ELEMENT, tile, scaling, &x, rows, cols);
        let (_, across) = tile.grid(rows, cols);
        on_all_devices(|dev| {
            let (mut codes, mut scales) = (vec![F::Code::default(); x.len()], vec![9.0; want.len()]);
            quantise::<F>(dev, tile, scaling, rounding, &x, rows, cols, &mut codes, &mut scales).unwrap();
            assert_eq!(bits(&scales), bits(&want), "{:?} {tile:?} {scaling:?} {rows} × {cols}", F::ELEMENT);
            let mut values = vec![0.0; x.len()];
            for i in 0..x.len() {
                let scale = match tile {
                    Tile::Tensor => want[0],
                    Tile::Block { rows: r, cols: c } => want[i / cols / r * across + i % cols / c],
                };
                let code = match rounding {
                    Rounding::NearestEven => F::encode(x[i] / scale),
                    Rounding::Stochastic { seed, first } => {
                        F::encode_stochastic(x[i] / scale, random_bits(seed, first + i as u64))
                    }
                };
                assert_eq!(codes[i], code);
                values[i] = F::decode(code) * scale;
            }
            let (mut back, mut fake) = (vec![7.0; x.len()], vec![7.0; x.len()]);
            dequantise::<F>(dev, tile, &codes, &scales, rows, cols, &mut back).unwrap();
            let spec = Spec { element: F::ELEMENT, tile, scaling };
            fake_quantise(dev, &spec, rounding, &x, rows, cols, &mut fake).unwrap();
            assert_eq!(bits(&back), bits(&values));
            assert_eq!(bits(&fake), bits(&values));
        });
    }
    for (i, tile) in TILES.into_iter().enumerate() {
        for (j, scaling) in SCALINGS.into_iter().enumerate() {
            for (k, (rows, cols)) in SHAPES.into_iter().enumerate() {
                let rounding = if (i + j + k) % 3 == 0 {
                    Rounding::Stochastic { seed: 4, first: (1 << 32) - 50 }
                } else {
                    Rounding::NearestEven
                };
                match (i + j + k) % 4 {
                    0 => check::<E4M3>(rounding, scaling, tile, rows, cols),
                    1 => check::<Int8>(rounding, scaling, tile, rows, cols),
                    2 => check::<E5M2>(rounding, scaling, tile, rows, cols),
                    _ => check::<Fp16>(rounding, scaling, tile, rows, cols),
                }
            }
        }
    }
}

#[test]
fn instruction_sets_agree() {
    let (rows, cols) = (61, 263);
    let x = mixed(1, rows * cols);
    let mut first = None;
    on_all_devices(|dev| {
        let mut all = vec![];
        for recipe in Recipe::ALL {
            for operand in [Operand::Activation, Operand::Weight, Operand::Gradient] {
                for rounding in [Rounding::NearestEven, Rounding::Stochastic { seed: 3, first: 0 }] {
                    let mut out = vec![0.0; x.len()];
                    let spec = recipe.spec(operand);
                    fake_quantise(dev, &spec, rounding, &x, rows, cols, &mut out).unwrap();
                    all.push(bits(&out));
                }
            }
        }
        assert!(*first.get_or_insert_with(|| all.clone()) == all, "{} gives other bits", dev.isa());
    });
}

#[test]
fn not_a_number_and_infinity_are_never_lost() {
    let dev = Device::new(2);
    let (rows, cols) = (3, 300);
    let clean = mixed(2, rows * cols);
    for recipe in Recipe::ALL {
        let spec = recipe.spec(Operand::Activation);
        let mut want = vec![0.0; clean.len()];
        fake_quantise(&dev, &spec, Rounding::NearestEven, &clean, rows, cols, &mut want).unwrap();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = clean.clone();
            // Row 1, where no tile's greatest magnitude stands: a zero.
            let at = cols + (0..cols).find(|i| clean[cols + i] == 0.0).unwrap();
            x[at] = bad;
            let mut out = vec![0.0; x.len()];
            fake_quantise(&dev, &spec, Rounding::NearestEven, &x, rows, cols, &mut out).unwrap();
            assert!(!out[at].is_finite(), "{recipe}: {bad} became {}", out[at]);
            let (tile, per_element) = match recipe {
                Recipe::Mxfp8 => (32, false),
                Recipe::Int8Block => (128, false),
                _ => (1, true),
            };
            for i in 0..x.len() {
                let same_tile = i / cols == 1 && i % cols / tile == at % cols / tile;
                if !same_tile {
                    assert_eq!(out[i].to_bits(), want[i].to_bits(), "{recipe}: {i} changed by {bad} at {at}");
                } else if !per_element && (bad.is_nan() || recipe == Recipe::Int8Block) {
                    assert!(out[i].is_nan(), "{recipe}: {bad} at {at}, {} at {i}", out[i]);
                }
            }
        }
    }
    // E5M2 and fp16 keep infinities as such; a fixed scale lets int8 lose nothing either.
    for (element, want) in [(Element::E5M2, f32::INFINITY), (Element::Fp16, f32::INFINITY)] {
        let mut out = [0.0; 2];
        let spec = Spec { element, tile: Tile::ROW_128, scaling: Scaling::Amax };
        fake_quantise(&dev, &spec, Rounding::NearestEven, &[f32::INFINITY, 1.0], 1, 2, &mut out).unwrap();
        assert_eq!(out, [want, 1.0]);
    }
    for tile in [Tile::Tensor, Tile::ROW_128] {
        let mut out = [0.0; 2];
        let spec = Spec { element: Element::Int8, tile, scaling: Scaling::Fixed(0.1) };
        fake_quantise(&dev, &spec, Rounding::NearestEven, &[f32::INFINITY, 1.0], 1, 2, &mut out).unwrap();
        assert!(out.iter().all(|v| v.is_nan()));
    }
}

#[test]
fn zeros_have_scale_one() {
    let dev = Device::new(1);
    let x = vec![0.0; 200];
    for scaling in [Scaling::Amax, Scaling::PowerOfTwo] {
        let (mut codes, mut scales) = (vec![9u8; 200], vec![0.0; 2]);
        quantise::<E4M3>(&dev, Tile::ROW_128, scaling, Rounding::NearestEven, &x, 1, 200, &mut codes, &mut scales)
            .unwrap();
        assert_eq!((codes, scales), (vec![0; 200], vec![1.0; 2]));
    }
}

/// Extremes of f32: no scale of zero, no codes past the range.
#[test]
fn tiny_and_huge_values() {
    let dev = Device::new(1);
    for recipe in Recipe::ALL {
        let spec = recipe.spec(Operand::Weight);
        for huge in [1e38, f32::MAX / 2.0] {
            let mut out = [0.0; 2];
            fake_quantise(&dev, &spec, Rounding::NearestEven, &[huge, -huge], 1, 2, &mut out).unwrap();
            assert!(
                (f64::from(out[0]) / f64::from(huge) - 1.0).abs() < 0.0626 && out[1] == -out[0],
                "{recipe}: {out:?}"
            );
        }
        for tiny in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-36] {
            let mut out = [9.0; 2];
            fake_quantise(&dev, &spec, Rounding::NearestEven, &[tiny, 0.0], 1, 2, &mut out).unwrap();
            assert!(out[0] >= 0.0 && out[0] <= tiny * 1.0626 && out[1] == 0.0, "{recipe}: {tiny:e} {out:?}");
        }
    }
}

/// A shard that says where it starts draws what the whole would have.
#[test]
fn stochastic_rounding_does_not_know_the_layout() {
    let dev = Device::new(2);
    let (rows, cols) = (40, 130);
    let x = mixed(6, rows * cols);
    let spec = Recipe::Int8Block.spec(Operand::Gradient);
    let (mut whole, mut parts) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    fake_quantise(&dev, &spec, Rounding::Stochastic { seed: 8, first: 100 }, &x, rows, cols, &mut whole).unwrap();
    let at = 13 * cols;
    let rounding = |first| Rounding::Stochastic { seed: 8, first: 100 + first as u64 };
    let (head, tail) = parts.split_at_mut(at);
    fake_quantise(&dev, &spec, rounding(0), &x[..at], 13, cols, head).unwrap();
    fake_quantise(&dev, &spec, rounding(at), &x[at..], rows - 13, cols, tail).unwrap();
    assert_eq!(bits(&whole), bits(&parts));
}

#[test]
fn saved_activations_keep_their_bound() {
    let (rows, cols) = (37, 300);
    let x = mixed(3, rows * cols);
    on_all_devices(|dev| {
        let (mut codes, mut scales) = (vec![0; rows * cols], vec![0.0; saved::num_scales(rows, cols)]);
        let mut back = vec![0.0; rows * cols];
        saved::compress(dev, &x, rows, cols, &mut codes, &mut scales).unwrap();
        saved::decompress(dev, &codes, &scales, rows, cols, &mut back).unwrap();
        for (i, (&x, &y)) in x.iter().zip(&back).enumerate() {
            let scale = f64::from(scales[i / cols * 3 + i % cols / 128]);
            let (x, y) = (f64::from(x), f64::from(y));
            let bound = (x.abs() * 2f64.powi(-4)).max(scale * 2f64.powi(-10)) + x.abs() * 2f64.powi(-23);
            assert!((x - y).abs() <= bound, "{x} came back as {y}");
        }
        bits(&back)
    });
    assert_eq!(saved::num_scales(10, 256), 20);
}

#[test]
fn wrong_arguments_are_refused() {
    let dev = Device::new(1);
    let spec = Recipe::Fp8Tensorwise.spec(Operand::Weight);
    let mut out = [0.0; 6];
    let call = |spec: &Spec, x: &[f32], rows, cols, out: &mut [f32]| {
        fake_quantise(&dev, spec, Rounding::NearestEven, x, rows, cols, out)
    };
    let x = [1.0; 6];
    assert!(matches!(call(&spec, &x[..5], 2, 3, &mut out), Err(KernelError::Length { what: "x", .. })));
    assert!(matches!(call(&spec, &x, 2, 3, &mut out[..5]), Err(KernelError::Length { what: "out", .. })));
    assert!(matches!(call(&spec, &x, usize::MAX, 3, &mut out), Err(KernelError::Shape { .. })));
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(call(&spec.with_scale(scale), &x, 2, 3, &mut out), Err(KernelError::Shape { .. })));
    }
    for (rows, cols) in [(0, 1), (1, 0), (1, 513)] {
        let spec = Spec { tile: Tile::Block { rows, cols }, ..spec };
        assert!(matches!(call(&spec, &x, 2, 3, &mut out), Err(KernelError::Shape { .. })));
    }
    assert!(call(&Spec { tile: Tile::Block { rows: usize::MAX, cols: 512 }, ..spec }, &x, 2, 3, &mut out).is_ok());
}

/// Width of the step that `v` (scaled) lies in.
fn step(element: Element, v: f64) -> f64 {
    let (mantissa, lowest) = match element {
        Element::E4M3 => (3, -6),
        Element::E5M2 => (2, -14),
        Element::Fp16 => (10, -14),
        Element::Int8 => return 1.0,
    };
    2f64.powi((v.abs().log2().floor().max(f64::from(lowest))) as i32 - mantissa)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn errors_are_at_most_half_a_step_and_blocks_are_independent(
        rows in 1usize..140,
        cols in 1usize..300,
        recipe in prop::sample::select(&Recipe::ALL[..]),
        operand in prop::sample::select(vec![Operand::Activation, Operand::Weight, Operand::Gradient]),
        over_rows in any::<bool>(),
        threads in 1usize..4,
        seed in 0u64..1000,
    ) {
        let dev = Device::new(threads);
        let spec = recipe.spec(operand);
        let spec = if over_rows { spec.summed_over_rows() } else { spec };
        let x = mixed(seed, rows * cols);
        let scales = plain::scales(spec.element, spec.tile, spec.scaling, &x, rows, cols);
        let (_, across) = spec.tile.grid(rows, cols);
        let tile = |i: usize| match spec.tile {
            Tile::Tensor => 0,
            Tile::Block { rows: r, cols: c } => i / cols / r * across + i % cols / c,
        };
        let mut out = vec![0.0; x.len()];
        fake_quantise(&dev, &spec, Rounding::NearestEven, &x, rows, cols, &mut out).unwrap();
        for i in 0..x.len() {
            let scale = f64::from(scales[tile(i)]);
            let half = step(spec.element, f64::from(x[i]) / scale) / 2.0 * scale;
            // The division and the product are rounded to f32.
            let slack = f64::from(x[i].abs()) * 2f64.powi(-22);
            let error = (f64::from(x[i]) - f64::from(out[i])).abs();
            prop_assert!(error <= half + slack, "{recipe} {operand:?}: {} became {}", x[i], out[i]);
        }

        // Another value in one tile changes no other tile.
        let at = random_bits(seed, 1) as usize % x.len();
        let (mut y, mut changed) = (x.clone(), out.clone());
        y[at] = 1e6;
        fake_quantise(&dev, &spec, Rounding::NearestEven, &y, rows, cols, &mut changed).unwrap();
        for i in (0..x.len()).filter(|&i| tile(i) != tile(at)) {
            prop_assert_eq!(out[i].to_bits(), changed[i].to_bits());
        }

        // What came back is a fixed point: exactly for scales that are powers of two, else to an f32 rounding of the scale.
        let mut again = vec![0.0; x.len()];
        fake_quantise(&dev, &spec, Rounding::NearestEven, &out, rows, cols, &mut again).unwrap();
        for (&a, &b) in out.iter().zip(&again) {
            let same = if spec.scaling == Scaling::Amax { (a - b).abs() <= a.abs() * 5e-7 } else { a == b };
            prop_assert!(same, "{recipe} {operand:?}: {a:e} became {b:e}");
        }
    }

    /// With scales amax/max, the values that come back have the codes that they came from.
    #[test]
    fn dequantised_values_have_the_same_codes(rows in 1usize..9, cols in 1usize..300, seed in 0u64..1000) {
        fn check<F: Format>(x: &[f32], rows: usize, cols: usize) {
            let dev = Device::new(1);
            let (mut codes, mut scales) = (vec![F::Code::default(); x.len()], vec![0.0; rows * cols.div_ceil(128)]);
            let call = |x: &[f32], codes: &mut [F::Code], scales: &mut [f32]| {
                let (tile, scaling) = (Tile::ROW_128, Scaling::Amax);
                quantise::<F>(&dev, tile, scaling, Rounding::NearestEven, x, rows, cols, codes, scales).unwrap();
            };
            call(x, &mut codes, &mut scales);
            let mut back = vec![0.0; x.len()];
            dequantise::<F>(&dev, Tile::ROW_128, &codes, &scales, rows, cols, &mut back).unwrap();
            let (mut codes_again, mut scales_again) = (codes.clone(), scales.clone());
            call(&back, &mut codes_again, &mut scales_again);
            assert_eq!(codes, codes_again);
        }
        let x = mixed(seed, rows * cols);
        check::<E4M3>(&x, rows, cols);
        check::<E5M2>(&x, rows, cols);
        check::<Int8>(&x, rows, cols);
    }

    /// Tiles along columns are tiles along rows of the transposed matrix.
    #[test]
    fn columns_are_rows_of_the_transposed(rows in 1usize..300, cols in 1usize..70, seed in 0u64..1000) {
        let dev = Device::new(2);
        let x = mixed(seed, rows * cols);
        let transposed = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..x.len()).map(|i| x[i % rows * cols + i / rows]).collect()
        };
        for recipe in [Recipe::Fp8Blockwise, Recipe::Mxfp8, Recipe::Int8Block, Recipe::Fp16Block] {
            let spec = recipe.spec(Operand::Gradient);
            let (mut a, mut b) = (x.clone(), x.clone());
            fake_quantise(&dev, &spec.summed_over_rows(), Rounding::NearestEven, &x, rows, cols, &mut a).unwrap();
            let turned = transposed(&x, rows, cols);
            fake_quantise(&dev, &spec, Rounding::NearestEven, &turned, cols, rows, &mut b).unwrap();
            prop_assert_eq!(bits(&a), bits(&transposed(&b, cols, rows)));
        }
    }
}
