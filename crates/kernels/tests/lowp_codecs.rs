//! The low-precision codecs: against tables made elsewhere, around every midpoint, against the plain references, and at random.

mod common;

use common::{bits, on_all_devices};
use phalanx_kernels::f16;
use phalanx_kernels::lowp::minifloat::{self, Layout, Overflow};
use phalanx_kernels::lowp::{self, E4M3, E5M2, Format, Fp16, Int8, e8m0, plain, random_bits};

const FLOATS: [Layout; 3] = [minifloat::E4M3, minifloat::E5M2, minifloat::FP16];

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
            bits(&back)
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
            assert!([code, code.saturating_add(1)].contains(&between));
        }
    }
}
