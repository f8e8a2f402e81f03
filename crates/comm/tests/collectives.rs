//! Every collective against a plain model on one thread: any world size, lengths, counts, element type.

use phalanx_comm::{CommError, Communicator, Element, Gather, Reduce, ReduceOp, Scatter, run_ranks};
use phalanx_tensor::bf16;
use proptest::prelude::*;

const SIZES: [usize; 6] = [1, 2, 3, 5, 6, 8];

/// The value of an element of a rank's buffer: any, but the same for the model and the run.
trait Value: Element + Default + PartialEq {
    fn value(rank: usize, i: usize) -> Self;
    fn bits(self) -> u64;
}

fn mix(rank: usize, i: usize) -> u64 {
    let x = (rank as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (i as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 16
}

macro_rules! values {
    ($($ty:ty: $x:ident => $value:expr, $v:ident => $bits:expr;)*) => {$(
        impl Value for $ty {
            fn value(rank: usize, i: usize) -> $ty {
                let $x = mix(rank, i);
                $value
            }
            fn bits(self) -> u64 {
                let $v = self;
                $bits
            }
        }
    )*};
}
values! {
    f32: x => ((x % 2001) as f32 - 1000.0) * 10f32.powi((x >> 20) as i32 % 7 - 3), v => v.to_bits().into();
    f64: x => ((x % 2001) as f64 - 1000.0) * 10f64.powi((x >> 20) as i32 % 13 - 6), v => v.to_bits();
    bf16: x => bf16::from_f32(((x % 2001) as f32 - 1000.0) / 7.0), v => v.to_bits().into();
    u8: x => x as u8, v => v.into();
    i32: x => x as i32, v => v as u32 as u64;
    u32: x => x as u32, v => v.into();
    u64: x => x.wrapping_mul(0x1_0001_0001), v => v;
}

fn filled<T: Value>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| T::value(rank, i)).collect()
}

fn bits<T: Value>(x: &[T]) -> Vec<u64> {
    x.iter().map(|v| v.bits()).collect()
}

/// The model of a reduction: an element of each rank, in order, to one.
trait Fold: Value + Reduce {
    fn fold(op: ReduceOp, ranks: &[Self]) -> Self;
}

macro_rules! folds {
    ($($ty:ty, $acc:ty, $to:expr, $from:expr, $sum:expr;)*) => {$(
        impl Fold for $ty {
            fn fold(op: ReduceOp, ranks: &[$ty]) -> $ty {
                let wide = ranks.iter().map(|&x| -> $acc { $to(x) });
                let pick = |a: $acc, b: $acc| match op {
                    ReduceOp::Sum => $sum(a, b),
                    ReduceOp::Max => if a > b { a } else { b },
                    ReduceOp::Min => if a < b { a } else { b },
                };
                $from(wide.reduce(pick).unwrap())
            }
        }
    )*};
}
folds! {
    f32, f32, |x| x, |x| x, |a, b| a + b;
    f64, f64, |x| x, |x| x, |a, b| a + b;
    bf16, f32, bf16::to_f32, bf16::from_f32, |a, b| a + b;
    i32, i32, |x| x, |x| x, i32::wrapping_add;
    u32, u32, |x| x, |x| x, u32::wrapping_add;
    u64, u64, |x| x, |x| x, u64::wrapping_add;
}

fn folded<T: Fold>(op: ReduceOp, n: usize, len: usize) -> Vec<u64> {
    let element = |i| T::fold(op, &(0..n).map(|r| T::value(r, i)).collect::<Vec<T>>()).bits();
    (0..len).map(element).collect()
}

fn concatenated<T: Value>(counts: &[usize]) -> Vec<u64> {
    counts.iter().enumerate().flat_map(|(r, &c)| bits(&filled::<T>(r, c))).collect()
}

fn part<'a>(all: &'a [u64], counts: &[usize], rank: usize) -> &'a [u64] {
    let start: usize = counts[..rank].iter().sum();
    &all[start..start + counts[rank]]
}

fn moves<T: Value>(comm: &Communicator, counts: &[usize], root: usize) -> Result<(), CommError> {
    let (rank, n) = (comm.rank(), comm.size());
    let total: usize = counts.iter().sum();

    let mut full = vec![T::default(); total];
    comm.all_gather_v(&filled::<T>(rank, counts[rank]), counts, &mut full)?;
    assert_eq!(bits(&full), concatenated::<T>(counts));

    let mut full = vec![T::default(); n * counts[0]];
    comm.all_gather(&filled::<T>(rank, counts[0]), &mut full)?;
    assert_eq!(bits(&full), concatenated::<T>(&vec![counts[0]; n]));

    let mut data = filled::<T>(rank, total);
    comm.broadcast(root, &mut data)?;
    assert_eq!(bits(&data), bits(&filled::<T>(root, total)));

    // Rank a sends rank b counts[(a + 2 b) % n] elements.
    let amount = |a: usize, b: usize| counts[(a + 2 * b) % n];
    let sends: Vec<usize> = (0..n).map(|q| amount(rank, q)).collect();
    let receives: Vec<usize> = (0..n).map(|q| amount(q, rank)).collect();
    let send = filled::<T>(rank, sends.iter().sum());
    let mut recv = vec![T::default(); receives.iter().sum()];
    comm.all_to_all_v(&send, &sends, &mut recv, &receives)?;
    let expected = |q: usize| {
        let sends: Vec<usize> = (0..n).map(|to| amount(q, to)).collect();
        part(&bits(&filled::<T>(q, sends.iter().sum())), &sends, rank).to_vec()
    };
    assert_eq!(bits(&recv), (0..n).flat_map(expected).collect::<Vec<u64>>());

    let send = filled::<T>(rank, n * counts[0]);
    let mut recv = vec![T::default(); n * counts[0]];
    comm.all_to_all(&send, &mut recv)?;
    let even = vec![counts[0]; n];
    let expected = |q: usize| part(&bits(&filled::<T>(q, n * counts[0])), &even, rank).to_vec();
    assert_eq!(bits(&recv), (0..n).flat_map(expected).collect::<Vec<u64>>());

    // Around the ring, then from each rank to the next one after the other.
    let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
    let mut data = vec![T::default(); counts[before]];
    comm.send_recv(next, &filled::<T>(rank, counts[rank]), before, &mut data)?;
    assert_eq!(bits(&data), bits(&filled::<T>(before, counts[before])));
    for from in 0..n - 1 {
        if rank == from {
            comm.send(from + 1, &filled::<T>(from, counts[from]))?;
        } else if rank == from + 1 {
            let mut data = vec![T::default(); counts[from]];
            comm.recv(from, &mut data)?;
            assert_eq!(bits(&data), bits(&filled::<T>(from, counts[from])));
        }
    }
    comm.barrier()
}

fn reductions<T: Fold>(comm: &Communicator, counts: &[usize]) -> Result<(), CommError> {
    let (rank, n) = (comm.rank(), comm.size());
    let total: usize = counts.iter().sum();
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        let expected = folded::<T>(op, n, total);
        let mut data = filled::<T>(rank, total);
        comm.all_reduce(op, &mut data)?;
        assert_eq!(bits(&data), expected, "all_reduce {op}");

        let mut shard = vec![T::default(); counts[rank]];
        comm.reduce_scatter_v(op, &filled::<T>(rank, total), counts, &mut shard)?;
        assert_eq!(bits(&shard), part(&expected, counts, rank), "reduce_scatter {op}");
    }
    let even = vec![counts[0]; n];
    let mut shard = vec![T::default(); counts[0]];
    comm.reduce_scatter(ReduceOp::Sum, &filled::<T>(rank, n * counts[0]), &mut shard)?;
    assert_eq!(bits(&shard), part(&folded::<T>(ReduceOp::Sum, n, n * counts[0]), &even, rank));
    Ok(())
}

fn everything(n: usize, counts: &[usize], root: usize) {
    run_ranks(n, |comm| {
        moves::<f32>(&comm, counts, root)?;
        moves::<f64>(&comm, counts, root)?;
        moves::<bf16>(&comm, counts, root)?;
        moves::<u8>(&comm, counts, root)?;
        moves::<i32>(&comm, counts, root)?;
        moves::<u32>(&comm, counts, root)?;
        moves::<u64>(&comm, counts, root)?;
        reductions::<f32>(&comm, counts)?;
        reductions::<f64>(&comm, counts)?;
        reductions::<bf16>(&comm, counts)?;
        reductions::<i32>(&comm, counts)?;
        reductions::<u32>(&comm, counts)?;
        reductions::<u64>(&comm, counts)
    })
    .unwrap();
}

#[test]
fn the_edges_of_every_world_size() {
    for n in SIZES {
        everything(n, &vec![0; n], n - 1);
        everything(n, &vec![1; n], 0);
        // Only the last has anything; only the first; uneven, with empty ones.
        everything(n, &(0..n).map(|r| if r == n - 1 { 37 } else { 0 }).collect::<Vec<_>>(), n / 2);
        everything(n, &(0..n).map(|r| if r == 0 { 5 } else { 0 }).collect::<Vec<_>>(), 0);
        everything(n, &(0..n).map(|r| r % 3 * 17).collect::<Vec<_>>(), n - 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_counts(
        (n, counts, root) in prop::sample::select(&SIZES[..])
            .prop_flat_map(|n| (Just(n), prop::collection::vec(prop_oneof![Just(0usize), 1..400usize], n), 0..n))
    ) {
        everything(n, &counts, root);
    }
}

#[test]
fn large_buffers() {
    // Above the size from which copies go past the caches, and no multiple of anything.
    for n in [2, 3] {
        let counts: Vec<usize> = (0..n).map(|r| 1_200_007 + 1001 * r).collect();
        run_ranks(n, |comm| {
            moves::<f32>(&comm, &counts, 1)?;
            moves::<bf16>(&comm, &counts, 0)?;
            reductions::<f32>(&comm, &counts)
        })
        .unwrap();
    }
}

/// The shape of a sharded model: many tensors in one call, some shards empty, dimension 0 in pieces of ceil(rows / P).
#[test]
fn many_tensors_in_one_call() {
    for n in SIZES {
        let rows = [7, 1, 0, 16, n, 2 * n + 1];
        let counts: Vec<Vec<usize>> = rows
            .iter()
            .map(|&rows| {
                let piece = rows.div_ceil(n).max(1);
                (0..n).map(|r| 3 * (rows.min(piece * (r + 1)) - rows.min(piece * r))).collect()
            })
            .collect();
        run_ranks(n, |comm| {
            let rank = comm.rank();
            let shards: Vec<Vec<bf16>> = counts.iter().map(|c| filled(rank, c[rank])).collect();
            let mut fulls: Vec<Vec<bf16>> = rows.iter().map(|r| vec![bf16::ZERO; 3 * r]).collect();
            let mut items: Vec<_> = fulls
                .iter_mut()
                .zip(&shards)
                .zip(&counts)
                .map(|((full, shard), counts)| Gather { shard, counts, full })
                .collect();
            comm.all_gather_many(&mut items)?;
            for (full, counts) in fulls.iter().zip(&counts) {
                assert_eq!(bits(full), concatenated::<bf16>(counts));
            }

            let grads: Vec<Vec<f32>> = rows.iter().map(|r| filled(rank, 3 * r)).collect();
            let mut shards: Vec<Vec<f32>> = counts.iter().map(|c| vec![0.0; c[rank]]).collect();
            let mut items: Vec<_> = shards
                .iter_mut()
                .zip(&grads)
                .zip(&counts)
                .map(|((shard, full), counts)| Scatter { full, counts, shard })
                .collect();
            comm.reduce_scatter_many(ReduceOp::Sum, &mut items)?;
            for ((shard, counts), rows) in shards.iter().zip(&counts).zip(rows) {
                assert_eq!(bits(shard), part(&folded::<f32>(ReduceOp::Sum, n, 3 * rows), counts, rank));
            }

            let (mut a, mut b) = (filled::<f32>(rank, 5), filled::<f32>(rank, 1000));
            comm.all_reduce_many(ReduceOp::Sum, &mut [&mut a, &mut [], &mut b])?;
            assert_eq!(bits(&a), folded::<f32>(ReduceOp::Sum, n, 5));
            assert_eq!(bits(&b), folded::<f32>(ReduceOp::Sum, n, 1000));
            // No items at all is a call too.
            comm.all_gather_many::<f32>(&mut [])
        })
        .unwrap();
    }
}

#[test]
fn the_bits_are_the_same_in_every_run_and_for_every_cut() {
    let len = 10_007;
    let run = || {
        run_ranks(6, |comm| {
            let mut whole = filled::<f32>(comm.rank(), len);
            comm.all_reduce(ReduceOp::Sum, &mut whole)?;
            // The same numbers in pieces of odd sizes.
            let mut pieces = filled::<f32>(comm.rank(), len);
            for piece in pieces.chunks_mut(331) {
                comm.all_reduce(ReduceOp::Sum, piece)?;
            }
            assert_eq!(bits(&whole), bits(&pieces));
            Ok::<_, CommError>(bits(&whole))
        })
        .unwrap()
    };
    let first = run();
    assert!(first.iter().all(|rank| *rank == first[0]));
    for _ in 0..5 {
        assert_eq!(run(), first);
    }
}

#[test]
fn eight_ranks_go_through_thousands_of_calls_on_any_number_of_cores() {
    run_ranks(8, |comm| {
        let mut x = [0u64; 1];
        for i in 0..2_000u64 {
            x[0] = i + comm.rank() as u64;
            comm.all_reduce(ReduceOp::Sum, &mut x)?;
            assert_eq!(x[0], 8 * i + 28);
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn no_ranks_is_no_results() {
    assert!(run_ranks(0, |_| Ok::<_, CommError>(())).unwrap().is_empty());
}
