//! A rank that is slow on purpose is named, with the right reason.

use std::time::{Duration, Instant};

use phalanx_comm::{Mesh, MeshShape, run_ranks};
use phalanx_data::Batch as TokenBatch;
use phalanx_models::{Model, initialise};
use phalanx_nn::{Batch, Env};
use phalanx_parallel::{Distributed, ParallelPlan};
use phalanx_report::stragglers::{Cause, RankStep, stragglers};
use phalanx_tensor::Runtime;
use phalanx_train::layouts::tiny_models;
use phalanx_train::step_clock::StepClock;
use phalanx_train::window::{MicroBatch, env_on, gradients};

/// Long beside the steps of a tiny model, also on a busy machine.
const LONG: Duration = Duration::from_millis(150);

/// Eight steps on four ranks; rank 2 does `reading` while it reads data and `computing` while it computes, and has `tokens`.
fn run(reading: Duration, computing: Duration, tokens: usize) -> Vec<RankStep> {
    let config = tiny_models().unwrap().swap_remove(0).1;
    let mesh = MeshShape { dp_shard: 4, ..MeshShape::default() };
    let ranks = run_ranks(4, |comm| -> phalanx_train::Result<Vec<RankStep>> {
        let (rt, slow) = (Runtime::new(1), comm.rank() == 2);
        let model = Model::new(&config)?;
        let d = Distributed::new(&model, Mesh::new(&comm, mesh)?, ParallelPlan::default())?;
        initialise(&rt, &model, 1)?;
        let env = env_on(&Env::new(rt.clone(), Batch::causal(&[])), &d);
        let ids = vec![7u32; if slow { tokens } else { 8 }];
        let trained = vec![true; ids.len()];
        let batch = TokenBatch::from_documents([(0, ids.as_slice(), trained.as_slice())]);
        let mut steps = vec![];
        for step in 1..=8 {
            let (mut clock, began) = (StepClock::start(&d), Instant::now());
            if slow {
                std::thread::sleep(reading);
            }
            clock.data(began.elapsed(), batch.ids.len() as u64);
            if slow {
                std::thread::sleep(computing);
            }
            gradients(&model, &env, &[MicroBatch { tokens: batch.clone(), moment: step }], Some(&d))?;
            steps.extend(clock.finish(step, &d)?);
        }
        Ok(steps)
    });
    ranks.unwrap().swap_remove(0)
}

fn named(steps: &[RankStep]) -> Vec<(usize, Cause)> {
    let slow_links = |c: &Cause| matches!(c, Cause::SlowLink(_));
    stragglers(steps).into_iter().filter(|s| !slow_links(&s.cause)).map(|s| (s.rank, s.cause)).collect()
}

#[test]
fn a_slow_rank_is_named_with_its_reason() {
    assert_eq!(named(&run(Duration::ZERO, LONG, 8)), [(2, Cause::SlowRank)]);
    assert_eq!(named(&run(LONG, Duration::ZERO, 8)), [(2, Cause::Data)]);
    assert_eq!(named(&run(Duration::ZERO, LONG, 12)), [(2, Cause::Load)]);
}

#[test]
fn the_others_wait_for_it() {
    let steps = run(Duration::ZERO, LONG, 8);
    let waited = |rank: usize| -> f64 {
        steps
            .iter()
            .filter(|s| s.rank == rank && s.step > 1)
            .map(|s| s.groups.values().map(|g| g[0]).sum::<f64>())
            .sum()
    };
    for rank in [0, 1, 3] {
        assert!(waited(rank) > 2.0 * waited(2), "rank {rank}: {} s, the slow one: {} s", waited(rank), waited(2));
    }
}
