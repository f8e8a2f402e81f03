//! A function's gradient against central differences of its formula in f64.

use phalanx_autograd::functions::Param;
use phalanx_autograd::{GradSlot, Tape};
use phalanx_tensor::{Category, Runtime, Tensor};
use phalanx_testkit::{assert_close, rel_norm, values};

/// An argument: a value on the tape, a trained parameter, or a frozen one.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    X,
    Trained,
    Frozen,
}
pub use Kind::{Frozen, Trained, X};

pub struct Arg {
    pub kind: Kind,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

pub fn arg(kind: Kind, shape: &[usize], seed: u64) -> Arg {
    Arg { kind, shape: shape.into(), values: values(seed, shape.iter().product()) }
}

/// What the function under test gets: one entry for each argument.
pub struct Given {
    pub tensors: Vec<Tensor>,
    pub slots: Vec<Option<GradSlot>>,
}

impl Given {
    pub fn x(&self, i: usize) -> &Tensor {
        &self.tensors[i]
    }
    pub fn p(&self, i: usize) -> Param {
        Param::new(self.tensors[i].clone(), self.slots[i].clone())
    }
}

/// Compares forward, and the gradient of Σ c·y for random c (c = 1 where y is one number), with `reference`.
pub fn check(
    what: &str,
    args: &[Arg],
    ours: impl Fn(&Runtime, &mut Tape, &Given) -> Tensor,
    reference: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let rt = Runtime::new(2);
    let mut tape = Tape::new();
    let mut given = Given { tensors: vec![], slots: vec![] };
    for a in args {
        let t = rt.from_f32(&a.shape, &a.values, Category::Weights).unwrap();
        given.tensors.push(if a.kind == X { tape.input(t) } else { t });
        given.slots.push((a.kind == Trained).then(GradSlot::new));
    }
    let y = ours(&rt, &mut tape, &given);
    let exact: Vec<Vec<f64>> = args.iter().map(|a| a.values.iter().map(|&v| f64::from(v)).collect()).collect();
    let want: Vec<f32> = reference(&exact).iter().map(|&v| v as f32).collect();
    assert_close(y.f32().unwrap(), &want, 2e-6, 2e-5, &format!("{what}, forward"));
    let c = if want.len() == 1 { vec![1.0] } else { values(99, want.len()) };
    let seed = rt.from_f32(y.shape(), &c, Category::Activations).unwrap();
    let grads = tape.backward(&rt, &y, seed).unwrap();
    for (i, a) in args.iter().enumerate() {
        let got = match a.kind {
            Frozen => {
                assert!(given.slots[i].is_none());
                continue;
            }
            X => grads.of(&given.tensors[i]).map(|g| g.f32().unwrap().to_vec()),
            Trained => given.slots[i].as_ref().and_then(GradSlot::get).map(|g| g.f32().unwrap().to_vec()),
        };
        let got = got.unwrap_or_else(|| panic!("{what}: argument {i} got no gradient"));
        let slope = |j: usize| {
            let h = 1e-5;
            let at = |d: f64| {
                let mut moved = exact.clone();
                moved[i][j] += d;
                reference(&moved).iter().zip(&c).map(|(y, &c)| y * f64::from(c)).sum::<f64>()
            };
            ((at(h) - at(-h)) / (2.0 * h)) as f32
        };
        let want: Vec<f32> = (0..a.values.len()).map(slope).collect();
        let rel = rel_norm(&got, &want);
        assert!(rel < 1e-5, "{what}: gradient of argument {i} is off by {rel:.1e}\n{got:?}\n{want:?}");
    }
}
