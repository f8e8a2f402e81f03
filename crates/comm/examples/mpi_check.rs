//! Checks the MPI back end; `tests/mpi.sh` runs it under `mpirun`.
//!
//! `mpi_check` compares every collective with the same calls between threads of one process, bit by bit. `mpi_check FAULT` lets a rank
//! go wrong (mismatch, missing, error, panic, message) and prints what each rank is told.

use std::time::Duration;

use phalanx_comm::*;
use phalanx_tensor::{Category, DType, Runtime, bf16};

type Bits = Vec<Vec<u8>>;

fn value(rank: usize, i: usize) -> f32 {
    let x = (rank as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (i as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    ((x >> 16) % 20_011) as f32 / 7.0 - 1000.0
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i)).collect()
}

fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|v| v.to_bits().to_le_bytes()).collect()
}

/// Every kind of call; what this rank got from each.
fn everything(comm: &Communicator) -> Result<Bits> {
    let (rank, n) = (comm.rank(), comm.size());
    let rt = Runtime::new(1);
    let mut got = vec![];
    for len in [0usize, 1, 7, 1000, 300_007, 3_000_000] {
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            let mut x = values(rank, len);
            comm.all_reduce(op, &mut x)?;
            got.push(bytes(&x));
        }
        // Uneven, the first empty.
        let counts: Vec<usize> = (0..n).map(|r| r * len / n).collect();
        let total: usize = counts.iter().sum();
        let mut full = vec![0f32; total];
        comm.all_gather_v(&values(rank, counts[rank]), &counts, &mut full)?;
        got.push(bytes(&full));

        let mut shard = vec![0f32; counts[rank]];
        comm.reduce_scatter_v(ReduceOp::Sum, &values(rank, total), &counts, &mut shard)?;
        got.push(bytes(&shard));

        let half: Vec<bf16> = values(rank, total).into_iter().map(bf16::from_f32).collect();
        let mut shard = vec![bf16::ZERO; counts[rank]];
        comm.reduce_scatter_v(ReduceOp::Sum, &half, &counts, &mut shard)?;
        got.push(shard.iter().flat_map(|v| v.to_bits().to_le_bytes()).collect());

        let sends: Vec<usize> = (0..n).map(|q| counts[(rank + q) % n]).collect();
        let mut recv = vec![0f32; total];
        comm.all_to_all_v(&values(rank, total), &sends, &mut recv, &sends)?;
        got.push(bytes(&recv));

        for root in 0..n {
            let mut x = values(rank, len);
            comm.broadcast(root, &mut x)?;
            got.push(bytes(&x));
        }
        let mut x = vec![0f32; len];
        comm.send_recv((rank + 1) % n, &values(rank, len), (rank + n - 1) % n, &mut x)?;
        got.push(bytes(&x));
        if rank == 0 && n > 1 {
            comm.send(n - 1, &values(0, len))?;
        } else if rank == n - 1 && n > 1 {
            comm.recv(0, &mut x)?;
            got.push(bytes(&x));
        }
        let many = [&counts[..], &vec![len / n; n]];
        let shards = [values(rank, counts[rank]), values(rank + 100, len / n)];
        let mut fulls = [vec![0f32; total], vec![0f32; len / n * n]];
        let mut items: Vec<_> = fulls
            .iter_mut()
            .zip(&shards)
            .zip(many)
            .map(|((full, shard), counts)| Gather { shard, counts, full })
            .collect();
        comm.all_gather_many(&mut items)?;
        got.extend(fulls.iter().map(|f| bytes(f)));

        // In flight at once: messages in every direction, and collectives on two groups in different orders.
        let tensor = |v: &[f32]| rt.from_f32(&[v.len()], v, Category::Communication).unwrap();
        let empty = || rt.empty(&[len], DType::F32, Category::Communication).unwrap();
        let sends: Vec<_> = (0..n).map(|to| comm.send_async(to, tensor(&values(rank + to, len)))).collect();
        let receives: Vec<_> = (0..n).map(|i| comm.recv_async((rank + i) % n, empty())).collect();
        let other = comm.subgroup("other", &(0..n).collect::<Vec<_>>())?;
        let reduce = |c: &Communicator| c.all_reduce_async(ReduceOp::Sum, tensor(&values(rank, len)));
        let (a, b) = if rank % 2 == 0 {
            let a = reduce(comm);
            (a, reduce(&other))
        } else {
            let b = reduce(&other);
            (reduce(comm), b)
        };
        for pending in receives.into_iter().rev().chain(sends).chain([a, b]) {
            got.push(bytes(pending.wait()?.f32().unwrap()));
        }
    }
    // Groups of a mesh.
    if n.is_multiple_of(2) {
        let mesh = Mesh::new(comm, MeshShape { dp_shard: n / 2, tp: 2, ep: n, ..MeshShape::default() })?;
        let mut x = values(rank, 99);
        mesh.group::<Tp>().all_reduce(ReduceOp::Sum, &mut x)?;
        mesh.group::<Fsdp>().all_reduce(ReduceOp::Max, &mut x)?;
        mesh.group::<Ep>().all_reduce(ReduceOp::Sum, &mut x)?;
        got.push(bytes(&x));
    }
    comm.barrier()?;
    Ok(got)
}

fn fault(comm: &Communicator, which: &str) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    comm.barrier()?;
    match (which, rank) {
        ("mismatch", 0) => comm.all_gather(&[1f32; 2], &mut vec![0f32; 2 * n]),
        ("mismatch", _) => comm.all_reduce(ReduceOp::Sum, &mut [1f32; 2]),
        ("message", 0) => {
            comm.send(1, &[1f32; 3])?;
            comm.barrier()
        }
        ("message", 1) => comm.recv(0, &mut [1f32; 4]),
        ("missing", 1) => {
            // Late, but there before the others have left.
            std::thread::sleep(Duration::from_millis(900));
            comm.barrier()
        }
        ("error", 1) => Err(comm.abort("no space left on the disk")),
        ("panic", 1) => panic!("index out of range"),
        _ => comm.barrier(),
    }
}

fn main() -> std::process::ExitCode {
    let which = std::env::args().nth(1);
    let timeout =
        if which.as_deref() == Some("missing") { Duration::from_millis(500) } else { Duration::from_secs(60) };
    let outcome = run_mpi(&CommOptions::with_timeout(timeout), |comm| {
        if let Some(which) = &which {
            return fault(&comm, which);
        }
        let here = everything(&comm)?;
        let threads = run_ranks(comm.size(), |comm| everything(&comm)).map_err(|e| comm.abort(e.to_string()))?;
        if here != threads[comm.rank()] {
            let place = here.iter().zip(&threads[comm.rank()]).position(|(a, b)| a != b);
            return Err(comm.abort(format!("result {place:?} differs from that between threads")));
        }
        println!("rank {} of {}: {} results as between threads, bit by bit", comm.rank(), comm.size(), here.len());
        rate(&comm)
    });
    match outcome {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            // In one piece, since all ranks write to one terminal.
            let line = format!("told: {}\n", e.to_string().replace('\n', " | "));
            std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
            std::process::ExitCode::FAILURE
        }
    }
}

/// Prints how long some calls take.
fn rate(comm: &Communicator) -> Result<()> {
    for len in [1usize << 10, 4 << 20] {
        let mut x = vec![1f32; len];
        let calls = if len > 1 << 20 { 5 } else { 500 };
        comm.all_reduce(ReduceOp::Max, &mut x)?;
        let begin = std::time::Instant::now();
        for _ in 0..calls {
            comm.all_reduce(ReduceOp::Max, &mut x)?;
        }
        let us = begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls);
        if comm.rank() == 0 {
            println!(
                "{{\"bench\":\"comm_mpi\",\"op\":\"all_reduce\",\"ranks\":{},\"kib\":{},\"us_per_call\":{us:.1}}}",
                comm.size(),
                len >> 8
            );
        }
    }
    Ok(())
}
