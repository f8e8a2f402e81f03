//! Attention against its f64 reference, and bit for bit against itself in other company.

mod common;

use common::{bits, on_all_devices};
use phalanx_kernels::attention::{
    Attention, Running, Seq, backward, backward_onto, forward, forward_onto, log_sum_exp, plain,
};
use phalanx_kernels::{Device, Isa, KernelError};
use phalanx_testkit::{rel_norm, values};
use proptest::prelude::*;

/// Sequences of (q_len, kv_len), packed one after another.
fn pack(lens: &[(usize, usize)]) -> (Vec<Seq>, usize, usize) {
    let (mut q, mut kv, mut seqs) = (0, 0, vec![]);
    for &(q_len, kv_len) in lens {
        seqs.push(Seq { q_start: q, q_len, kv_start: kv, kv_len, ahead: 0 });
        (q, kv) = (q + q_len, kv + kv_len);
    }
    (seqs, q, kv)
}

fn case(seqs: &[Seq], heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> Attention<'_> {
    Attention { seqs, heads, kv_heads, head_dim, value_dim: head_dim, scale: 1.0 / (head_dim as f32).sqrt(), window }
}

/// Inputs q, k, v, dout for `tq` query rows and `tk` keys, large enough for a sharp softmax.
fn inputs(a: &Attention<'_>, tq: usize, tk: usize, seed: u64) -> [Vec<f32>; 4] {
    let n = a.heads * a.head_dim;
    let kn = a.kv_heads * a.head_dim;
    let (vn, on) = (a.kv_heads * a.value_dim, a.heads * a.value_dim);
    let sharp = |seed, n| values(seed, n).into_iter().map(|v| v * 3.0).collect();
    [sharp(seed, tq * n), sharp(seed + 1, tk * kn), values(seed + 2, tk * vn), values(seed + 3, tq * on)]
}

/// Runs forward and backward; returns out, lse, dq, dk, dv. Outputs start as NaN, so what is not written shows.
fn run(dev: &Device, a: &Attention<'_>, x: &[Vec<f32>; 4]) -> [Vec<f32>; 5] {
    let [q, k, v, dout] = x;
    let lse_len = q.len() / a.head_dim;
    let nan = |n| vec![f32::NAN; n];
    let (mut out, mut lse) = (nan(dout.len()), nan(lse_len));
    let (mut dq, mut dk, mut dv) = (nan(q.len()), nan(k.len()), nan(v.len()));
    forward(dev, a, q, k, v, &mut out, &mut lse).unwrap();
    backward(dev, a, q, k, v, &out, &lse, dout, &mut dq, &mut dk, &mut dv).unwrap();
    [out, lse, dq, dk, dv]
}

fn reference(a: &Attention<'_>, x: &[Vec<f32>; 4]) -> [Vec<f32>; 5] {
    let [q, k, v, dout] = x;
    let (mut out, mut lse) = (vec![0.0; dout.len()], vec![0.0; q.len() / a.head_dim]);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    plain::forward(a, q, k, v, &mut out, &mut lse);
    plain::backward(a, q, k, v, &out, &lse, dout, &mut dq, &mut dk, &mut dv);
    [out, lse, dq, dk, dv]
}

const NAMES: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

fn check(got: &[Vec<f32>; 5], want: &[Vec<f32>; 5], what: &str) {
    for ((got, want), name) in got.iter().zip(want).zip(NAMES) {
        // Where a row sees one key only, dq and dk are zero but for rounding: hence a floor under the norm.
        let floor = 0.03 * (want.len() as f64).sqrt();
        let norm = want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>().sqrt();
        let e = rel_norm(got, want) * (norm / norm.max(floor)).min(1.0);
        assert!(e < 3e-6, "{name} of {what}: {e}");
    }
}

#[test]
fn equals_the_reference_on_every_device() {
    for (lens, heads, kv_heads, dim, window) in [
        (&[(1, 1)][..], 1, 1, 1, None),
        (&[(70, 70)], 1, 1, 16, None),
        (&[(5, 5), (130, 130), (64, 64)], 3, 1, 64, None),
        (&[(33, 33), (1, 1), (97, 97)], 4, 2, 48, Some(20)),
        (&[(65, 65), (10, 10)], 2, 2, 80, Some(64)),
        (&[(40, 40), (3, 3), (29, 29)], 6, 2, 96, None),
        (&[(150, 150)], 2, 1, 128, Some(1)),
        (&[(20, 20), (0, 0), (7, 7)], 2, 1, 256, None),
        (&[(3, 200), (1, 77), (64, 65)], 9, 3, 20, None),
        (&[(3, 200), (1, 77), (64, 65)], 9, 3, 7, Some(30)),
        (&[(600, 600)], 2, 1, 8, None),
    ] {
        let (seqs, tq, tk) = pack(lens);
        let a = case(&seqs, heads, kv_heads, dim, window);
        let x = inputs(&a, tq, tk, 7);
        let want = reference(&a, &x);
        on_all_devices(|dev| {
            let got = run(dev, &a, &x);
            check(
                &got,
                &want,
                &format!("{lens:?} {heads}/{kv_heads} heads of {dim}, window {window:?}, {}", dev.isa()),
            );
            got.map(|g| bits(&g))
        });
    }
}

/// Latent attention has wider keys than values; nothing forbids the opposite.
#[test]
fn values_may_be_wider_or_narrower_than_keys() {
    for (lens, heads, kv_heads, dim, value_dim, window) in [
        (&[(24, 24), (1, 1), (130, 130)][..], 4, 4, 24, 16, None),
        (&[(70, 70), (9, 9)], 2, 2, 192, 128, None),
        (&[(33, 33), (97, 97)], 6, 2, 16, 40, Some(20)),
        (&[(3, 200), (1, 77), (64, 65)], 3, 1, 48, 32, None),
        (&[(2, 90), (1, 1)], 2, 2, 7, 64, Some(30)),
    ] {
        let (seqs, tq, tk) = pack(lens);
        let a = Attention { value_dim, ..case(&seqs, heads, kv_heads, dim, window) };
        let x = inputs(&a, tq, tk, 7);
        let want = reference(&a, &x);
        on_all_devices(|dev| {
            let got = run(dev, &a, &x);
            check(&got, &want, &format!("{lens:?} {heads}/{kv_heads} heads of {dim} and {value_dim}, {}", dev.isa()));
            got.map(|g| bits(&g))
        });
        // A padded value is a value: zeros beside the others change no bit of what is there.
        let padded = Attention { value_dim: value_dim + 8, ..a };
        let pad = |x: &[f32]| x.chunks_exact(value_dim).flat_map(|r| r.iter().copied().chain([0.0; 8])).collect();
        let dev = Device::new(2);
        let [q, k, v, dout] = &x;
        let wide = run(&dev, &padded, &[q.clone(), k.clone(), pad(v), pad(dout)]);
        let narrow = run(&dev, &a, &x);
        let cut: Vec<f32> = wide[0].chunks_exact(value_dim + 8).flat_map(|r| r[..value_dim].to_vec()).collect();
        assert_eq!(bits(&cut), bits(&narrow[0]));
    }
}

#[test]
fn no_sequence_and_no_query() {
    on_all_devices(|dev| {
        let a = case(&[], 2, 1, 4, None);
        let got = run(dev, &a, &inputs(&a, 0, 0, 1));
        assert!(got.iter().all(Vec::is_empty));
        let seqs = [Seq { q_start: 0, q_len: 0, kv_start: 0, kv_len: 3, ahead: 0 }];
        let a = case(&seqs, 2, 1, 4, None);
        let got = run(dev, &a, &inputs(&a, 0, 3, 1));
        assert!(got[3].iter().chain(&got[4]).all(|&g| g == 0.0), "keys that nobody sees have a gradient of 0");
    });
}

/// Head dims and windows for the tests of bits.
const FORMS: [(usize, usize, usize, Option<usize>); 5] =
    [(3, 1, 64, None), (2, 2, 48, None), (4, 2, 20, Some(70)), (2, 1, 128, Some(5)), (9, 3, 16, None)];

#[test]
fn a_row_has_the_same_bits_in_training_decoding_and_chunked_prefill() {
    for (heads, kv_heads, dim, window) in FORMS {
        let s = 150;
        let (whole, ..) = pack(&[(s, s)]);
        let a = case(&whole, heads, kv_heads, dim, window);
        let [q, k, v, _] = inputs(&a, s, s, 3);
        let width = heads * dim;
        on_all_devices(|dev| {
            let (mut out, mut lse) = (vec![0.0; s * width], vec![0.0; s * heads]);
            forward(dev, &a, &q, &k, &v, &mut out, &mut lse).unwrap();
            for chunk in [1, 7, 64, 100] {
                for start in (0..s).step_by(chunk) {
                    let end = s.min(start + chunk);
                    // The cache may be longer than what is in use, and hold anything there.
                    let mut k = k.clone();
                    let mut v = v.clone();
                    k[end * kv_heads * dim..].fill(f32::NAN);
                    v[end * kv_heads * dim..].fill(f32::INFINITY);
                    let seqs = [Seq { q_start: 0, q_len: end - start, kv_start: 0, kv_len: end, ahead: 0 }];
                    let part = case(&seqs, heads, kv_heads, dim, window);
                    let (mut o, mut l) = (vec![0.0; (end - start) * width], vec![0.0; (end - start) * heads]);
                    forward(dev, &part, &q[start * width..end * width], &k, &v, &mut o, &mut l).unwrap();
                    assert_eq!(bits(&o), bits(&out[start * width..end * width]), "chunk {chunk} at {start}");
                    assert_eq!(bits(&l), bits(&lse[start * heads..end * heads]), "chunk {chunk} at {start}");
                }
            }
        });
    }
}

#[test]
fn documents_do_not_see_each_other() {
    for (heads, kv_heads, dim, window) in FORMS {
        let lens = [(90, 90), (17, 17), (131, 131), (64, 64)];
        let (seqs, tq, tk) = pack(&lens);
        let a = case(&seqs, heads, kv_heads, dim, window);
        let x = inputs(&a, tq, tk, 5);
        on_all_devices(|dev| {
            let packed = run(dev, &a, &x);
            for s in &seqs {
                let alone = [Seq { q_start: 0, kv_start: 0, ..*s }];
                let one = case(&alone, heads, kv_heads, dim, window);
                let rows = |x: &[f32], width| x[s.q_start * width..(s.q_start + s.q_len) * width].to_vec();
                let (w, kw) = (heads * dim, kv_heads * dim);
                let y = [rows(&x[0], w), rows(&x[1], kw), rows(&x[2], kw), rows(&x[3], w)];
                let got = run(dev, &one, &y);
                for (i, width) in [w, heads, w, kw, kw].into_iter().enumerate() {
                    assert_eq!(bits(&got[i]), bits(&rows(&packed[i], width)), "{} of {s:?}", NAMES[i]);
                }
            }
            // A document full of NaN changes nothing in the others.
            let mut y = x.clone();
            for (i, width) in [heads * dim, kv_heads * dim, kv_heads * dim, heads * dim].into_iter().enumerate() {
                y[i][90 * width..107 * width].fill(f32::NAN);
            }
            let spoilt = run(dev, &a, &y);
            for (i, width) in [heads * dim, heads, heads * dim, kv_heads * dim, kv_heads * dim].into_iter().enumerate()
            {
                assert_eq!(bits(&spoilt[i][..90 * width]), bits(&packed[i][..90 * width]), "{}", NAMES[i]);
                assert_eq!(bits(&spoilt[i][107 * width..]), bits(&packed[i][107 * width..]), "{}", NAMES[i]);
            }
        });
    }
}

#[test]
fn a_row_does_not_see_later_keys_whatever_they_hold() {
    let s = 100;
    let (seqs, ..) = pack(&[(s, s)]);
    for (heads, kv_heads, dim, window) in FORMS {
        let a = case(&seqs, heads, kv_heads, dim, window);
        let [q, k, v, _] = inputs(&a, s, s, 11);
        on_all_devices(|dev| {
            let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; s * heads]);
            forward(dev, &a, &q, &k, &v, &mut out, &mut lse).unwrap();
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (mut k, mut v) = (k.clone(), v.clone());
                k[41 * kv_heads * dim..42 * kv_heads * dim].fill(bad);
                v[41 * kv_heads * dim..42 * kv_heads * dim].fill(bad);
                let (mut o, mut l) = (vec![0.0; q.len()], vec![0.0; s * heads]);
                forward(dev, &a, &q, &k, &v, &mut o, &mut l).unwrap();
                let seen = |row: usize| row >= 41 && window.is_none_or(|w| row < 41 + w);
                for row in 0..s {
                    let (r, rl) = (row * heads * dim..(row + 1) * heads * dim, row * heads..(row + 1) * heads);
                    if seen(row) {
                        assert!(o[r].iter().all(|o| !o.is_finite()), "row {row} hides a {bad} that it saw");
                    } else {
                        assert_eq!(bits(&o[r.clone()]), bits(&out[r]), "row {row}, {bad}");
                        assert_eq!(bits(&l[rl.clone()]), bits(&lse[rl]), "row {row}, {bad}");
                    }
                }
            }
        });
    }
}

#[test]
fn gradients_are_finite_differences() {
    let (seqs, tq, tk) = pack(&[(9, 9), (4, 11), (7, 7)]);
    let a = case(&seqs, 4, 2, 6, Some(5));
    let x = inputs(&a, tq, tk, 21);
    let loss = |x: &[Vec<f32>; 4]| -> f64 {
        // Σ out·dout in f64, from the reference.
        let (mut out, mut lse) = (vec![0.0; x[0].len()], vec![0.0; x[0].len() / 6]);
        plain::forward(&a, &x[0], &x[1], &x[2], &mut out, &mut lse);
        out.iter().zip(&x[3]).map(|(&o, &g)| f64::from(o) * f64::from(g)).sum()
    };
    let dev = Device::new(2);
    let got = run(&dev, &a, &x);
    for (input, grad) in [(0, 2), (1, 3), (2, 4)] {
        for i in (0..x[input].len()).step_by(5) {
            let h = 1e-2f32;
            let at = |delta: f32| {
                let mut y = x.clone();
                y[input][i] += delta;
                loss(&y)
            };
            // Fourth order, so that a step large enough for f32 inputs is also exact enough.
            let slope = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * f64::from(h));
            let g = f64::from(got[grad][i]);
            assert!((g - slope).abs() < 2e-4 * (1.0 + slope.abs()), "{} at {i}: {g}, slope {slope}", NAMES[grad]);
        }
    }
}

#[test]
fn refuses_what_does_not_fit() {
    let dev = Device::new(1);
    let go = |seqs: &[Seq], heads, kv_heads, window| {
        let a = case(seqs, heads, kv_heads, 2, window);
        let (q, k) = (vec![1.0; 8 * heads * 2], vec![1.0; 8 * kv_heads * 2]);
        let (mut out, mut lse, mut dk, mut dv) = (q.clone(), vec![0.0; 8 * heads], k.clone(), k.clone());
        forward(&dev, &a, &q, &k, &k, &mut out, &mut lse)?;
        backward(&dev, &a, &q, &k, &k, &out, &lse, &q, &mut q.clone(), &mut dk, &mut dv)
    };
    let seq = |q_start, q_len, kv_start, kv_len| Seq { q_start, q_len, kv_start, kv_len, ahead: 0 };
    assert!(go(&[seq(4, 4, 4, 4), seq(0, 4, 0, 4)], 2, 1, None).is_ok(), "any order");
    for (seqs, heads, kv_heads, window, why) in [
        (&[seq(0, 8, 0, 8)][..], 3, 2, None, "do not divide"),
        (&[seq(0, 8, 0, 8)], 2, 1, Some(0), "window of 0"),
        (&[seq(0, 9, 0, 9)], 2, 1, None, "does not fit"),
        (&[seq(0, 5, 0, 4)], 2, 1, None, "does not fit"),
        // Sums that wrap around are no way in.
        (&[seq(0, 4, usize::MAX, 4)], 2, 1, None, "does not fit"),
        (&[seq(usize::MAX - 2, 3, 0, 4)], 2, 1, None, "does not fit"),
        (&[seq(0, usize::MAX, 4, 4)], 2, 1, None, "does not fit"),
        (&[seq(0, 4, 0, 4), seq(3, 4, 4, 4)], 2, 1, None, "share query rows"),
        (&[Seq { ahead: 3, ..seq(0, 4, 0, 4) }], 2, 1, Some(3), "sees no key"),
        (&[Seq { ahead: 4, ..seq(0, 4, 0, 0) }], 2, 1, None, "sees no key"),
        (&[Seq { ahead: usize::MAX, ..seq(0, 4, 0, 4) }], 2, 1, None, "at most 2"),
    ] {
        match go(seqs, heads, kv_heads, window) {
            Err(KernelError::Shape { why: got, .. }) => assert!(got.contains(why), "{got}"),
            other => panic!("{why}: {other:?}"),
        }
    }
    let absurd = case(&[], (1 << 63) + 1, 1, 2, None);
    let e = forward(&dev, &absurd, &[1.0; 2], &[1.0; 2], &[1.0; 2], &mut [0.0; 2], &mut [0.0]).unwrap_err();
    assert!(e.to_string().contains("beyond any memory"), "{e}");
}

/// One sequence of `s` rows, its keys cut at `cuts`: what each piece of keys is to the rows that see some of it, from the last piece to the first.
fn pieces(s: usize, cuts: &[usize], window: Option<usize>) -> Vec<Vec<Seq>> {
    let mut edges: Vec<usize> = cuts.iter().map(|c| c % s).chain([0, s]).collect();
    edges.sort_unstable();
    edges.dedup();
    let piece = |from: usize, to: usize| {
        let end = window.map_or(s, |w| s.min(to + w - 1));
        // Rows are cut as well, so that sequences share keys.
        let middle = (from + end) / 2;
        let seq = |first: usize, last: usize| {
            let kv_len = to.min(last) - from;
            Seq { q_start: first, q_len: last - first, kv_start: from, kv_len, ahead: last - from - kv_len }
        };
        let both = [seq(from, middle.max(from + 1)), seq(middle.max(from + 1), end)];
        both.into_iter().filter(|s| s.q_len > 0).collect()
    };
    edges.windows(2).rev().map(|w| piece(w[0], w[1])).collect()
}

/// As [`run`], with the keys in pieces.
fn run_in_pieces(dev: &Device, a: &Attention<'_>, pieces: &[Vec<Seq>], x: &[Vec<f32>; 4]) -> [Vec<f32>; 5] {
    let [q, k, v, dout] = x;
    let rows = q.len() / a.head_dim;
    let (mut out, mut max, mut sum) = (vec![0.0; q.len()], vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
    for seqs in pieces {
        let mut run = Running { out: &mut out, max: &mut max, sum: &mut sum };
        forward_onto(dev, &Attention { seqs, ..*a }, q, k, v, &mut run).unwrap();
    }
    let mut lse = vec![f32::NAN; rows];
    log_sum_exp(&max, &sum, &mut lse).unwrap();
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]);
    for seqs in pieces {
        let a = Attention { seqs, ..*a };
        backward_onto(dev, &a, q, k, v, &out, &lse, dout, &mut dq, &mut dk, &mut dv).unwrap();
    }
    [out, lse, dq, dk, dv]
}

#[test]
fn a_row_that_has_seen_no_key_is_empty_and_takes_the_first_that_comes() {
    let dev = Device::new(1);
    let a = case(&[], 1, 1, 2, None);
    let (q, k, v) = (vec![1.0; 2], vec![0.5; 2], vec![3.0, 4.0]);
    let (mut out, mut max, mut sum) = (vec![0.0; 2], vec![f32::NEG_INFINITY], vec![0.0]);
    let mut run = Running { out: &mut out, max: &mut max, sum: &mut sum };
    forward_onto(&dev, &a, &q, &k, &v, &mut run).unwrap();
    let mut lse = [0.0];
    log_sum_exp(&max, &sum, &mut lse).unwrap();
    assert_eq!((out.as_slice(), lse[0]), (&[0.0, 0.0][..], f32::NEG_INFINITY));
    let seqs = [Seq { q_start: 0, q_len: 1, kv_start: 0, kv_len: 1, ahead: 100 }];
    let mut run = Running { out: &mut out, max: &mut max, sum: &mut sum };
    forward_onto(&dev, &Attention { seqs: &seqs, ..a }, &q, &k, &v, &mut run).unwrap();
    assert_eq!(out, v);
}

#[test]
fn sequences_that_share_keys_get_the_sum_of_their_gradients() {
    // Rows of one sequence in any pieces: the others' rows are not there.
    for (heads, kv_heads, dim, window) in FORMS {
        let s = 300;
        let whole = [Seq { q_start: 0, q_len: s, kv_start: 0, kv_len: s, ahead: 0 }];
        let part = |from: usize, to: usize| Seq { q_start: from, q_len: to - from, kv_start: 0, kv_len: to, ahead: 0 };
        let parts = [part(250, 300), part(0, 31), part(31, 33), part(33, 250)];
        let x = inputs(&case(&whole, heads, kv_heads, dim, window), s, s, 9);
        let want = reference(&case(&whole, heads, kv_heads, dim, window), &x);
        on_all_devices(|dev| {
            let got = run(dev, &case(&parts, heads, kv_heads, dim, window), &x);
            check(&got, &want, &format!("{heads}/{kv_heads} heads of {dim}, window {window:?}"));
            got.map(|g| bits(&g))
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_equals_the_reference(
        lens in proptest::collection::vec((1usize..90, 0usize..100), 1..4),
        share in 1usize..4,
        kv_heads in 1usize..4,
        dim in 1usize..70,
        window in proptest::option::of(1usize..120),
        threads in 1usize..4,
        seed in 0u64..1000,
    ) {
        let lens: Vec<_> = lens.iter().map(|&(q, cached)| (q, q + cached)).collect();
        let (seqs, tq, tk) = pack(&lens);
        let a = case(&seqs, share * kv_heads, kv_heads, dim, window);
        let x = inputs(&a, tq, tk, seed);
        let want = reference(&a, &x);
        for isa in Isa::available() {
            let dev = Device::with_isa(isa, threads).unwrap();
            check(&run(&dev, &a, &x), &want, &format!("{lens:?}, {isa}"));
        }
    }

    #[test]
    fn keys_in_pieces_equal_the_reference(
        s in 1usize..200,
        cuts in proptest::collection::vec(0usize..1000, 0..5),
        share in 1usize..4,
        kv_heads in 1usize..3,
        dim in 1usize..40,
        window in proptest::option::of(1usize..120),
        threads in 1usize..4,
        seed in 0u64..1000,
    ) {
        let whole = [Seq { q_start: 0, q_len: s, kv_start: 0, kv_len: s, ahead: 0 }];
        let a = case(&whole, share * kv_heads, kv_heads, dim, window);
        let x = inputs(&a, s, s, seed);
        let want = reference(&a, &x);
        let pieces = pieces(s, &cuts, window);
        for isa in Isa::available() {
            let dev = Device::with_isa(isa, threads).unwrap();
            check(&run_in_pieces(&dev, &a, &pieces, &x), &want, &format!("{s} rows cut at {cuts:?}, {isa}"));
        }
    }
}
