//! Every form against its definition, on every instruction set.

use half::f16;
use phalanx_testkit::{rel_norm, values};
use proptest::prelude::*;

use super::*;
use crate::gemm::{Gemm, gemm};
use crate::scratch::HugeBuf;

/// Aligned bytes of a matrix.
struct Matrix {
    layout: Layout,
    buf: HugeBuf,
}

impl Matrix {
    fn new(dev: &Device, form: Form, w: &[f32], k: usize) -> Matrix {
        let layout = Layout::new(form, w.len() / k, k);
        let mut m = Matrix { layout, buf: HugeBuf::new(layout.bytes()).unwrap() };
        layout.fill(dev, &|i, out| form.write_row(&w[i * k..(i + 1) * k], out), m.bytes_mut()).unwrap();
        m
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is at least that long and this value's own.
        unsafe { std::slice::from_raw_parts_mut(self.buf.as_ptr(), self.layout.bytes()) }
    }
    fn get(&self) -> Prepared<'_> {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(self.buf.as_ptr(), self.layout.bytes()) };
        Prepared { layout: self.layout, bytes }
    }
    /// The values that the matrix stands for.
    fn widened(&self) -> Vec<f32> {
        let [n, k] = self.layout.shape();
        let mut out = vec![0f32; n * k];
        for (i, row) in out.chunks_exact_mut(k).enumerate() {
            self.layout.read_row(self.get().bytes, i, row).unwrap();
        }
        out
    }
}

fn product(dev: &Device, m: usize, x: &[f32], w: &Matrix, bias: Option<&[f32]>) -> Vec<f32> {
    let mut y = vec![f32::NAN; m * w.layout.n];
    multiply(dev, m, x, &mut [Output { weight: w.get(), bias, y: &mut y }]).unwrap();
    y
}

/// The definition: x rounded block by block, whole sums, f32 from block to block; with the weights as [`Layout::read_row`] never sees them, from
/// their row form.
fn definition(form: Form, x: &[f32], w: &[f32], k: usize) -> Vec<f32> {
    let mut y = Vec::new();
    for x in x.chunks_exact(k) {
        for w in w.chunks_exact(k) {
            let mut row = vec![0u8; form.row_bytes(k)];
            form.write_row(w, &mut row);
            let mut sum = 0f32;
            for (x, block) in x.chunks(BLOCK).zip(row.chunks_exact(form.row_bytes(BLOCK))) {
                let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
                let dx = most / 127.0;
                let xq = |e: usize| {
                    x.get(e).map_or(0, |x| if most > 0.0 { (x * (127.0 / most)).round_ties_even() as i32 } else { 0 })
                };
                let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
                let whole = |q: &dyn Fn(usize) -> i32| (0..BLOCK).map(|e| q(e) * xq(e)).sum::<i32>() as f32;
                if form == Form::Q8 {
                    sum = whole(&|e| i32::from(block[2 + e] as i8)).mul_add(half(0) * dx, sum);
                } else {
                    let q = |e: usize| i32::from(block[4 + e % 16] >> (e / 16 * 4) & 0xF);
                    sum = whole(&q).mul_add(half(0) * dx, sum);
                    sum = half(2).mul_add(dx * whole(&|_| 1), sum);
                }
            }
            y.push(sum);
        }
    }
    y
}

fn devices() -> Vec<Device> {
    Isa::available().into_iter().flat_map(|isa| [1, 2].map(|t| Device::with_isa(isa, t).unwrap())).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn exact_weights_give_the_bits_of_gemm(m in 1usize..70, n in 1usize..150, k in 1usize..700, with_bias: bool) {
        let (x, w, b) = (values(1, m * k), values(2, n * k), values(3, n));
        let rounded: Vec<half::bf16> = w.iter().map(|&x| half::bf16::from_f32(x)).collect();
        for dev in devices() {
            for form in [Form::F32, Form::Bf16] {
                if !Layout::supported(form, &dev) {
                    continue;
                }
                let stored = if form == Form::F32 { crate::Mat::F32(&w) } else { crate::Mat::Bf16(&rounded) };
                let bias = with_bias.then_some(&b[..]);
                let mut want = vec![0f32; m * n];
                gemm(&dev, &Gemm::nt(m, n, k, x[..].into(), stored).bias(bias), &mut want).unwrap();
                let got = product(&dev, m, &x, &Matrix::new(&dev, form, &w, k), bias);
                prop_assert_eq!(bits(&got), bits(&want), "{} on {}", form, dev.isa());
            }
        }
    }

    #[test]
    fn blocks_give_the_bits_of_their_definition(m in 1usize..70, n in 1usize..40, k in 1usize..300) {
        let (x, w) = (values(4, m * k), values(5, n * k));
        for form in [Form::Q8, Form::Q4] {
            let want = definition(form, &x, &w, k);
            for dev in devices() {
                let matrix = Matrix::new(&dev, form, &w, k);
                let got = product(&dev, m, &x, &matrix, None);
                prop_assert_eq!(bits(&got), bits(&want), "{} on {}", form, dev.isa());
                // A row does not know its neighbours.
                let alone = product(&dev, 1, &x[(m - 1) * k..], &matrix, None);
                prop_assert_eq!(bits(&alone), bits(&got[(m - 1) * n..]));
            }
        }
    }
}

#[test]
fn rounding_stays_within_its_bound_of_the_widened_weights() {
    let dev = Device::new(2);
    let (m, n, k) = (5, 100, 576);
    let (x, w) = (values(7, m * k), values(8, n * k));
    for (form, bound) in [(Form::Q8, 0.01), (Form::Q4, 0.12)] {
        let matrix = Matrix::new(&dev, form, &w, k);
        let wide = matrix.widened();
        assert!(rel_norm(&wide, &w) < bound, "{form}");
        let got = product(&dev, m, &x, &matrix, None);
        for (i, got) in got.chunks_exact(n).enumerate() {
            for (j, got) in got.iter().enumerate() {
                let (mut want, mut most) = (0f64, 0f64);
                let (x, w) = (&x[i * k..(i + 1) * k], &wide[j * k..(j + 1) * k]);
                for (x, w) in x.chunks(BLOCK).zip(w.chunks(BLOCK)) {
                    let dx = f64::from(x.iter().fold(0f32, |most, x| most.max(x.abs()))) / 127.0;
                    want += x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>();
                    most += dx / 2.0 * w.iter().map(|&w| f64::from(w.abs())).sum::<f64>();
                }
                assert!((f64::from(*got) - want).abs() <= most * 1.001 + 1e-4, "{form} {i} {j}: {got} {want} ± {most}");
            }
        }
    }
}

#[test]
fn several_products_share_the_rows() {
    let (m, k) = (3, 96);
    let x = values(9, m * k);
    for dev in devices() {
        let forms = [Form::Q4, Form::Q8, Form::F32, Form::Q4];
        let all: Vec<Matrix> = forms
            .into_iter()
            .filter(|&f| Layout::supported(f, &dev))
            .enumerate()
            .map(|(i, form)| Matrix::new(&dev, form, &values(10 + i as u64, (20 + 70 * i) * k), k))
            .collect();
        let mut ys: Vec<Vec<f32>> = all.iter().map(|w| vec![0.0; m * w.layout.n]).collect();
        let mut outputs: Vec<Output<'_>> =
            all.iter().zip(&mut ys).map(|(w, y)| Output { weight: w.get(), bias: None, y }).collect();
        multiply(&dev, m, &x, &mut outputs).unwrap();
        for (w, y) in all.iter().zip(&ys) {
            assert_eq!(bits(y), bits(&product(&dev, m, &x, w, None)));
        }
    }
}

#[test]
fn rows_read_back_are_the_blocks_of_the_file() {
    let dev = Device::new(1);
    // ggml's Q4_0: d = 0.5; values −8, −7, … 7 and again.
    let mut q4_0 = f16::from_f32(0.5).to_le_bytes().to_vec();
    q4_0.extend((0..16).map(|q| q | q << 4));
    let layout = Layout::new(Form::Q4, 1, BLOCK);
    let mut m = Matrix { layout, buf: HugeBuf::new(layout.bytes()).unwrap() };
    layout.fill(&dev, &|_, out| q4_0_to_q4(&q4_0, out), m.bytes_mut()).unwrap();
    let want: Vec<f32> = (0..32).map(|e| (e % 16 - 8) as f32 * 0.5).collect();
    assert_eq!(m.widened(), want);
    let mut row = [0f32; BLOCK];
    assert!(layout.read_row(m.get().bytes, 1, &mut row).is_err());
    assert!(layout.read_row(&m.get().bytes[1..], 0, &mut row).is_err());
}

#[test]
fn what_is_not_finite_shows() {
    for dev in devices() {
        let w = Matrix::new(&dev, Form::Q8, &values(1, 20 * 64), 64);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = values(2, 64);
            x[40] = bad;
            assert!(product(&dev, 1, &x, &w, None).iter().all(|y| y.is_nan()), "{bad} on {}", dev.isa());
        }
        assert!(product(&dev, 1, &[1e-44; 64], &w, None).iter().all(|&y| y == 0.0));
    }
}

#[test]
fn lengths_are_checked() {
    let dev = Device::new(1);
    let w = Matrix::new(&dev, Form::Q8, &values(1, 20 * 64), 64);
    let (x, mut y) = (values(2, 64), vec![0f32; 20]);
    for (m, weight, y) in [
        (2, w.get(), &mut y[..]),
        (1, Prepared { bytes: &w.get().bytes[64..], ..w.get() }, &mut vec![0f32; 20][..]),
        (1, w.get(), &mut vec![0f32; 19][..]),
    ] {
        assert!(multiply(&dev, m, &x, &mut [Output { weight, bias: None, y }]).is_err());
    }
    let other = Matrix::new(&dev, Form::Q8, &values(1, 20 * 32), 32);
    let mut z = vec![0f32; 20];
    let mut both =
        [Output { weight: w.get(), bias: None, y: &mut y }, Output { weight: other.get(), bias: None, y: &mut z }];
    assert!(multiply(&dev, 1, &x, &mut both).unwrap_err().to_string().contains("share one x"));
    multiply(&dev, 0, &[], &mut [Output { weight: w.get(), bias: None, y: &mut [] }]).unwrap();
}

#[test]
fn tasks_cover_every_panel_once() {
    let dev = Device::new(1);
    for n in [1, 16, 100, 192, 576, 1536, 1000] {
        let w = Matrix::new(&dev, Form::Q8, &values(1, n * 32), 32);
        for threads in [1, 2, 3, 7] {
            for unit in [2, 3] {
                let (mut y, panels) = (vec![0f32; n], n.div_ceil(LANES));
                let tasks = tasks_for(panels.div_ceil(unit), threads);
                assert!((1..=TASKS * threads).contains(&tasks));
                let p = Product { weight: w.get(), bias: None, y: Parts::new(&mut y), first: 0, tasks, unit };
                let all: Vec<usize> = (0..tasks).flat_map(|i| p.panels(i)).collect();
                assert_eq!(all, (0..panels).collect::<Vec<_>>(), "{n} outputs, {threads} threads");
            }
        }
    }
}
