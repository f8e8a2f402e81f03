//! AdamW over a list of parameters, with f32 masters where the model computes in bf16.

use phalanx_kernels::{adamw, elementwise, reduce};
use phalanx_nn::Parameter;
use phalanx_tensor::{Category, DType, Runtime, Tensor};

use crate::{Result, TrainError};

/// Settings that stay the same over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Whether norms and biases (parameters of one dimension) decay too.
    pub decay_norms_and_biases: bool,
}

/// The optimizer's share of one parameter.
pub struct ParamState {
    /// The parameter.
    pub param: Parameter,
    /// First moment.
    pub exp_avg: Tensor,
    /// Second moment.
    pub exp_avg_sq: Tensor,
    /// The exact value, where the model holds a rounded one.
    pub master: Option<Tensor>,
}

/// AdamW (Loshchilov & Hutter, arXiv 1711.05101), numbers as `torch.optim.AdamW`.
pub struct AdamW {
    options: AdamWOptions,
    states: Vec<ParamState>,
    /// Updates made so far.
    updates: u64,
}

impl AdamW {
    /// An optimizer for `params`, which hold f32 values. A parameter that `dtype_of` wants in bf16 gets a master here and is
    /// rounded.
    ///
    /// # Errors
    /// If a parameter has no value or memory runs out.
    pub fn new(
        rt: &Runtime,
        params: &[Parameter],
        dtype_of: &dyn Fn(&Parameter) -> DType,
        options: AdamWOptions,
    ) -> Result<AdamW> {
        let mut states = Vec::with_capacity(params.len());
        for p in params {
            let master = match dtype_of(p) {
                DType::F32 => None,
                low => {
                    let master = rt.cast(&p.kept()?, DType::F32, Category::Optimizer)?;
                    p.set(rt.cast(&master, low, Category::Weights)?)?;
                    Some(master)
                }
            };
            states.push(ParamState {
                param: p.clone(),
                exp_avg: rt.zeros(&p.placement().kept_shape(), Category::Optimizer)?,
                exp_avg_sq: rt.zeros(&p.placement().kept_shape(), Category::Optimizer)?,
                master,
            });
        }
        Ok(AdamW { options, states, updates: 0 })
    }

    /// Updates made so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Sets the number of updates made, when going on from a checkpoint.
    pub fn set_updates(&mut self, n: u64) {
        self.updates = n;
    }

    /// State by parameter.
    pub fn states(&self) -> &[ParamState] {
        &self.states
    }

    /// State by parameter, to be filled from a checkpoint.
    pub fn states_mut(&mut self) -> &mut [ParamState] {
        &mut self.states
    }

    /// Norm of all gradients together, as they stand (sums over tokens). Not finite if an element is not.
    ///
    /// # Errors
    /// If a gradient is not f32.
    pub fn grad_norm(&self, rt: &Runtime) -> Result<f64> {
        Ok(self.grad_sum_squares(rt, &|_| true)?.sqrt())
    }

    /// Sum of the squares of the gradients that this rank keeps, of the parameters that `counts` wants: on several ranks, those that no
    /// other rank counts.
    ///
    /// # Errors
    /// If a gradient is not f32.
    pub fn grad_sum_squares(&self, rt: &Runtime, counts: &dyn Fn(&Parameter) -> bool) -> Result<f64> {
        let mut sum = 0f64;
        for s in self.states.iter().filter(|s| counts(&s.param)) {
            if let Some(g) = s.param.kept_grad().get() {
                sum += reduce::sum_squares(rt.device(), g.f32()?);
            }
        }
        Ok(sum)
    }

    /// Drops all gradients.
    pub fn zero_grad(&self) {
        for s in &self.states {
            drop(s.param.kept_grad().take());
        }
    }

    /// One update with every gradient times `grad_scale`; gradients are dropped. A parameter without a gradient is left alone.
    ///
    /// # Errors
    /// If somebody still holds a parameter's value.
    pub fn step(&mut self, rt: &Runtime, lr: f32, grad_scale: f32) -> Result<()> {
        self.updates += 1;
        for s in &mut self.states {
            let Some(grad) = s.param.kept_grad().take() else { continue };
            let decays = self.options.decay_norms_and_biases || s.param.shape().len() >= 2;
            let call = adamw::AdamW {
                lr,
                beta1: self.options.beta1,
                beta2: self.options.beta2,
                eps: self.options.eps,
                weight_decay: if decays { self.options.weight_decay } else { 0.0 },
                step: self.updates,
                grad_scale,
            };
            let (m, v) = (s.exp_avg.f32_mut()?, s.exp_avg_sq.f32_mut()?);
            let dev = rt.device();
            s.param.update(|value| -> Result<()> {
                match &mut s.master {
                    None => adamw::step(dev, &call, value.f32_mut()?, grad.f32()?, m, v, None)?,
                    Some(master) => {
                        adamw::step(dev, &call, master.f32_mut()?, grad.f32()?, m, v, Some(value.bf16_mut()?))?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The exact value of a parameter: its master if it has one.
    pub fn exact(&self, p: &Parameter) -> Option<&Tensor> {
        self.states.iter().find(|s| s.param.is(p)).and_then(|s| s.master.as_ref())
    }

    /// Puts the rounded masters back into the model, after masters were loaded.
    ///
    /// # Errors
    /// If somebody still holds a parameter's value.
    pub fn round_masters(&self, rt: &Runtime) -> Result<()> {
        for s in &self.states {
            if let Some(m) = &s.master {
                s.param
                    .update(|v| -> Result<()> { Ok(elementwise::to_bf16(rt.device(), m.f32()?, v.bf16_mut()?)?) })?;
            }
        }
        Ok(())
    }
}

/// The factor that brings a norm down to `max_norm` (0: no clipping), as `clip_grad_norm_` does it.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

impl From<phalanx_kernels::KernelError> for TrainError {
    fn from(e: phalanx_kernels::KernelError) -> Self {
        TrainError::Tensor(e.into())
    }
}
