//! A linear layer with delayed scales against its three products written out: operands rounded with the scales of earlier steps, then
//! multiplied in f32.

use std::sync::Arc;

use phalanx_autograd::functions::{LinearSpec, Param, PassScales, linear};
use phalanx_autograd::{GradSlot, LayerScales, Tape};
use phalanx_kernels::gemm::{Arithmetic, Gemm, gemm};
use phalanx_kernels::lowp::{Delayed, Operand, Recipe, Rounding, amax, fake_quantise};
use phalanx_tensor::{Category, Runtime};
use phalanx_testkit::values;

const T: usize = 6;
const IN: usize = 10;
const OUT: usize = 4;

/// y, dx and dw.
type Products = [Vec<f32>; 3];

/// What the layer computes for a micro-batch, forward run twice as under recompute.
fn ours(rt: &Runtime, [x, w, dy]: [&[f32]; 3], layer: &Arc<LayerScales>) -> Products {
    let tensor = |shape: &[usize], values| rt.from_f32(shape, values, Category::Activations).unwrap();
    let slot = GradSlot::new();
    let spec = || LinearSpec {
        weight: Param::new(tensor(&[OUT, IN], w), Some(slot.clone())),
        bias: None,
        alpha: 1.0,
        arithmetic: Arithmetic::Simulated(Recipe::Fp8Delayed),
        gradient_noise: None,
        scales: Some(PassScales { layer: layer.clone(), observe: true }),
    };
    let first = linear(rt, None, &tensor(&[T, IN], x), spec()).unwrap();
    let mut tape = Tape::new();
    let x = tape.input(tensor(&[T, IN], x));
    let y = linear(rt, Some(&mut tape), &x, spec()).unwrap();
    let y_values = y.f32().unwrap().to_vec();
    assert_eq!(first.f32().unwrap(), y_values);
    let grads = tape.backward(rt, &y, tensor(&[T, OUT], dy)).unwrap();
    let dx = grads.of(&x).unwrap().f32().unwrap().to_vec();
    let dw = slot.take().unwrap().f32().unwrap().to_vec();
    [y_values, dx, dw]
}

/// The same by hand, from the magnitude that each operand's scale follows from.
fn by_hand(rt: &Runtime, operands: [&[f32]; 3], magnitudes: [f32; 3]) -> Products {
    let dev = rt.device();
    let rounded = |operand: Operand| {
        let spec = Recipe::Fp8Delayed.spec(operand);
        let (x, columns) = (operands[operand as usize], [IN, IN, OUT][operand as usize]);
        let spec = spec.with_scale(magnitudes[operand as usize] / spec.element.target());
        let mut out = vec![0.0; x.len()];
        fake_quantise(dev, &spec, Rounding::NearestEven, x, x.len() / columns, columns, &mut out).unwrap();
        out
    };
    let [x, w, dy] = Operand::ALL.map(rounded);
    let (x, w, dy) = ((&x).into(), (&w).into(), (&dy).into());
    let products = [Gemm::nt(T, OUT, IN, x, w), Gemm::nn(T, IN, OUT, dy, w), Gemm::tn(OUT, IN, T, dy, x)];
    products.map(|g| {
        let mut c = vec![0.0; g.m * g.n];
        gemm(dev, &g, &mut c).unwrap();
        c
    })
}

#[test]
fn a_step_goes_by_the_magnitudes_of_the_steps_before_it() {
    let rt = Runtime::new(1);
    let layer = Arc::new(LayerScales::new(Delayed::default()));
    // Operands grow from step to step, so that the greatest values lie past what the scale reaches.
    let operands = |step: usize, micro: usize| {
        let seed = (10 * step + micro) as u64;
        let grown = |n: usize, by: f32| values(seed + n as u64, n).iter().map(|v| v * by).collect::<Vec<f32>>();
        let by = (1 + step) as f32 + micro as f32 / 4.0;
        [grown(T * IN, by), values(7 + step as u64, OUT * IN), grown(T * OUT, 1e-3 * by)]
    };
    let mut before: Option<[f32; 3]> = None;
    for step in 0..4 {
        let mut seen = [0f32; 3];
        for micro in 0..2 {
            let all = operands(step, micro);
            let all = [&all[0][..], &all[1][..], &all[2][..]];
            let own = all.map(|x| amax(rt.device(), x));
            let want = by_hand(&rt, all, before.unwrap_or(own));
            assert_eq!(ours(&rt, all, &layer), want, "step {step}, micro-batch {micro}");
            if step > 0 {
                assert!(own[0] > before.unwrap()[0], "something saturates");
                assert_ne!(want, by_hand(&rt, all, own));
            }
            seen = [0, 1, 2].map(|i| seen[i].max(own[i]));
        }
        layer.commit();
        before = Some(before.map_or(seen, |b| [0, 1, 2].map(|i| b[i].max(seen[i]))));
        for operand in Operand::ALL {
            let history = layer.history(operand);
            assert_eq!(history.amaxes().len(), step + 1, "one entry a step");
            assert_eq!(history.amaxes().last(), Some(seen[operand as usize]));
        }
    }
}

#[test]
fn a_pass_that_does_not_observe_uses_the_scales_and_leaves_them() {
    let rt = Runtime::new(1);
    let layer = Arc::new(LayerScales::new(Delayed::default()));
    let (x, w) = (values(1, T * IN), values(2, OUT * IN));
    layer.restore(Operand::Activation, &[0.5], Some(0.5 / 448.0));
    layer.restore(Operand::Weight, &[0.25], Some(0.25 / 448.0));
    let spec = LinearSpec {
        weight: Param::new(rt.from_f32(&[OUT, IN], &w, Category::Weights).unwrap(), None),
        bias: None,
        alpha: 1.0,
        arithmetic: Arithmetic::Simulated(Recipe::Fp8Delayed),
        gradient_noise: None,
        scales: Some(PassScales { layer: layer.clone(), observe: false }),
    };
    let y = linear(&rt, None, &rt.from_f32(&[T, IN], &x, Category::Activations).unwrap(), spec).unwrap();
    let [want, ..] = by_hand(&rt, [&x, &w, &[0.0; T * OUT]], [0.5, 0.25, 1.0]);
    assert_eq!(y.f32().unwrap(), want);
    layer.commit();
    assert_eq!(Operand::ALL.map(|o| layer.history(o).amaxes().len()), [1, 1, 0]);
}
