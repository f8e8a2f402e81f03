//! Ranks that diverge, fail or vanish: every rank ends, with an error that names the ranks, the calls and their lines.

use std::time::Duration;

use phalanx_comm::{CommError, CommOptions, Communicator, ReduceOp, RunError, local_world, run_ranks, run_ranks_with};
use phalanx_tensor::{Category, Runtime};

const BRIEF: Duration = Duration::from_millis(300);

/// What the call of each rank of a world ended with, the world being such that every rank's does end.
fn outcomes(n: usize, f: impl Fn(&Communicator) -> Result<(), CommError> + Sync) -> Vec<Result<(), CommError>> {
    let options = CommOptions::with_timeout(BRIEF);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = local_world(n, &options)
            .into_iter()
            .map(|comm| {
                let f = &f;
                scope.spawn(move || {
                    let first = f(&comm);
                    if let Err(first) = &first {
                        // The world stays failed, and says why.
                        let later = comm.barrier().unwrap_err();
                        assert_eq!(later.root_cause().to_string(), first.root_cause().to_string());
                        let group = comm.subgroup("late", &[comm.rank()]).unwrap();
                        assert!(group.all_reduce(ReduceOp::Sum, &mut [1f32]).is_err());
                    }
                    // Leaves only after all have seen it, so that leaving is not what ends them.
                    (first, comm)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap().0).collect()
    })
}

/// The lines of this file on which the two calls stand.
fn has_lines(text: &str, lines: [u32; 2]) -> bool {
    lines.iter().all(|line| text.contains(&format!("{}:{line}:", file!())))
}

/// Checks that every rank got the same mismatch, which names ranks 0 and `other` and says `needles`.
fn expect_mismatch(outcomes: Vec<Result<(), CommError>>, other: usize, lines: [u32; 2], needles: &[&str]) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        assert!(matches!(error, CommError::Mismatch { .. }), "rank {rank}: {error}");
        let text = error.to_string();
        assert!(text.contains("rank 0: ") && text.contains(&format!("rank {other}: ")), "{text}");
        assert!(has_lines(&text, lines), "lines {lines:?}: {text}");
        for needle in needles {
            assert!(text.contains(needle), "`{needle}` is not in: {text}");
        }
    }
}

#[test]
fn different_collectives() {
    let (a, b) = (line!() + 2, line!() + 3);
    let outcomes = outcomes(3, |comm| match comm.rank() {
        0 | 1 => comm.all_reduce(ReduceOp::Sum, &mut [1f32; 4]),
        _ => comm.all_gather(&[1f32; 4], &mut [0f32; 12]),
    });
    expect_mismatch(
        outcomes,
        2,
        [a, b],
        &["different collectives", "all_reduce sum of 4 f32", "all_gather of [4, 4, 4] f32"],
    );
}

#[test]
fn different_lengths() {
    let line = line!() + 1;
    let outcomes = outcomes(3, |comm| comm.all_reduce(ReduceOp::Sum, &mut vec![1f32; 4 + comm.rank() / 2]));
    expect_mismatch(outcomes, 2, [line; 2], &["different numbers of elements", "of 4 f32", "of 5 f32"]);
}

#[test]
fn different_element_types() {
    let (a, b) = (line!() + 2, line!() + 3);
    let outcomes = outcomes(2, |comm| match comm.rank() {
        0 => comm.all_gather(&[1f32; 2], &mut [0f32; 4]),
        _ => comm.all_gather(&[1u32; 2], &mut [0u32; 4]),
    });
    expect_mismatch(outcomes, 1, [a, b], &["different element types", "f32", "u32"]);
}

#[test]
fn different_roots_and_reductions() {
    let line = line!() + 1;
    let outcomes_of_roots = outcomes(3, |comm| comm.broadcast(comm.rank() % 2, &mut [0u8; 3]));
    expect_mismatch(outcomes_of_roots, 1, [line; 2], &["different roots", "from root 0", "from root 1"]);
    let line = line!() + 2;
    let ops = [ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max];
    let outcomes = outcomes(3, |comm| comm.all_reduce(ops[comm.rank()], &mut [0f64]));
    expect_mismatch(outcomes, 2, [line; 2], &["different reductions", "all_reduce sum", "all_reduce max"]);
}

#[test]
fn sends_that_nobody_expects() {
    let outcomes = outcomes(3, |comm| {
        // Rank 2 expects one element more from rank 1 than that sends.
        let receives = if comm.rank() == 2 { [1, 2, 1] } else { [1, 1, 1] };
        comm.all_to_all_v(&[0f32; 3], &[1; 3], &mut vec![0f32; receives.iter().sum()], &receives)
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(
            text.contains("rank 1: all_to_all sending [1, 1, 1]") && text.contains("receiving [1, 2, 1]"),
            "{text}"
        );
    }
}

#[test]
fn a_message_of_another_size() {
    let (a, b) = (line!() + 2, line!() + 3);
    let outcomes = outcomes(2, |comm| match comm.rank() {
        0 => comm.send(1, &[1f32; 3]),
        _ => comm.recv(0, &mut [0f32; 4]),
    });
    expect_mismatch(outcomes, 1, [a, b], &["send of 3 f32 to 1", "recv of 4 f32 from 0"]);
}

#[test]
fn a_missing_rank() {
    let (a, b) = (line!() + 2, line!() + 5);
    let outcomes = outcomes(3, |comm| {
        comm.barrier()?;
        match comm.rank() {
            1 => std::thread::sleep(BRIEF * 4),
            _ => comm.all_reduce(ReduceOp::Sum, &mut [1f32])?,
        }
        Ok(())
    });
    for rank in [0, 2] {
        let error = outcomes[rank].as_ref().unwrap_err();
        let text = error.to_string();
        assert!(matches!(error.root_cause(), CommError::Timeout { .. }), "{text}");
        assert!(text.contains("for rank 1 (it is in no call; its last was group `world`, barrier"), "{text}");
        assert!(has_lines(&text, [a, b]), "{text}");
    }
}

#[test]
fn ranks_that_wait_for_each_other_in_two_groups() {
    let (a, b) = (line!() + 4, line!() + 5);
    let outcomes = outcomes(2, |comm| {
        let (x, y) = (comm.subgroup("x", &[0, 1])?, comm.subgroup("y", &[0, 1])?);
        match comm.rank() {
            0 => x.barrier()?,
            _ => y.barrier()?,
        }
        Ok(())
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("group `x`, barrier") && text.contains("group `y`, barrier"), "{text}");
        assert!(has_lines(&text, [a, b]), "{text}");
    }
}

#[test]
fn a_message_that_nobody_sends() {
    let outcomes = outcomes(2, |comm| match comm.rank() {
        0 => comm.recv(1, &mut [0f32; 4]),
        _ => comm.recv(0, &mut [0f32; 4]),
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("recv of 4 f32 from 1") && text.contains("recv of 4 f32 from 0"), "{text}");
    }
    let rt = || Runtime::new(1);
    let outcomes = self::outcomes(2, |comm| {
        let x = rt().zeros(&[3], Category::Communication).unwrap();
        comm.recv_async(1 - comm.rank(), x).wait().map(drop)
    });
    assert!(outcomes.iter().all(|o| o.is_err()));
}

#[test]
fn wrong_arguments_reach_the_ranks_that_wait() {
    let outcomes = outcomes(3, |comm| {
        let len = if comm.rank() == 1 { 7 } else { 6 };
        comm.all_gather(&[1f32; 2], &mut vec![0f32; len])
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 1, group `world`, all_gather of [2, 2, 2] f32"), "{text}");
        assert!(text.contains("the full buffer of item 0 has 7 elements, the counts add up to 6"), "{text}");
    }
    for (members, what) in [
        (&[][..], "there are no members"),
        (&[0, 3], "a member is not in the parent group"),
        (&[0, 0], "a rank is named twice"),
        (&[1], "this rank is not a member"),
    ] {
        let comm = local_world(2, &CommOptions::default()).swap_remove(0);
        let text = comm.subgroup("g", members).unwrap_err().to_string();
        assert!(text.contains(what), "{text}");
    }
    let comm = Communicator::solo();
    assert!(comm.broadcast(1, &mut [0u8]).unwrap_err().to_string().contains("there is no rank 1 in a group of 1"));
    let comm = Communicator::solo();
    assert!(comm.send(0, &[0u8]).unwrap_err().to_string().contains("use send_recv"));
}

#[test]
fn a_rank_that_returns_an_error() {
    // With the default time-out of ten minutes: the others end at once.
    for n in [2, 3, 8] {
        let ended = std::sync::Mutex::new(vec![]);
        let error = run_ranks(n, |comm| {
            let group = comm.subgroup("all", &(0..n).collect::<Vec<_>>()).map_err(|e| e.to_string())?;
            let rt = Runtime::new(1);
            let pending = comm.all_reduce_async(ReduceOp::Sum, rt.zeros(&[4], Category::Communication).unwrap());
            if comm.rank() == n - 1 {
                return Err("the loss is NaN".to_owned());
            }
            let outcome = match comm.rank() {
                0 => group.barrier(),
                _ => group.all_reduce(ReduceOp::Sum, &mut [1f32]),
            };
            let text = outcome.and_then(|()| pending.wait().map(drop)).unwrap_err().to_string();
            assert!(text.contains(&format!("rank {} failed: the loss is NaN", n - 1)), "{text}");
            ended.lock().unwrap().push(comm.rank());
            Err(text)
        });
        let error = error.map(|_: Vec<()>| ()).unwrap_err();
        assert!(matches!(error, RunError::Failed { .. }));
        assert_eq!(error.to_string(), format!("rank {} failed: the loss is NaN", n - 1));
        assert_eq!(ended.lock().unwrap().len(), n - 1);
    }
}

#[test]
fn a_rank_that_panics() {
    let error = run_ranks(3, |comm| {
        if comm.rank() == 1 {
            panic!("index out of range");
        }
        let mut x = [0f32];
        let error = comm.recv(1, &mut x).unwrap_err();
        assert!(error.to_string().contains("rank 1 panicked"), "{error}");
        assert_eq!(error.culprit(), Some(1));
        Err::<(), _>(error)
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "rank 1 panicked: index out of range");
}

#[test]
fn a_communicator_dropped_while_unwinding() {
    let mut world = local_world(2, &CommOptions::default());
    let (one, zero) = (world.pop().unwrap(), world.pop().unwrap());
    let other = std::thread::spawn(move || {
        let _one = one;
        panic!("gone");
    });
    let error = zero.all_reduce(ReduceOp::Sum, &mut [1f32]).unwrap_err();
    assert!(error.to_string().contains("rank 1 panicked"), "{error}");
    assert!(other.join().is_err());
}

#[test]
fn a_rank_that_ends_too_soon() {
    let line = line!() + 4;
    let error = run_ranks(3, |comm| {
        comm.barrier()?;
        if comm.rank() != 2 {
            comm.all_reduce(ReduceOp::Sum, &mut [1f32])?;
        }
        Ok::<_, CommError>(())
    })
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("rank 2 has left group `world`") && text.contains("all_reduce sum of 1 f32"), "{text}");
    assert!(has_lines(&text, [line; 2]), "{text}");
    // The same in a group that the rank has never made.
    let error = run_ranks(2, |comm| {
        if comm.rank() == 0 {
            comm.subgroup("pair", &[0, 1])?.barrier()?;
        }
        Ok::<_, CommError>(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("rank 1 has left group `pair`"), "{error}");
}

/// A rank that fails drops its groups before anybody can know of its error: what is reported is still the error.
#[test]
fn the_error_comes_before_the_groups_that_it_takes_along() {
    for _ in 0..50 {
        let error = run_ranks(3, |comm| {
            let groups: Vec<Communicator> =
                (0..20).map(|_| comm.subgroup("g", &[0, 1, 2])).collect::<Result<_, _>>()?;
            if comm.rank() == 1 {
                return Err(CommError::RankFailed { rank: 1, message: "of its own".into() });
            }
            groups[19].barrier()
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "rank 1 failed: rank 1 failed: of its own");
    }
}

#[test]
fn a_group_dropped_too_soon() {
    let outcomes = outcomes(2, |comm| {
        let pair = comm.subgroup("pair", &[0, 1])?;
        if comm.rank() == 1 {
            drop(pair);
            std::thread::sleep(BRIEF * 2);
            return Ok(());
        }
        pair.barrier()
    });
    let text = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("which has dropped its handle of group `pair`"), "{text}");
}

#[test]
fn an_abort_ends_calls_in_every_group() {
    let outcomes = outcomes(4, |comm| {
        let half = comm.subgroup("half", &[comm.rank() / 2 * 2, comm.rank() / 2 * 2 + 1])?;
        match comm.rank() {
            3 => Err(comm.abort("no space left on the disk")),
            rank => half.recv((rank + 1) % 2, &mut [0f32]),
        }
    });
    for outcome in outcomes {
        assert!(outcome.unwrap_err().to_string().contains("rank 3 failed: no space left on the disk"));
    }
}

/// Ranks fail at any moment, many times over: nobody hangs, nobody reads what is gone.
#[test]
fn failures_at_any_moment() {
    for seed in 0..60u64 {
        let options = CommOptions::with_timeout(Duration::from_secs(20));
        let outcome = run_ranks_with(&options, 4, |comm| {
            let rt = Runtime::new(1);
            let mut pending = vec![];
            for i in 0..20u64 {
                if seed % 20 == i && seed as usize % 4 == comm.rank() {
                    match seed % 3 {
                        0 => panic!("at step {i}"),
                        1 => return Err("an error of its own".to_owned()),
                        _ => return Ok(()),
                    }
                }
                let next = (comm.rank() + 1) % 4;
                let mut x = vec![comm.rank() as f32; 5000];
                comm.all_reduce(ReduceOp::Sum, &mut x).map_err(|e| e.to_string())?;
                pending.push(comm.all_reduce_async(ReduceOp::Max, rt.zeros(&[3000], Category::Communication).unwrap()));
                let mut y = vec![0f32; 5000];
                comm.send_recv(next, &x, (comm.rank() + 3) % 4, &mut y).map_err(|e| e.to_string())?;
                assert_eq!(y[4999], 6.0);
            }
            pending.into_iter().try_for_each(|p| p.wait().map(drop)).map_err(|e| e.to_string())
        });
        let error = outcome.unwrap_err();
        match seed % 3 {
            0 => assert!(matches!(error, RunError::Panicked { rank, .. } if rank == seed as usize % 4), "{error}"),
            1 => assert_eq!(error.to_string(), format!("rank {} failed: an error of its own", seed % 4)),
            _ => assert!(error.to_string().contains(&format!("rank {} has left", seed % 4)), "{error}"),
        }
    }
}
