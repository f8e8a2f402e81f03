//! Every product against its definition: one chain of multiply-adds an element, compared by bits.

use super::*;
use crate::Isa;
use half::bf16;
use phalanx_testkit::{rel_norm, values};
use proptest::prelude::*;

/// One operand in both storage types; the f32 form holds the bf16 values where those are asked for.
struct Stored {
    f32: Vec<f32>,
    bf16: Option<Vec<bf16>>,
}

impl Stored {
    fn new(seed: u64, n: usize, half: bool) -> Stored {
        let f32 = values(seed, n);
        if half {
            let b: Vec<bf16> = f32.iter().map(|&x| bf16::from_f32(x)).collect();
            Stored { f32: b.iter().map(|x| x.to_f32()).collect(), bf16: Some(b) }
        } else {
            Stored { f32, bf16: None }
        }
    }
    fn mat(&self) -> Mat<'_> {
        match &self.bf16 {
            Some(b) => Mat::Bf16(b),
            None => Mat::F32(&self.f32),
        }
    }
}

fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// The definition, in the arithmetic of an instruction set.
fn chain(isa: Isa, g: &Gemm<'_>, c: &mut [f32]) {
    let fused = isa != Isa::Portable;
    for i in 0..g.m {
        for j in 0..g.n {
            let c = &mut c[i * g.n + j];
            let mut sum = if g.accumulate && g.alpha == 1.0 { *c } else { 0.0 };
            let a = |p: usize| g.a.at(if g.a_trans { p * g.m + i } else { i * g.k + p });
            let b = |p: usize| g.b.at(if g.b_trans { j * g.k + p } else { p * g.n + j });
            if g.arithmetic == Arithmetic::Int8Block {
                sum = int8_sum(g, (i, j), &a, &b, sum);
            } else if cfg!(target_arch = "x86_64")
                && isa == Isa::Avx512
                && g.arithmetic == Arithmetic::Bf16
                && crate::isa::has_fast_bf16_pairs()
            {
                sum = pair_sum(g.k, &a, &b, sum);
            } else if isa == Isa::Amx {
                let planes = |m: &Mat<'_>| if matches!(m, Mat::F32(_)) { g.arithmetic.planes() } else { 1 };
                sum = amx_sum(g.k, &a, planes(&g.a), &b, planes(&g.b), sum);
            } else {
                for p in 0..g.k {
                    sum = if fused { a(p).mul_add(b(p), sum) } else { sum + a(p) * b(p) };
                }
            }
            if g.alpha != 1.0 {
                sum *= g.alpha;
                if g.accumulate {
                    sum += *c;
                }
            }
            *c = sum + g.bias.map_or(0.0, |b| b[j]);
        }
    }
}

/// What VDPBF16PS computes for one element: of each pair the second product is added first, each with one rounding.
fn pair_sum(k: usize, a: &dyn Fn(usize) -> f32, b: &dyn Fn(usize) -> f32, mut sum: f32) -> f32 {
    let nearest = |x: f32| bf16::from_f32(x).to_f32();
    for p in (0..k).step_by(2) {
        for p in [p + 1, p] {
            if p < k {
                sum = nearest(a(p)).mul_add(nearest(b(p)), sum);
            }
        }
    }
    sum
}

/// The int8 recipe for one element: integer sums over 128 steps, then a multiply and a multiply-add.
fn int8_sum(
    g: &Gemm<'_>,
    (i, j): (usize, usize),
    a: &dyn Fn(usize) -> f32,
    b: &dyn Fn(usize) -> f32,
    mut sum: f32,
) -> f32 {
    let greatest = |it: &mut dyn Iterator<Item = f32>| it.fold(0f32, |m, x| m.max(x.abs())).max(2f32.powi(-100));
    for first in (0..g.k).step_by(128) {
        let steps = first..g.k.min(first + 128);
        let a_most = greatest(&mut steps.clone().map(a));
        let b_most = if g.roles[1] == Role::Weight {
            let columns = j / 128 * 128..g.n.min(j / 128 * 128 + 128);
            let at = |j: usize, p: usize| g.b.at(if g.b_trans { j * g.k + p } else { p * g.n + j });
            greatest(&mut columns.flat_map(|j| steps.clone().map(move |p| at(j, p))))
        } else {
            greatest(&mut steps.clone().map(b))
        };
        let code = |x: f32, most: f32| (x * (127.0 / most)).round_ties_even() as i32;
        let a_code = |p: usize| match g.gradient_noise {
            None => code(a(p), a_most),
            Some(seed) => {
                let place = if g.a_trans { p * g.m + i } else { i * g.k + p };
                let share = (crate::lowp::random_bits(seed, place as u64) >> 16) as f32 / 65536.0;
                (a(p) * (127.0 / a_most) + share).floor().min(127.0) as i32
            }
        };
        let whole: i32 = steps.map(|p| a_code(p) * code(b(p), b_most)).sum();
        sum = (whole as f32 * (b_most / 127.0)).mul_add(a_most / 127.0, sum);
    }
    sum
}

/// What the tile unit computes for one element (TDPBF16PS in the instruction set reference), 32 steps at a time: pairs of products are
/// summed from zero in two chains, even and odd, which are added to each other and then to C.
fn amx_sum(
    k: usize,
    a: &dyn Fn(usize) -> f32,
    a_planes: usize,
    b: &dyn Fn(usize) -> f32,
    b_planes: usize,
    mut sum: f32,
) -> f32 {
    let order: &[(usize, usize)] = match (a_planes, b_planes) {
        (1, 1) => &[(0, 0)],
        (2, 1) => &[(1, 0), (0, 0)],
        (1, 2) => &[(0, 1), (0, 0)],
        (2, 2) => &[(0, 1), (0, 0), (1, 0)],
        (3, 1) => &[(2, 0), (1, 0), (0, 0)],
        (1, 3) => &[(0, 2), (0, 1), (0, 0)],
        _ => &[(1, 1), (0, 1), (0, 2), (0, 0), (1, 0), (2, 0)],
    };
    let plane = |x: f32, which: usize| {
        let mut rest = x;
        for _ in 0..which {
            rest -= f32::from_bits((rest.to_bits() + 0x8000) & 0xFFFF_0000);
        }
        if which == 2 { rest } else { f32::from_bits((rest.to_bits() + 0x8000) & 0xFFFF_0000) }
    };
    // A single plane is the nearest bf16 (of a bf16, itself).
    let nearest = |x: f32| bf16::from_f32(x).to_f32();
    let a_plane = |p: usize, i: usize| if a_planes == 1 { nearest(a(p)) } else { plane(a(p), i) };
    let b_plane = |p: usize, j: usize| if b_planes == 1 { nearest(b(p)) } else { plane(b(p), j) };
    for first in (0..k).step_by(32) {
        for &(i, j) in order {
            let mut parts = [0f32; 2];
            for p in first..k.min(first + 32) {
                let part = &mut parts[(p - first) % 2];
                *part = a_plane(p, i).mul_add(b_plane(p, j), *part);
            }
            sum += parts[0] + parts[1];
        }
    }
    sum
}

/// What each arithmetic may lose, against f64.
#[test]
fn less_exact_products_lose_what_they_say() {
    let dev = Device::new(1);
    let (m, n, k) = (40, 50, 576);
    let (a, b) = (values(1, m * k), values(2, n * k));
    let g = Gemm::nt(m, n, k, (&a).into(), (&b).into());
    let mut want = vec![0.0; m * n];
    plain::gemm(&g, &mut want);
    let err = |arithmetic| {
        let mut c = vec![0.0; m * n];
        gemm(&dev, &g.arithmetic(arithmetic), &mut c).unwrap();
        rel_norm(&c, &want)
    };
    let (x2, x1) = (err(Arithmetic::Bf16x2), err(Arithmetic::Bf16));
    assert!(err(Arithmetic::F32) < 1e-6 && x2 < 2e-5 && x1 < 5e-3, "{x2:.2e} {x1:.2e}");
    // Less exact only where that is faster.
    assert!((x2 > 1e-6) == (dev.isa() == Isa::Amx), "{x2:.2e}");
    #[cfg(target_arch = "x86_64")]
    assert!((x1 > 1e-3) == (dev.isa() == Isa::Amx || crate::isa::has_fast_bf16_pairs()), "{x1:.2e}");
    let int8 = err(Arithmetic::Int8Block);
    assert!((3e-3..2e-2).contains(&int8), "{int8:.2e}");
}

/// f32 by planes of bf16 is as good as f32: nearer to the f64 reference than a chain of multiply-adds is, also where values differ
/// by many powers of two.
#[test]
fn amx_is_as_exact_as_f32() {
    let (Some(amx), Some(avx)) = (Device::with_isa(Isa::Amx, 1), Device::with_isa(Isa::Avx512, 1)) else { return };
    for (k, spread) in [(64, 0), (576, 0), (576, 12), (4096, 20)] {
        let (m, n) = (40, 50);
        let wild = |seed: u64, len: usize| -> Vec<f32> {
            let scale = values(seed ^ 77, len);
            values(seed, len).iter().zip(scale).map(|(x, s)| x * (s * spread as f32).exp2()).collect()
        };
        let (a, b) = (wild(1, m * k), wild(2, n * k));
        let g = Gemm::nt(m, n, k, (&a).into(), (&b).into());
        let mut want = vec![0.0; m * n];
        plain::gemm(&g, &mut want);
        let err = |dev: &Device| {
            let mut c = vec![0.0; m * n];
            gemm(dev, &g, &mut c).unwrap();
            rel_norm(&c, &want)
        };
        let (amx, avx) = (err(&amx), err(&avx));
        assert!(amx < avx, "k {k}, spread {spread}: {amx:.2e} against {avx:.2e}");
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

const SIZES: [usize; 22] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 24, 31, 33, 47, 48, 49, 64, 97, 131];

/// Cuts so small that tests cross every one of them.
fn tiny(narrow: usize) -> Blocking {
    Blocking { kc: 24, mc: 16, stretch: 2000, narrow, narrow_rows: 0, narrow_values: 0, narrow_kc: 17 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_element_is_one_chain(
        (m, n, k) in (prop::sample::select(&SIZES[..]), prop::sample::select(&SIZES[..]), prop::sample::select(&SIZES[..])),
        (a_trans, b_trans, a_half, b_half) in any::<(bool, bool, bool, bool)>(),
        (accumulate, with_bias, scaled, weight, noisy) in any::<(bool, bool, bool, bool, bool)>(),
        threads in prop::sample::select(&[1usize, 2, 3, 5][..]),
        cut in 0usize..3,
        arithmetic in prop::sample::select(&[Arithmetic::F32, Arithmetic::Bf16x2, Arithmetic::Bf16, Arithmetic::Int8Block][..]),
        seed in any::<u64>(),
    ) {
        let (a, b) = (Stored::new(seed, m * k, a_half), Stored::new(seed ^ 1, k * n, b_half));
        let bias = values(seed ^ 2, n);
        let g = Gemm {
            m, n, k, a: a.mat(), a_trans, b: b.mat(), b_trans,
            alpha: if scaled { 0.37 } else { 1.0 },
            accumulate,
            bias: (with_bias && !accumulate).then_some(&bias[..]),
            arithmetic, roles: [Role::Gradient, if weight { Role::Weight } else { Role::Activation }],
            gradient_noise: noisy.then_some(seed ^ 5), scales: [None; 2],
        };
        let c0 = values(seed ^ 3, m * n);
        for isa in Isa::available() {
            let dev = Device::with_isa(isa, threads).unwrap();
            let by = [tiny(0), tiny(200), Blocking::best(isa, arithmetic)][cut];
            let (mut got, mut want) = (c0.clone(), c0.clone());
            gemm_blocked(&dev, &g, &mut got, &by).unwrap();
            chain(isa, &g, &mut want);
            prop_assert_eq!(bits(&got), bits(&want), "{} {:?}", isa, by);
        }
    }
}

/// Rounding both operands first and then multiplying them is all that a simulated recipe does, whichever way they are stored; and a weight
/// in square blocks is rounded to the same values in forward and backward.
#[test]
fn simulated_recipes_round_the_operands() {
    use crate::lowp::{Recipe, Rounding, fake_quantise};
    let (m, n, k) = (33, 150, 300);
    let dev = Device::new(2);
    let (x, w) = (values(1, m * k), values(2, n * k));
    for recipe in Recipe::ALL {
        let rounded = |role, x: &[f32], rows: usize| {
            let mut out = vec![0.0; x.len()];
            fake_quantise(&dev, &recipe.spec(role), Rounding::NearestEven, x, rows, x.len() / rows, &mut out).unwrap();
            out
        };
        let (xr, wr) = (rounded(Role::Activation, &x, m), rounded(Role::Weight, &w, n));
        assert!(rel_norm(&xr, &x) < 0.05 && xr != x, "{recipe}");
        let mut want = vec![0.0; m * n];
        gemm(&dev, &Gemm::nt(m, n, k, (&xr).into(), (&wr).into()), &mut want).unwrap();
        let (xt, wt) = (transposed(&x, m, k), transposed(&w, n, k));
        let forward = Gemm::nt(m, n, k, (&x).into(), (&w).into());
        let forms = [
            forward,
            Gemm { roles: forward.roles, ..Gemm::nn(m, n, k, (&x).into(), (&wt).into()) },
            Gemm { roles: forward.roles, ..Gemm::tn(m, n, k, (&xt).into(), (&wt).into()) },
        ];
        for g in forms {
            let mut got = vec![f32::NAN; m * n];
            gemm(&dev, &g.arithmetic(Arithmetic::Simulated(recipe)), &mut got).unwrap();
            assert!(bits(&got) == bits(&want), "{recipe}, a_trans {}, b_trans {}", g.a_trans, g.b_trans);
        }
    }
}

/// A scale that is known beforehand is the one that is used, and what it does not reach saturates. Only a recipe with history takes one.
#[test]
fn a_known_scale_is_the_one_that_is_used() {
    use crate::lowp::{Recipe, Rounding, fake_quantise};
    let (m, n, k) = (5, 7, 130);
    let dev = Device::new(1);
    let (mut x, w) = (values(1, m * k), values(2, n * k));
    x[3] = 1e3;
    let product = |x: &[f32], w: &[f32], arithmetic, scales| {
        let mut y = vec![0.0; m * n];
        let g = Gemm::nt(m, n, k, x.into(), w.into()).arithmetic(arithmetic).scales(scales);
        gemm(&dev, &g, &mut y).unwrap();
        y
    };
    let rounded = |role, x: &[f32], rows: usize, scale| {
        let (spec, mut out) = (Recipe::Fp8Delayed.spec(role).with_scale(scale), vec![0.0; x.len()]);
        fake_quantise(&dev, &spec, Rounding::NearestEven, x, rows, x.len() / rows, &mut out).unwrap();
        out
    };
    let (xr, wr) = (rounded(Role::Activation, &x, m, 0.01), rounded(Role::Weight, &w, n, 0.003));
    assert!((xr[3] - 4.48).abs() < 1e-6, "448 · 0.01, not the 1000 that was there");
    let scales = [Some(0.01), Some(0.003)];
    let got = product(&x, &w, Arithmetic::Simulated(Recipe::Fp8Delayed), scales);
    assert_eq!(bits(&got), bits(&product(&xr, &wr, Arithmetic::F32, [None; 2])));
    for other in [Arithmetic::F32, Arithmetic::Int8Block, Arithmetic::Simulated(Recipe::Mxfp8)] {
        assert_eq!(bits(&product(&x, &w, other, scales)), bits(&product(&x, &w, other, [None; 2])), "{other}");
    }
}

/// One token alone, in a batch of any size, in any layout and for any team: the same row of C.
#[test]
fn a_row_does_not_know_its_neighbours() {
    let (m, n, k) = (1100, 131, 803);
    let (a, b) = (values(1, m * k), values(2, k * n));
    let (at, bt) = (transposed(&a, m, k), transposed(&b, k, n));
    let exactness = [Arithmetic::F32, Arithmetic::Bf16x2, Arithmetic::Bf16, Arithmetic::Int8Block];
    // Int8 in plain Rust is slow, and its bits are those of the instruction (`each_element_is_one_chain`).
    let fast = |isa: Isa, arithmetic| arithmetic != Arithmetic::Int8Block || isa >= Isa::Avx512;
    let cases = Isa::available().into_iter().flat_map(|isa| exactness.map(|arithmetic| (isa, arithmetic)));
    for (isa, arithmetic) in cases.filter(|&(isa, arithmetic)| fast(isa, arithmetic)) {
        let mut want: Option<Vec<f32>> = None;
        for threads in [1, 2, 3] {
            let dev = Device::with_isa(isa, threads).unwrap();
            let forms = [
                Gemm::nn(m, n, k, (&a).into(), (&b).into()),
                Gemm::nt(m, n, k, (&a).into(), (&bt).into()),
                Gemm::tn(m, n, k, (&at).into(), (&b).into()),
                Gemm::tt(m, n, k, (&at).into(), (&bt).into()),
            ];
            for g in forms {
                let g = Gemm { roles: [Role::Activation, Role::Weight], arithmetic, ..g };
                let mut c = vec![f32::NAN; m * n];
                gemm(&dev, &g, &mut c).unwrap();
                let want = want.get_or_insert_with(|| c.clone());
                assert!(
                    bits(&c) == bits(want),
                    "{isa} {arithmetic} {threads} threads, a_trans {}, b_trans {}",
                    g.a_trans,
                    g.b_trans
                );
            }
            let want = want.as_ref().unwrap();
            for rows in [1usize, 2, 7, 16, 65, 200] {
                for first in [0, 500, m - rows] {
                    let part: Mat<'_> = a[first * k..(first + rows) * k].into();
                    let mut c = vec![f32::NAN; rows * n];
                    gemm(&dev, &Gemm::nt(rows, n, k, part, (&bt).into()).arithmetic(arithmetic), &mut c).unwrap();
                    assert!(
                        bits(&c) == bits(&want[first * n..(first + rows) * n]),
                        "{isa} {arithmetic} {threads} threads, {rows} rows from {first}"
                    );
                }
            }
        }
    }
}

#[test]
fn close_to_the_f64_reference() {
    for (m, n, k) in [(300, 200, 1000), (1, 500, 3000), (70, 33, 5000)] {
        for isa in Isa::available() {
            for half in [false, true] {
                let dev = Device::with_isa(isa, 2).unwrap();
                let (a, b) = (Stored::new(7, m * k, half), Stored::new(8, k * n, half));
                let bias = values(9, n);
                let g = Gemm::nt(m, n, k, a.mat(), b.mat()).alpha(0.5).bias(Some(&bias));
                let (mut got, mut want) = (vec![0.0; m * n], vec![0.0; m * n]);
                gemm(&dev, &g, &mut got).unwrap();
                plain::gemm(&g, &mut want);
                let err = rel_norm(&got, &want);
                assert!(err < 2e-6, "{isa} {m} {n} {k}: {err}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn groups_give_the_bits_of_single_products(
        sizes in prop::collection::vec(prop::sample::select(&[0usize, 0, 1, 2, 8, 9, 40, 70][..]), 0..6),
        (n, k) in (prop::sample::select(&SIZES[..]), prop::sample::select(&SIZES[..])),
        (b_trans, half, accumulate, small) in any::<(bool, bool, bool, bool)>(),
        threads in prop::sample::select(&[1usize, 2, 3, 5][..]),
        seed in any::<u64>(),
    ) {
        let offsets: Vec<usize> = std::iter::once(0).chain(sizes.iter().scan(0, |t, s| { *t += s; Some(*t) })).collect();
        let rows = *offsets.last().unwrap();
        let a = Stored::new(seed, rows * k, half);
        let stored: Vec<Stored> = (0..sizes.len()).map(|i| Stored::new(seed ^ i as u64, k * n, !half)).collect();
        let b: Vec<Mat<'_>> = stored.iter().map(Stored::mat).collect();
        let arithmetics = [Arithmetic::F32, Arithmetic::Bf16x2, Arithmetic::Bf16, Arithmetic::Int8Block];
        let arithmetic = arithmetics[seed as usize % arithmetics.len()];
        let g = Grouped { b_trans, accumulate, ..Grouped::nt(n, k, a.mat(), &offsets, &b).arithmetic(arithmetic) };
        let c0 = values(seed ^ 9, rows * n);
        for isa in Isa::available() {
            let dev = Device::with_isa(isa, threads).unwrap();
            let (mut got, mut want) = (c0.clone(), c0.clone());
            let by = if small { tiny(30) } else { Blocking::best(isa, arithmetic) };
            grouped::grouped_blocked(&dev, &g, &mut got, &by).unwrap();
            for i in 0..sizes.len() {
                let (from, to) = (offsets[i], offsets[i + 1]);
                let one = if b_trans { Gemm::nt } else { Gemm::nn };
                let one = one(to - from, n, k, a.mat().slice(from * k..to * k), b[i]).arithmetic(arithmetic);
                gemm(&dev, &one.accumulate(accumulate), &mut want[from * n..to * n]).unwrap();
            }
            prop_assert_eq!(bits(&got), bits(&want), "{}", isa);
        }
    }
}

#[test]
fn wrong_lengths_are_refused_and_nothing_is_written() {
    let dev = Device::new(2);
    let (a, b, bias) = (values(1, 6), values(2, 6), values(3, 2));
    let mut c = vec![9.0; 4];
    for g in [
        Gemm::nt(2, 2, 4, (&a).into(), (&b).into()),
        Gemm::nt(2, 3, 3, (&a).into(), (&b).into()),
        Gemm::nt(3, 2, 2, (&a).into(), (&b).into()),
        Gemm::nt(2, 2, 3, (&a).into(), (&b).into()).bias(Some(&bias[..1])),
        Gemm::nt(2, 2, 3, (&a).into(), (&b).into()).bias(Some(&bias)).accumulate(true),
        Gemm::nt(usize::MAX, 2, 3, (&a).into(), (&b).into()),
    ] {
        assert!(gemm(&dev, &g, &mut c).is_err(), "{g:?}");
    }
    let groups = [Mat::from(&b), Mat::from(&b)];
    for offsets in [&[0, 2][..], &[0, 2, 1], &[1, 1, 2], &[0, 1, 3], &[0, 1, usize::MAX], &[]] {
        let g = Grouped::nt(2, 3, (&a).into(), offsets, &groups);
        assert!(grouped(&dev, &g, &mut c).is_err(), "{offsets:?}");
    }
    assert_eq!(c, [9.0; 4]);
}
