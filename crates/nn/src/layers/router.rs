//! The router of a mixture of experts.

use std::sync::Arc;

use phalanx_autograd::functions::{self, AskSlopes, LinearSpec, Places};
use phalanx_kernels::moe::{Capacity, Route};
use phalanx_tensor::Tensor;

use crate::{Cx, Describe, Parameter, Result, Visitor};

/// Chooses the experts of each token. Its product is as exact as f32 in every plan: a choice that flips is no small error.
///
/// Not a [`crate::Module`]: it gives choices, not rows.
pub struct Router {
    weight: Parameter,
    correction: Option<Parameter>,
    form: Route,
}

/// The experts of each token of a batch.
pub struct Choice {
    /// Weights [T, k]; recorded.
    pub weights: Tensor,
    /// Where the rows of each expert lie.
    pub places: Places,
}

impl Router {
    /// `prefix.weight` [E, hidden] and, where choices are corrected by a bias, the buffer `prefix.e_score_correction_bias` [E].
    pub fn named(prefix: &str, hidden: usize, form: Route, corrected: bool) -> Router {
        let bias = || Parameter::buffer(format!("{prefix}.e_score_correction_bias"), &[form.experts]);
        Router {
            weight: Parameter::new(format!("{prefix}.weight"), &[form.experts, hidden]),
            correction: corrected.then(bias),
            form,
        }
    }

    /// x [T, H] → the experts of each token.
    ///
    /// # Errors
    /// If a parameter has no value or memory runs out.
    pub fn choose(&self, cx: &mut Cx, x: &Tensor) -> Result<Choice> {
        let spec = LinearSpec::exact(self.weight.param()?, None, 1.0);
        let correction = self.correction.as_ref().map(Parameter::value).transpose()?;
        let (experts, balance) = (self.form.experts, cx.balance());
        let path: Arc<str> = cx.path().into();
        let ask = balance.map(|pass| -> AskSlopes {
            let path = Arc::clone(&path);
            Box::new(move || pass.slopes(&path, experts))
        });
        let (rt, mut tape) = cx.parts();
        let logits = functions::linear(rt, tape.as_deref_mut(), x, spec)?;
        let chosen = functions::route(rt, tape, &logits, self.form, correction.as_ref(), ask)?;
        let capacity = cx.env().routing.capacity.filter(|_| cx.env().training);
        let capacity = match capacity {
            None => None,
            Some(c) => Some(Capacity {
                rows: c.rows(chosen.experts.len(), experts),
                drop: c.drop,
                weights: chosen.weights.f32()?,
            }),
        };
        let places = Places::new(&chosen.experts, self.form.top_k, experts, capacity)
            .map_err(phalanx_autograd::AutogradError::from)?;
        let dropped = chosen.experts.len() - places.rows();
        cx.hear_router(experts, &chosen.experts, chosen.probabilities.as_deref(), dropped);
        Ok(Choice { weights: chosen.weights, places })
    }
}

impl Describe for Router {
    fn visit(&self, v: &mut Visitor<'_>) {
        v.parameter(&self.weight);
        if let Some(b) = &self.correction {
            v.parameter(b);
        }
    }
    fn kind(&self) -> &'static str {
        "router"
    }
}
