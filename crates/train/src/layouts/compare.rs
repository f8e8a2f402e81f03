//! A layout's numbers beside those of one rank.

use std::collections::BTreeMap;

use phalanx_models::ModelConfig;

use super::data::Sample;
use super::run::{Part, Rank};
use super::{Case, LOSS_TOLERANCE, LayoutResult, STEPS, TOLERANCE, formula};
use crate::Result;

pub(super) fn compare(
    config: &ModelConfig,
    case: &Case,
    samples: &[Sample],
    one: &Rank,
    ranks: &[Rank],
) -> Result<LayoutResult> {
    let mut faults = vec![];
    let relative = |got: f64, want: f64| if got == want { 0.0 } else { ((got - want) / want).abs() };
    let (mut loss_rel, mut norm_rel, mut tokens_equal) = (0f64, 0f64, true);
    for (r, rank) in ranks.iter().enumerate() {
        for (i, (got, want)) in rank.steps.iter().zip(&one.steps).enumerate() {
            loss_rel = worse(loss_rel, relative(got.loss.mean(), want.loss.mean()));
            if i == 0 {
                // Later norms are those of weights that differ by a rounding already.
                norm_rel = worse(norm_rel, relative(got.grad_norm, want.grad_norm));
            }
            if (got.tokens, got.loss.count) != (want.tokens, want.loss.count) {
                tokens_equal = false;
                faults.push(format!(
                    "rank {r}, step {i}: {} tokens and {} targets, one rank has {} and {}",
                    got.tokens, got.loss.count, want.tokens, want.loss.count
                ));
            }
        }
    }
    let before = faults.len();
    let gradients = assemble("gradient", &one.gradients, ranks.iter().map(|r| &r.gradients), &mut faults);
    let weights = assemble("weights", &one.weights, ranks.iter().map(|r| &r.weights), &mut faults);
    let replicas_equal = faults.len() == before;
    let (grad_rel_max, grad_worst) = worst(&gradients, &one.gradients);
    let (weights_rel_max, weights_worst) = worst(&weights, &one.weights);
    let traffic: Vec<_> = ranks.iter().map(|r| r.traffic.as_slice()).collect();
    let moved = formula::check(config, case, samples, &traffic, &mut faults)?;
    let before = faults.len();
    formula::check_memory(config, case, samples, ranks, &mut faults)?;
    let memory_ok = faults.len() == before;
    let within = loss_rel <= LOSS_TOLERANCE
        && norm_rel <= LOSS_TOLERANCE
        && grad_rel_max <= TOLERANCE
        && weights_rel_max <= TOLERANCE;
    Ok(LayoutResult {
        layout: case.name.clone(),
        world: ranks.len(),
        loss_rel,
        norm_rel,
        grad_rel_max,
        grad_worst,
        weights_rel_max,
        weights_worst,
        tokens_equal,
        replicas_equal,
        collectives_ok: moved.collectives_ok,
        bytes_ok: moved.bytes_ok,
        memory_ok,
        bytes_a_step: moved.bytes / STEPS as u64,
        pass: within && tokens_equal && replicas_equal && moved.collectives_ok && moved.bytes_ok && memory_ok,
        faults,
    })
}

/// The larger; NaN is the largest.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// Whole tensors from the parts of all ranks. Parts that overlap must be equal to the bit, and together cover everything.
fn assemble<'a>(
    what: &str,
    shapes: &[Part],
    ranks: impl Iterator<Item = &'a Vec<Part>>,
    faults: &mut Vec<String>,
) -> BTreeMap<String, Vec<f32>> {
    let whole = |p: &Part| (p.name.clone(), vec![None; p.values.len()]);
    let mut all: BTreeMap<String, Vec<Option<(f32, usize)>>> = shapes.iter().map(whole).collect();
    let dims: BTreeMap<&str, Vec<usize>> =
        shapes.iter().map(|p| (p.name.as_str(), p.at.iter().map(|r| r.len()).collect())).collect();
    for (rank, parts) in ranks.enumerate() {
        for part in parts {
            let (Some(into), Some(shape)) = (all.get_mut(&part.name), dims.get(part.name.as_str())) else {
                faults.push(format!("rank {rank}: {} is no parameter of one rank", part.name));
                continue;
            };
            let mut differs = None;
            for (i, &value) in part.values.iter().enumerate() {
                let place = &mut into[position(i, &part.at, shape)];
                match *place {
                    None => *place = Some((value, rank)),
                    Some((other, from)) if other.to_bits() != value.to_bits() => differs = Some((from, other, value)),
                    Some(_) => {}
                }
            }
            if let Some((from, a, b)) = differs {
                faults.push(format!("{what} of {} differs between ranks {from} and {rank}: {a:e}, {b:e}", part.name));
            }
        }
    }
    let whole = |(name, values): (String, Vec<Option<(f32, usize)>>)| {
        if values.iter().any(Option::is_none) {
            faults.push(format!("{what} of {name}: some of it is on no rank"));
        }
        (name, values.into_iter().map(|v| v.map_or(f32::NAN, |v| v.0)).collect())
    };
    all.into_iter().map(whole).collect()
}

/// Where element `i` of a part lies in the whole tensor.
fn position(mut i: usize, at: &[std::ops::Range<usize>], shape: &[usize]) -> usize {
    let (mut out, mut stride) = (0, 1);
    for (range, dim) in at.iter().zip(shape).rev() {
        out += (range.start + i % range.len()) * stride;
        i /= range.len();
        stride *= dim;
    }
    out
}

fn worst(got: &BTreeMap<String, Vec<f32>>, want: &[Part]) -> (f64, String) {
    let mut worst = (0f64, String::new());
    for part in want {
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let difference =
            norm(&mut got[&part.name].iter().zip(&part.values).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let size = norm(&mut part.values.iter().map(|&x| f64::from(x)));
        let relative = if difference == 0.0 { 0.0 } else { difference / size };
        if relative.is_nan() || relative > worst.0 {
            worst = (relative, part.name.clone());
        }
        if relative.is_nan() {
            break;
        }
    }
    worst
}

#[cfg(test)]
mod tests {
    use phalanx_comm::MeshShape;
    use phalanx_parallel::ParallelPlan;
    use phalanx_parallel::fsdp::Reshard;

    use super::*;
    use crate::layouts::{data, run, tiny_models};

    /// A layout that is right, and what `compare` says after `tamper` has changed something.
    fn verdict(tamper: impl Fn(&mut Case, &mut Vec<Rank>)) -> LayoutResult {
        let (_, config) = tiny_models().unwrap().swap_remove(0);
        let samples = data::samples(config.vocab_size);
        let case =
            |mesh| Case { name: "x".into(), mesh, plan: ParallelPlan::default(), micro_batches: 2, recompute: false };
        let one = run::run(&config, &case(MeshShape::default()), &samples).unwrap();
        let mut two = case(MeshShape { dp_replicate: 2, dp_shard: 2, ..MeshShape::default() });
        let mut ranks = run::run(&config, &two, &samples).unwrap();
        tamper(&mut two, &mut ranks);
        compare(&config, &two, &samples, &one[0], &ranks).unwrap()
    }

    /// A verification that cannot fail is worth nothing.
    #[test]
    fn what_is_wrong_is_found() {
        assert!(verdict(|_, _| {}).pass);
        // One small parameter's gradient is a little off, on every rank that has it.
        let r = verdict(|_, ranks| {
            for rank in ranks {
                let part = rank.gradients.iter_mut().find(|p| p.name.ends_with("layers.4.input_layernorm.weight"));
                part.unwrap().values.iter_mut().for_each(|v| *v *= 1.0 + 3e-5);
            }
        });
        assert!(!r.pass && r.replicas_equal && r.grad_worst.contains("layers.4.input_layernorm"), "{r:?}");
        // One replica has other bits.
        let r = verdict(|_, ranks| {
            let value = &mut ranks[3].weights[0].values[0];
            *value = f32::from_bits(value.to_bits() ^ 1);
        });
        assert!(!r.pass && !r.replicas_equal && r.faults[0].contains("ranks 1 and 3"), "{r:?}");
        // A part is missing.
        let r = verdict(|_, ranks| ranks.iter_mut().for_each(|r| drop(r.gradients.remove(2))));
        assert!(!r.pass && r.faults[0].contains("on no rank"), "{r:?}");
        // A token is counted twice; a loss is off.
        assert!(!verdict(|_, ranks| ranks[1].steps[4].tokens += 1).pass);
        assert!(!verdict(|_, ranks| ranks[1].steps[4].loss.sum *= 1.0 + 1e-5).pass);
        // It gathers once where it should have done so twice.
        let r = verdict(|case, _| case.plan.reshard = Reshard::AfterBackward);
        assert!(!r.pass && !r.collectives_ok && !r.bytes_ok, "{r:?}");
        // A rank needs more memory than its share.
        let r = verdict(|_, ranks| ranks[0].bytes.moments += 4);
        assert!(!r.pass && !r.memory_ok, "{r:?}");
    }
}
