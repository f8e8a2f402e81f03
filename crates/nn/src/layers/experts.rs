//! The experts of a mixture: many small gated feed-forwards whose products are made together.
//!
//! Each projection of each expert is a parameter of its own, named as in the file: gradients, optimizer state, plans and checkpoints treat
//! it like any other, and a product over groups takes the list of their values as it is. Nothing is stacked or copied.

use std::sync::Arc;

use phalanx_autograd::functions::{self, GroupedSpec, Param};
use phalanx_kernels::glu::Act;
use phalanx_tensor::{Category, DType, PreparedMatrix, Tensor, multiply_prepared};

use super::Choice;
use crate::{Cx, Describe, Parameter, Result, Visitor};

/// E gated feed-forwards.
pub struct Experts {
    experts: Vec<(String, Expert)>,
    act: Act,
}

struct Expert {
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
}

/// W of one expert. Of another kind than a linear layer, because what a plan may do with one it cannot do with this.
struct Projection(Parameter);

impl Experts {
    /// `prefix.{i}.{gate,up,down}_proj` of each expert i.
    pub fn named(prefix: &str, num: usize, hidden: usize, intermediate: usize, act: Act) -> Experts {
        let expert = |i: usize| {
            let w = |name: &str, inputs: usize, outputs: usize| {
                Projection(Parameter::new(format!("{prefix}.{i}.{name}.weight"), &[outputs, inputs]))
            };
            Expert {
                gate_proj: w("gate_proj", hidden, intermediate),
                up_proj: w("up_proj", hidden, intermediate),
                down_proj: w("down_proj", intermediate, hidden),
            }
        };
        Experts { experts: (0..num).map(|i| (i.to_string(), expert(i))).collect(), act }
    }

    /// Rows of the experts [R, H], each times its weight → [R, H].
    ///
    /// # Errors
    /// If a parameter has no value or memory runs out.
    pub fn forward(&self, cx: &mut Cx, x: Tensor, choice: &Choice) -> Result<Tensor> {
        if cx.tape.is_none()
            && let Some(prepared) = self.prepared()
        {
            return self.forward_prepared(cx, &x, choice, &prepared);
        }
        let spec = |which: fn(&Expert) -> &Projection, cx: &Cx| -> Result<GroupedSpec> {
            let weights = self.experts.iter().map(|(_, e)| which(e).0.param()).collect::<Result<Vec<Param>>>()?;
            let (offsets, noise) = (Arc::clone(&choice.places.offsets), cx.gradient_noise());
            Ok(GroupedSpec { weights: weights.into(), offsets, arithmetic: cx.arithmetic(), gradient_noise: noise })
        };
        let (gate, up, down) = (spec(|e| &e.gate_proj, cx)?, spec(|e| &e.up_proj, cx)?, spec(|e| &e.down_proj, cx)?);
        let (rt, mut tape) = cx.parts();
        let gate = functions::grouped_linear(rt, tape.as_deref_mut(), &x, gate)?;
        let up = functions::grouped_linear(rt, tape.as_deref_mut(), &x, up)?;
        drop(x);
        let h = functions::glu(rt, tape.as_deref_mut(), self.act, &gate, &up)?;
        let h = functions::weigh(rt, tape.as_deref_mut(), &h, &choice.weights, &choice.places)?;
        Ok(functions::grouped_linear(rt, tape, &h, down)?)
    }

    /// gate, up and down of each expert, if they are laid out for inference.
    fn prepared(&self) -> Option<Vec<[PreparedMatrix; 3]>> {
        let first = self.experts.first()?;
        first.1.gate_proj.0.prepared()?;
        let of = |e: &Expert| Some([e.gate_proj.0.prepared()?, e.up_proj.0.prepared()?, e.down_proj.0.prepared()?]);
        self.experts.iter().map(|(_, e)| of(e)).collect()
    }

    /// Weights that are laid out for inference go expert by expert.
    fn forward_prepared(
        &self,
        cx: &Cx,
        x: &Tensor,
        choice: &Choice,
        weights: &[[PreparedMatrix; 3]],
    ) -> Result<Tensor> {
        let (rt, at) = (cx.rt(), &choice.places);
        let (hidden, inner) = (x.dim(1), weights.first().map_or(0, |w| w[0].shape()[0]));
        let mut h = rt.empty(&[x.dim(0), inner], DType::F32, Category::Activations)?;
        let used = || weights.iter().zip(at.offsets.windows(2)).filter(|(_, r)| r[0] < r[1]);
        for ([gate, up, _], rows) in used() {
            let mut ys = multiply_prepared(rt, &x.rows(rows[0]..rows[1])?, &[(gate, None), (up, None)])?;
            let (up, gate) = (ys.remove(1), ys.remove(0));
            let y = functions::glu(rt, None, self.act, &gate, &up)?;
            h.f32_mut()?[rows[0] * inner..rows[1] * inner].copy_from_slice(y.f32()?);
        }
        let h = functions::weigh(rt, None, &h, &choice.weights, at)?;
        let mut out = rt.empty(&[x.dim(0), hidden], DType::F32, Category::Activations)?;
        for ([_, _, down], rows) in used() {
            let y = multiply_prepared(rt, &h.rows(rows[0]..rows[1])?, &[(down, None)])?;
            out.f32_mut()?[rows[0] * hidden..rows[1] * hidden].copy_from_slice(y[0].f32()?);
        }
        Ok(out)
    }
}

impl Describe for Experts {
    fn visit(&self, v: &mut Visitor<'_>) {
        for (name, expert) in &self.experts {
            v.child(name, expert);
        }
    }
    fn kind(&self) -> &'static str {
        "experts"
    }
}

impl Describe for Expert {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.child("gate_proj", &self.gate_proj);
        v.child("up_proj", &self.up_proj);
        v.child("down_proj", &self.down_proj);
    }
    fn kind(&self) -> &'static str {
        "expert"
    }
}

impl Describe for Projection {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.0);
    }
    fn kind(&self) -> &'static str {
        "expert_linear"
    }
}
