//! Reductions in the order of ranks.
//!
//! Every element is one chain `((x0 ∘ x1) ∘ x2) ∘ …` over ranks 0, 1, 2, …, in f32 for bf16 and rounded once. The chain of an
//! element depends on nothing but the number of ranks: not on where a buffer is cut, which rank does the work, or the back end.

use crate::bytes;
use crate::element::{Arithmetic, ElementType, ReduceOp};
use phalanx_tensor::bf16;

/// Elements per block, few: the running result stays in the first-level cache, and the ranks' buffers are read as so many even
/// streams. (With 1024, three ranks reduced at two thirds of the rate.)
const BLOCK: usize = 128;

/// Reduces equal ranges of all ranks' buffers, in the order given; each of them then holds the result.
pub(crate) fn reduce_in_place(ty: ElementType, op: ReduceOp, ranks: &mut [&mut [u8]]) {
    match ty {
        ElementType::F32 => in_place::<f32>(op, ranks),
        ElementType::F64 => in_place::<f64>(op, ranks),
        ElementType::Bf16 => in_place::<bf16>(op, ranks),
        ElementType::I32 => in_place::<i32>(op, ranks),
        ElementType::U32 => in_place::<u32>(op, ranks),
        ElementType::U64 => in_place::<u64>(op, ranks),
        ElementType::U8 => unreachable!("u8 is not `Reduce`"),
    }
}

/// Reduces equal ranges of all ranks' buffers, in the order given, into `out`.
pub(crate) fn reduce_to(ty: ElementType, op: ReduceOp, ranks: &[&[u8]], out: &mut [u8]) {
    match ty {
        ElementType::F32 => to::<f32>(op, ranks, out),
        ElementType::F64 => to::<f64>(op, ranks, out),
        ElementType::Bf16 => to::<bf16>(op, ranks, out),
        ElementType::I32 => to::<i32>(op, ranks, out),
        ElementType::U32 => to::<u32>(op, ranks, out),
        ElementType::U64 => to::<u64>(op, ranks, out),
        ElementType::U8 => unreachable!("u8 is not `Reduce`"),
    }
}

fn in_place<T: Arithmetic>(op: ReduceOp, ranks: &mut [&mut [u8]]) {
    match op {
        ReduceOp::Sum => fold_in_place::<T>(ranks, T::sum),
        ReduceOp::Max => fold_in_place::<T>(ranks, T::max),
        ReduceOp::Min => fold_in_place::<T>(ranks, T::min),
    }
}

fn to<T: Arithmetic>(op: ReduceOp, ranks: &[&[u8]], out: &mut [u8]) {
    match op {
        ReduceOp::Sum => fold_to::<T>(ranks, out, T::sum),
        ReduceOp::Max => fold_to::<T>(ranks, out, T::max),
        ReduceOp::Min => fold_to::<T>(ranks, out, T::min),
    }
}

#[inline(always)]
fn fold_in_place<T: Arithmetic>(ranks: &mut [&mut [u8]], f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy) {
    if let [a, b] = ranks {
        // Two ranks, the common case on a desk: one pass, nothing kept aside.
        for (x, y) in bytes::typed_mut::<T>(a).iter_mut().zip(bytes::typed_mut::<T>(b)) {
            let r = T::narrow(f(x.widen(), y.widen()));
            *x = r;
            *y = r;
        }
        return;
    }
    let mut ranks: Vec<&mut [T]> = ranks.iter_mut().map(|r| bytes::typed_mut::<T>(r)).collect();
    let len = ranks.first().map_or(0, |r| r.len());
    let mut acc = [T::Acc::default(); BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let end = len.min(start + BLOCK);
        let acc = &mut acc[..end - start];
        for (q, rank) in ranks.iter().enumerate() {
            fold_block(acc, &rank[start..end], q == 0, f);
        }
        for rank in &mut ranks {
            for (x, a) in rank[start..end].iter_mut().zip(&*acc) {
                *x = T::narrow(*a);
            }
        }
    }
}

#[inline(always)]
fn fold_to<T: Arithmetic>(ranks: &[&[u8]], out: &mut [u8], f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy) {
    let out = bytes::typed_mut::<T>(out);
    let ranks: Vec<&[T]> = ranks.iter().map(|r| bytes::typed::<T>(r)).collect();
    let mut acc = [T::Acc::default(); BLOCK];
    for (i, out) in out.chunks_mut(BLOCK).enumerate() {
        let acc = &mut acc[..out.len()];
        for (q, rank) in ranks.iter().enumerate() {
            fold_block(acc, &rank[i * BLOCK..][..out.len()], q == 0, f);
        }
        for (x, a) in out.iter_mut().zip(&*acc) {
            *x = T::narrow(*a);
        }
    }
}

#[inline(always)]
fn fold_block<T: Arithmetic>(acc: &mut [T::Acc], x: &[T], first: bool, f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy) {
    if first {
        acc.iter_mut().zip(x).for_each(|(a, x)| *a = x.widen());
    } else {
        acc.iter_mut().zip(x).for_each(|(a, x)| *a = f(*a, x.widen()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(ty: ElementType, op: ReduceOp, ranks: &[Vec<f32>]) -> Vec<f32> {
        let mut out = vec![0f32; ranks[0].len()];
        let views: Vec<&[u8]> = ranks.iter().map(|r| bytes::of(r)).collect();
        reduce_to(ty, op, &views, bytes::of_mut(&mut out));
        let mut copies = ranks.to_vec();
        let mut views: Vec<&mut [u8]> = copies.iter_mut().map(|r| bytes::of_mut(r)).collect();
        reduce_in_place(ty, op, &mut views);
        for copy in &copies {
            assert!(copy.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        out
    }

    #[test]
    fn sums_run_in_the_order_of_ranks() {
        // Any other order gives 0 or 1 here.
        let ranks: Vec<Vec<f32>> = [1e8, -1e8, 1.0].iter().map(|&x| vec![x; 2500]).collect();
        assert_eq!(all(ElementType::F32, ReduceOp::Sum, &ranks), vec![1.0; 2500]);
        let ranks: Vec<Vec<f32>> = [1.0, 1e8, -1e8].iter().map(|&x| vec![x; 3]).collect();
        assert_eq!(all(ElementType::F32, ReduceOp::Sum, &ranks), [0.0; 3]);
        // A sum of one starts from the value, not from zero.
        assert_eq!(all(ElementType::F32, ReduceOp::Sum, &[vec![-0.0]])[0].to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn a_nan_is_never_hidden() {
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            for place in 0..3 {
                let mut ranks = vec![vec![1.0], vec![2.0], vec![3.0]];
                ranks[place][0] = f32::NAN;
                assert!(all(ElementType::F32, op, &ranks)[0].is_nan(), "{op} with NaN on rank {place}");
            }
        }
        assert_eq!(all(ElementType::F32, ReduceOp::Max, &[vec![1.0, -1.0], vec![0.5, 4.0]]), [1.0, 4.0]);
        assert_eq!(all(ElementType::F32, ReduceOp::Min, &[vec![1.0, -1.0], vec![0.5, 4.0]]), [0.5, -1.0]);
    }

    #[test]
    fn bf16_is_summed_in_f32_and_rounded_once() {
        // In bf16 arithmetic 256 + 1 stays 256, so that the sum would be 256.
        let ranks = [256.0, 1.0, 1.0, 1.0, 1.0].map(|x| [bf16::from_f32(x)]);
        let views: Vec<&[u8]> = ranks.iter().map(|r| bytes::of(r)).collect();
        let mut out = [bf16::ZERO];
        reduce_to(ElementType::Bf16, ReduceOp::Sum, &views, bytes::of_mut(&mut out));
        assert_eq!(out[0].to_f32(), 260.0);
    }
}
