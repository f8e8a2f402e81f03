//! Low-precision numbers: against tables made elsewhere, against the plain references, and by their properties; on every
//! instruction set, with the same bits for any team and any set.

mod common;

use common::{bits, on_all_devices};
use phalanx_kernels::lowp::minifloat::{self, Layout, Overflow};
use phalanx_kernels::lowp::{
    self, E4M3, E5M2, Element, Format, Fp16, Int8, MxExponent, Operand, Recipe, Rounding, Scaling, Spec, Tile,
    dequantise, e8m0, fake_quantise, plain, quantise, random_bits, saved,
};
use phalanx_kernels::{Device, KernelError, f16};
use phalanx_testkit::values;
use proptest::prelude::*;

const FLOATS: [Layout; 3] = [minifloat::E4M3, minifloat::E5M2, minifloat::FP16];
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

/// The lines of a table, split at blanks; `#` starts a comment.
fn table(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split(' ').collect())
}

fn hex(s: &str) -> u32 {
    u32::from_str_radix(s, 16).unwrap()
}

/// Any f32, and more often those of ordinary size.
fn any_bits(i: u64) -> f32 {
    let r = random_bits(11, i);
    f32::from_bits(if i.is_multiple_of(2) { r } else { (r & 0x807F_FFFF) | (100 + (r >> 8 & 0x3F)) << 23 })
}

/// Values of many sizes, some zero; ordinary enough for every scaling.
fn mixed(seed: u64, n: usize) -> Vec<f32> {
    let scale = |i: usize| 2f32.powi((random_bits(seed + 1, i as u64) % 40) as i32 - 20);
    values(seed, n).iter().enumerate().map(|(i, v)| if i % 17 == 3 { 0.0 } else { v * scale(i) }).collect()
}

fn next(x: f32, by: i32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add_signed(by))
}

#[test]
fn every_code_is_worth_what_the_table_says() {
    let mut codes = 0;
    for line in table(include_str!("data/lowp_codes.txt")) {
        let code = hex(line[0]) as u8;
        let ours = [E4M3::decode(code), E5M2::decode(code), e8m0::decode(code)];
        for (x, want) in ours.into_iter().zip(&line[1..]) {
            assert!(if *want == "nan" { x.is_nan() } else { x.to_bits() == hex(want) }, "{code:#x}: {x}, not {want}");
        }
        assert!(ours[0].is_nan() || E4M3::encode(ours[0]) == code);
        assert!(ours[1].is_nan() || E5M2::encode(ours[1]) == code);
        assert_eq!(e8m0::encode_up(ours[2]), code);
        codes += 1;
    }
    assert_eq!(codes, 256);
    for l in FLOATS {
        for code in 0..2 << l.magnitude_bits {
            let (ours, plain) = (minifloat::decode(l, code), plain::decode(l, code));
            assert!(
                f64::from(ours).to_bits() == plain.to_bits() || ours.is_nan() && plain.is_nan(),
                "{l:?}: {code:#x}"
            );
        }
    }
}

#[test]
fn values_round_as_the_table_says() {
    for line in table(include_str!("data/lowp_roundings.txt")) {
        let x = f32::from_bits(hex(line[0]));
        let ours = [
            minifloat::encode(minifloat::E4M3, Overflow::Saturate, x),
            minifloat::encode(minifloat::E5M2, Overflow::NonSaturating, x),
            minifloat::encode(minifloat::FP16, Overflow::NonSaturating, x),
        ];
        for (i, want) in line[1..].iter().enumerate() {
            // fp16 has many NaN; the table's may be another.
            let nan = i == 2 && x.is_nan() && f16::from_bits(hex(want) as u16).is_nan();
            assert!(ours[i] == hex(want) || nan, "{x:e} ({}): {:x} not {want}", line[0], ours[i]);
        }
    }
}

#[test]
fn around_every_midpoint() {
    for l in FLOATS {
        for code in 0..l.max {
            let (below, above) = (minifloat::decode(l, code), minifloat::decode(l, code + 1));
            let middle = ((f64::from(below) + f64::from(above)) / 2.0) as f32;
            let even = code + code % 2;
            let mut cases = vec![
                (below, code),
                (next(below, 1), code),
                (next(middle, -1), code),
                (middle, even),
                (above, code + 1),
            ];
            cases.extend([(next(middle, 1), code + 1), (next(above, -1), code + 1)]);
            for (x, want) in cases {
                for overflow in [Overflow::Saturate, Overflow::SaturateFinite, Overflow::NonSaturating] {
                    let sign = 1 << l.magnitude_bits;
                    assert_eq!(minifloat::encode(l, overflow, x), want, "{l:?}: {x:e}");
                    assert_eq!(minifloat::encode(l, overflow, -x), want | sign, "{l:?}: {:e}", -x);
                    assert_eq!(plain::encode(l, overflow, x), want);
                }
            }
        }
    }
    for whole in -127..127i8 {
        let (below, middle) = (f32::from(whole), f32::from(whole) + 0.5);
        let even = if whole % 2 == 0 { whole } else { whole + 1 };
        let inward =
            |by: i32| f32::from_bits(middle.to_bits().wrapping_add_signed(if middle < 0.0 { -by } else { by }));
        let got = [below, inward(-1), middle, inward(1), below + 1.0].map(Int8::encode);
        assert_eq!(got, [whole, whole, even, whole + 1, whole + 1], "{middle}");
    }
    assert_eq!([127.5, 1e9, -127.6, -128.0, -1e9].map(Int8::encode), [127, 127, -127, -127, -127]);
}

/// The vectorised codecs against the plain ones, over all kinds of f32.
#[test]
fn slices_equal_the_plain_codecs() {
    fn check<F: Format>(l: Layout, code_bits: impl Fn(F::Code) -> u32) {
        let mut x: Vec<f32> = (0..100_003).map(any_bits).collect();
        x.extend([f32::NAN, f32::INFINITY, -f32::INFINITY, 0.0, -0.0, f32::MAX, f32::from_bits(1)]);
        let want: Vec<u32> = x.iter().map(|&x| plain::encode(l, Overflow::SaturateFinite, x)).collect();
        on_all_devices(|dev| {
            let (mut codes, mut back) = (vec![F::Code::default(); x.len()], vec![0.0; x.len()]);
            lowp::encode::<F>(dev, &x, &mut codes).unwrap();
            lowp::decode::<F>(dev, &codes, &mut back).unwrap();
            for ((&x, &code), (&want, &back)) in x.iter().zip(&codes).zip(want.iter().zip(&back)) {
                assert_eq!(code_bits(code), want, "{:?}: {x:e} on {}", F::ELEMENT, dev.isa());
                let value = plain::decode(l, want);
                assert!(f64::from(back).to_bits() == value.to_bits() || back.is_nan() && value.is_nan());
            }
        });
    }
    check::<E4M3>(minifloat::E4M3, u32::from);
    check::<E5M2>(minifloat::E5M2, u32::from);
    check::<Fp16>(minifloat::FP16, |c| c.to_bits().into());
}

/// Over all values of the bits that are cut off, the mean is the value: exactly.
#[test]
fn stochastic_rounding_has_no_bias() {
    for l in [minifloat::E4M3, minifloat::E5M2] {
        let step = minifloat::decode(l, 1);
        // In the normal range, at its lower end, and among the subnormals, where up to 4 bits more are cut off.
        for (x, more) in [(1.2345f32, 0), (-37.001, 0), (step * 7.77, 1), (-step * 2.3, 2), (step * 0.7, 4)] {
            let cut = 23 - l.mantissa + more;
            let mut sum = 0f64;
            for random in 0..1u32 << cut {
                sum += f64::from(minifloat::decode(
                    l,
                    minifloat::encode_stochastic(l, Overflow::SaturateFinite, x, random),
                ));
            }
            assert_eq!(sum / f64::from(1u32 << cut), f64::from(x), "{l:?}");
        }
    }
    // Far below the smallest step, and with the bits of the counter: within five standard deviations.
    let n = 400_000u64;
    let mean = |f: &dyn Fn(u32) -> f32| (0..n).map(|i| f64::from(f(random_bits(5, i)))).sum::<f64>() / n as f64;
    let near =
        |got: f64, x: f64, step: f64| assert!((got - x).abs() < 5.0 * step / 2.0 / (n as f64).sqrt(), "{got} {x}");
    for x in [2f32.powi(-9) * 0.01, 0.017, 3.3, -211.0] {
        let step = f64::from(x.abs().max(2f32.powi(-6)) / 8.0);
        near(mean(&|r| E4M3::decode(E4M3::encode_stochastic(x, r))), x.into(), step);
        near(mean(&|r| Fp16::decode(Fp16::encode_stochastic(x, r))), x.into(), step / 128.0);
    }
    for x in [0.01, -0.3, 126.7, -5.5] {
        near(mean(&|r| Int8::decode(Int8::encode_stochastic(x, r))), x.into(), 1.0);
    }
}

#[test]
fn exact_values_never_move_and_others_go_to_a_neighbour() {
    let draws = || (0..200u64).map(|i| random_bits(9, i)).chain([0, 1, u32::MAX, 1 << 31, 0xFFFF_FF00]);
    for l in [minifloat::E4M3, minifloat::E5M2] {
        for code in 0..l.max {
            let (x, above) = (minifloat::decode(l, code), minifloat::decode(l, code + 1));
            let between = x + (above - x) * 0.3;
            for random in draws() {
                let round = |x| minifloat::encode_stochastic(l, Overflow::NonSaturating, x, random);
                assert_eq!(round(x), code);
                assert!([code, code + 1].contains(&round(between)), "{between}");
            }
        }
    }
    for code in -127..=127i8 {
        for random in draws() {
            assert_eq!(Int8::encode_stochastic(code.into(), random), code);
            let between = Int8::encode_stochastic(f32::from(code) + 0.25, random);
            assert!([code, code.saturating_add(1).min(127)].contains(&between));
        }
    }
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
