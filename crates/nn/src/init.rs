//! Initial values, drawn by parameter name so that they depend on nothing else.

use phalanx_tensor::rng::Stream;
use phalanx_tensor::{Category, Runtime};

use crate::{Parameter, Result};

/// Normal with mean 0 and the given standard deviation.
///
/// # Errors
/// If memory runs out.
pub fn normal(rt: &Runtime, p: &Parameter, seed: u64, std: f32) -> Result<()> {
    let s = Stream::new(seed, p.name());
    fill(rt, p, &|i| s.normal(i) * std)
}

/// Uniform in (−bound, bound).
///
/// # Errors
/// If memory runs out.
pub fn uniform(rt: &Runtime, p: &Parameter, seed: u64, bound: f32) -> Result<()> {
    let s = Stream::new(seed, p.name());
    fill(rt, p, &|i| (2.0 * s.uniform(i) - 1.0) * bound)
}

/// One value everywhere.
///
/// # Errors
/// If memory runs out.
pub fn constant(rt: &Runtime, p: &Parameter, value: f32) -> Result<()> {
    fill(rt, p, &|_| value)
}

/// Fills the part that is kept here: element i of the whole parameter is `f(i)`, wherever it lies.
fn fill(rt: &Runtime, p: &Parameter, f: &(dyn Fn(u64) -> f32 + Sync)) -> Result<()> {
    let placement = p.placement();
    let mut t = rt.empty(&placement.kept_shape(), phalanx_tensor::DType::F32, Category::Weights)?;
    const PIECE: usize = 1 << 14;
    let mut rest = t.f32_mut()?;
    for (start, len) in placement.kept_runs(p.shape()) {
        let (run, after) = rest.split_at_mut(len);
        rest = after;
        rt.device().team().for_chunks_mut(run, PIECE, &|c, out| {
            out.iter_mut().enumerate().for_each(|(i, o)| *o = f((start + c * PIECE + i) as u64));
        });
    }
    p.set(t)
}
