//! Many groups at once, asynchronous calls, traffic.

use phalanx_comm::{
    CommError, Communicator, ExchangeTensors, GatherTensors, Kind, Pending, ReduceOp, ScatterTensors, run_ranks,
};
use phalanx_tensor::{Category, DType, Runtime, Tensor};

fn tensor(rt: &Runtime, values: &[f32]) -> Tensor {
    rt.from_f32(&[values.len()], values, Category::Communication).unwrap()
}

#[test]
fn groups_of_every_pair_at_once() {
    let n = 6;
    run_ranks(n, |comm| {
        let rank = comm.rank();
        // Made in another order on every rank: making a group waits for nobody.
        let mut others: Vec<usize> = (0..n).filter(|&q| q != rank).collect();
        others.rotate_left(rank % 3);
        let mut pairs = vec![];
        for q in others {
            let members = [rank.min(q), rank.max(q)];
            pairs.push((q, comm.subgroup("pair", &members)?));
        }
        // Used in an order that cannot deadlock.
        pairs.sort_by_key(|(q, _)| (rank + q) % n * n + rank.min(*q));
        for (q, pair) in &pairs {
            let mut x = [rank as i32];
            pair.all_reduce(ReduceOp::Sum, &mut x)?;
            assert_eq!(x[0], (rank + q) as i32);
            assert_eq!(pair.members(), [rank.min(*q), rank.max(*q)]);
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn the_same_members_make_as_many_groups_as_they_ask_for() {
    run_ranks(3, |comm| {
        // The order of the list is the order of ranks.
        let reversed = comm.subgroup("reversed", &[2, 1, 0])?;
        assert_eq!(reversed.rank(), 2 - comm.rank());
        let mut from_two = [comm.rank() as u8];
        reversed.broadcast(0, &mut from_two)?;
        assert_eq!(from_two, [2]);

        let (a, b) = (comm.subgroup("g", &[0, 1, 2])?, comm.subgroup("g", &[0, 1, 2])?);
        let rt = Runtime::new(1);
        // a and b are two groups: their calls may be issued in different orders on different ranks.
        let issue = |g: &Communicator, v: f32| g.all_reduce_async(ReduceOp::Sum, tensor(&rt, &[v]));
        let (x, y) = if comm.rank() == 1 {
            let y = issue(&b, 10.0);
            (issue(&a, 1.0), y)
        } else {
            let x = issue(&a, 1.0);
            (x, issue(&b, 10.0))
        };
        assert_eq!((x.wait()?.f32().unwrap()[0], y.wait()?.f32().unwrap()[0]), (3.0, 30.0));

        // A group of a group.
        if comm.rank() > 0 {
            let upper = reversed.subgroup("upper", &[1, 0])?;
            assert_eq!(upper.members(), [1, 2]);
            let mut x = [comm.rank() as u32];
            upper.all_reduce(ReduceOp::Max, &mut x)?;
            assert_eq!(x, [2]);
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn asynchronous_calls_run_in_the_order_of_issue_and_give_their_tensors_back() {
    let n = 3;
    let counts = vec![2, 0, 3];
    run_ranks(n, |comm| {
        let (rank, rt) = (comm.rank(), Runtime::new(1));
        let own: Vec<f32> = (0..counts[rank]).map(|i| (10 * rank + i) as f32).collect();
        let shard = tensor(&rt, &own);
        let half = rt.cast(&shard, DType::Bf16, Category::Communication).unwrap();
        let full = |dtype| rt.empty(&[5], dtype, Category::Communication).unwrap();
        // f32 and bf16 in one call; the shards are shared with this function.
        let items = vec![
            GatherTensors { shard: shard.clone(), counts: counts.clone(), full: full(DType::F32) },
            GatherTensors { shard: half, counts: counts.clone(), full: full(DType::Bf16) },
        ];
        let gathered = comm.all_gather_async(items);
        let grads = tensor(&rt, &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let out = rt.empty(&[counts[rank]], DType::F32, Category::Communication).unwrap();
        let scattered = comm.reduce_scatter_async(
            ReduceOp::Sum,
            vec![ScatterTensors { full: grads, counts: counts.clone(), shard: out }],
        );
        let reduced = comm.all_reduce_async(ReduceOp::Max, tensor(&rt, &[rank as f32, -(rank as f32)]));
        let sent = comm.broadcast_async(1, tensor(&rt, &[rank as f32]));
        let exchanged = comm.all_to_all_async(ExchangeTensors {
            send: tensor(&rt, &[rank as f32; 3]),
            send_counts: vec![1; 3],
            recv: tensor(&rt, &[9.0; 3]),
            recv_counts: vec![1; 3],
        });
        // A call with slices comes after all of them.
        let mut last = [1i32];
        comm.all_reduce(ReduceOp::Sum, &mut last)?;
        assert_eq!(last, [3]);
        assert!(gathered.is_done() && exchanged.is_done());

        let gathered = gathered.wait()?;
        assert_eq!(gathered[0].full.f32().unwrap(), [0., 1., 20., 21., 22.]);
        assert_eq!(rt.to_vec(&gathered[1].full).unwrap(), [0., 1., 20., 21., 22.]);
        let all = [3.0, 6.0, 9.0, 12.0, 15.0];
        let mine = [&all[0..2], &[], &all[2..5]][rank];
        assert_eq!(scattered.wait()?[0].shard.f32().unwrap(), mine);
        assert_eq!(reduced.wait()?.f32().unwrap(), [2.0, 0.0]);
        assert_eq!(sent.wait()?.f32().unwrap(), [1.0]);
        assert_eq!(exchanged.wait()?.recv.f32().unwrap(), [0.0, 1.0, 2.0]);
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn calls_in_flight_on_several_groups_may_be_issued_in_any_order() {
    let n = 6;
    run_ranks(n, |comm| {
        let (rank, rt) = (comm.rank(), Runtime::new(1));
        let row = comm.subgroup("row", &[rank / 3 * 3, rank / 3 * 3 + 1, rank / 3 * 3 + 2])?;
        let column = comm.subgroup("column", &[rank % 3, rank % 3 + 3])?;
        let groups = [&comm, &row, &column];
        let mut pending: Vec<Vec<Pending<Tensor>>> = vec![vec![], vec![], vec![]];
        for round in 0..40 {
            for i in 0..3 {
                // Another order of groups on every rank and in every round.
                let g = (i + rank + round) % 3;
                let x = tensor(&rt, &vec![(rank * 100 + round) as f32; 1 + round * 50]);
                pending[g].push(groups[g].all_reduce_async(ReduceOp::Sum, x));
            }
        }
        for (g, pending) in pending.into_iter().enumerate() {
            let sum: usize = groups[g].members().iter().sum();
            for (round, pending) in pending.into_iter().enumerate() {
                let expected = (sum * 100 + groups[g].size() * round) as f32;
                assert!(pending.wait()?.f32().unwrap().iter().all(|&v| v == expected), "group {g}, round {round}");
            }
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn messages_in_flight_in_every_direction() {
    let n = 5;
    run_ranks(n, |comm| {
        let (rank, rt) = (comm.rank(), Runtime::new(1));
        // Everybody sends three tensors to everybody, itself too, before anybody receives; receives are posted in another
        // order of ranks on every rank.
        let mut sends = vec![];
        for to in 0..n {
            for k in 0..3 {
                sends.push(comm.send_async(to, tensor(&rt, &vec![(rank * 10 + k) as f32; k * 1000])));
            }
        }
        let mut receives = vec![];
        for step in 0..n {
            let from = (rank * 2 + step) % n;
            for k in 0..3 {
                receives.push((from, k, comm.recv_async(from, tensor(&rt, &vec![0.0; k * 1000]))));
            }
        }
        for (from, k, receive) in receives.into_iter().rev() {
            assert!(receive.wait()?.f32().unwrap().iter().all(|&v| v == (from * 10 + k) as f32));
        }
        for send in sends {
            send.wait()?;
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn a_call_whose_handle_is_dropped_goes_on() {
    run_ranks(3, |comm| {
        let rt = Runtime::new(1);
        drop(comm.all_reduce_async(ReduceOp::Sum, tensor(&rt, &[1.0])));
        drop(comm.send_async((comm.rank() + 1) % 3, tensor(&rt, &[comm.rank() as f32])));
        let mut x = [0f32];
        comm.recv((comm.rank() + 2) % 3, &mut x)?;
        assert_eq!(x[0] as usize, (comm.rank() + 2) % 3);
        comm.barrier()
    })
    .unwrap();
}

#[test]
fn traffic_adds_up_to_the_usual_figures() {
    for n in [2, 3, 5] {
        let per_rank = run_ranks(n, |comm| {
            let (rank, len) = (comm.rank(), 30 * n);
            comm.all_gather(&[1f32; 30], &mut vec![0f32; len])?;
            let t = comm.traffic().of(Kind::AllGather);
            assert_eq!((t.calls, t.bytes_sent), (1, (4 * len * (n - 1) / n) as u64));

            comm.reduce_scatter(ReduceOp::Sum, &vec![1f32; len], &mut [0f32; 30])?;
            assert_eq!(comm.traffic().of(Kind::ReduceScatter).bytes_sent, (4 * len * (n - 1) / n) as u64);

            comm.all_to_all(&vec![1u8; len], &mut vec![0u8; len])?;
            assert_eq!(comm.traffic().of(Kind::AllToAll).bytes_sent, (len - 30) as u64);

            comm.broadcast(1, &mut [0u64; 4])?;
            assert_eq!(comm.traffic().of(Kind::Broadcast).bytes_sent, if rank == 1 { 32 * (n as u64 - 1) } else { 0 });

            let mut ring = [0u8; 7];
            comm.send_recv((rank + 1) % n, &[1; 7], (rank + n - 1) % n, &mut ring)?;
            assert_eq!((comm.traffic().of(Kind::Send).bytes_sent, comm.traffic().of(Kind::Receive).bytes_sent), (7, 0));

            comm.all_reduce(ReduceOp::Sum, &mut vec![1f32; 1001])?;
            comm.barrier()?;
            let before = comm.reset_traffic();
            assert_eq!(before.kinds().count(), 8);
            assert_eq!(comm.traffic().total().calls, 0);
            Ok::<_, CommError>(before.of(Kind::AllReduce).bytes_sent)
        })
        .unwrap();
        // 2 (P − 1)/P · N a rank.
        assert_eq!(per_rank.iter().sum::<u64>(), 2 * (n as u64 - 1) * 4004);
    }
}

#[test]
fn the_late_rank_waits_least() {
    let waits = run_ranks(3, |comm| {
        comm.barrier()?;
        comm.reset_traffic();
        if comm.rank() == 1 {
            std::thread::sleep(std::time::Duration::from_millis(60));
        }
        comm.barrier()?;
        Ok::<_, CommError>(comm.traffic().of(Kind::Barrier).waiting)
    })
    .unwrap();
    assert!(waits[1] < waits[0] && waits[1] < waits[2], "{waits:?}");
}

#[test]
fn a_group_of_one_moves_nothing() {
    let comm = Communicator::solo();
    let rt = Runtime::new(1);
    let mut x = [1.5f32, 2.0];
    comm.all_reduce(ReduceOp::Sum, &mut x).unwrap();
    comm.broadcast(0, &mut x).unwrap();
    comm.barrier().unwrap();
    let mut y = [0f32; 2];
    comm.all_gather(&x, &mut y).unwrap();
    assert_eq!(y, x);
    comm.send_recv(0, &[7f32], 0, &mut y[..1]).unwrap();
    assert_eq!(y, [7.0, 2.0]);
    let reduced = comm.all_reduce_async(ReduceOp::Sum, tensor(&rt, &[4.0]));
    assert!(reduced.is_done());
    assert_eq!(reduced.wait().unwrap().f32().unwrap(), [4.0]);
    assert_eq!(comm.traffic().total().bytes_sent, 0);
    assert_eq!(comm.traffic().kinds().count(), 0);
}
