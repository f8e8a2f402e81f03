//! Which rows of a micro-batch each rank holds, and how much work that is.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// How the rows of a micro-batch are dealt to the ranks of a context-parallel group.
///
/// It goes by rows and not by documents: documents lie end to end, of any lengths, and are cut wherever a piece ends. So nothing is padded; pieces
/// differ by one row at most, and where there are fewer rows than pieces some are empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Partition {
    /// P pieces, rank r holds piece r. In causal attention the last rank has nearly twice the mean of the work.
    Contiguous,
    /// 2·P pieces, rank r holds pieces r and 2·P − 1 − r: in one document every rank has the same work.
    ZigZag,
}

impl Partition {
    /// The rows of each of `ranks` ranks among `rows` rows: ascending ranges, none empty, no two that touch.
    pub fn deal(self, rows: usize, ranks: usize) -> Vec<Vec<Range<usize>>> {
        let pieces = if self == Partition::ZigZag { 2 * ranks } else { ranks };
        let piece = |i: usize| i * rows / pieces..(i + 1) * rows / pieces;
        let of = |rank: usize| match self {
            Partition::Contiguous => merge([piece(rank)]),
            Partition::ZigZag => merge([piece(rank), piece(pieces - 1 - rank)]),
        };
        (0..ranks).map(of).collect()
    }
}

/// The same rows as ascending ranges, none empty, no two that touch.
pub(super) fn merge(ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut sorted: Vec<_> = ranges.into_iter().filter(|r| !r.is_empty()).collect();
    sorted.sort_by_key(|r| r.start);
    let mut out: Vec<Range<usize>> = vec![];
    for r in sorted {
        match out.last_mut() {
            Some(last) if last.end == r.start => last.end = r.end,
            _ => out.push(r),
        }
    }
    out
}

/// Pairs of a query and a key that it sees, for the given rows of documents of these lengths: what causal attention costs.
pub fn causal_work(documents: &[usize], rows: &[Range<usize>], window: Option<usize>) -> u64 {
    let window = window.unwrap_or(usize::MAX) as u64;
    // Σ min(p + 1, window) over the first n positions.
    let up_to = |n: usize| {
        let n = n as u64;
        let rising = n.min(window);
        rising * (rising + 1) / 2 + (n - rising) * window
    };
    let (mut work, mut start) = (0, 0);
    for &len in documents {
        for r in rows {
            let (from, to) = (r.start.clamp(start, start + len), r.end.clamp(start, start + len));
            work += up_to(to - start) - up_to(from - start);
        }
        start += len;
    }
    work
}

/// Most work over mean work of the ranks: 1 is perfect, and P / this is how many ranks' worth of work P ranks do at once.
pub fn imbalance(work: &[u64]) -> f64 {
    let (sum, max) = (work.iter().sum::<u64>(), work.iter().copied().max().unwrap_or(0));
    if sum == 0 { 1.0 } else { max as f64 * work.len() as f64 / sum as f64 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn works(partition: Partition, documents: &[usize], ranks: usize, window: Option<usize>) -> Vec<u64> {
        let rows = partition.deal(documents.iter().sum(), ranks);
        rows.iter().map(|r| causal_work(documents, r, window)).collect()
    }

    #[test]
    fn balance_is_as_published() {
        let contiguous = works(Partition::Contiguous, &[16 * 1024], 16, None);
        assert!((imbalance(&contiguous) - 1.937).abs() < 1e-3, "{}", imbalance(&contiguous));
        let mean = contiguous.iter().sum::<u64>() as f64 / 16.0;
        assert!((contiguous[0] as f64 / mean - 0.063).abs() < 1e-3);
        assert_eq!(imbalance(&works(Partition::ZigZag, &[16 * 1024], 16, None)), 1.0);
        // A window takes work off the late rows only.
        assert!(imbalance(&works(Partition::Contiguous, &[16 * 1024], 16, Some(512))) < 1.05);
        assert_eq!(imbalance(&[]), 1.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_row_is_dealt_once_and_work_adds_up(
            documents in proptest::collection::vec(0usize..40, 0..6),
            ranks in 1usize..7,
            zig_zag in any::<bool>(),
            window in proptest::option::of(1usize..50),
        ) {
            let partition = if zig_zag { Partition::ZigZag } else { Partition::Contiguous };
            let rows: usize = documents.iter().sum();
            let dealt = partition.deal(rows, ranks);
            let mut seen = vec![0; rows];
            for r in dealt.iter().flatten() {
                prop_assert!(!r.is_empty());
                r.clone().for_each(|i| seen[i] += 1);
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
            prop_assert!(dealt.iter().all(|d| d.windows(2).all(|w| w[0].end < w[1].start)));
            let lens: Vec<usize> = dealt.iter().map(|d| d.iter().map(Range::len).sum()).collect();
            prop_assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 2);
            let direct: u64 =
                documents.iter().flat_map(|&n| 1..=n).map(|n| n.min(window.unwrap_or(n)) as u64).sum();
            prop_assert_eq!(works(partition, &documents, ranks, window).iter().sum::<u64>(), direct);
        }
    }
}
