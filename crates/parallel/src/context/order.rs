//! Rows of several ranks in one buffer: rank by rank as they arrive, or in the order of the micro-batch.

use std::ops::Range;

use super::partition::merge;

/// The two orders of the rows of some ranks.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// Rows of each rank.
    pub rows: Vec<usize>,
    /// The rows of all of them in the micro-batch, ascending.
    pub together: Vec<Range<usize>>,
    /// (first row rank by rank, first row in the order of the micro-batch, number of rows).
    moves: Vec<(usize, usize, usize)>,
}

impl Order {
    /// For ranks that hold these rows, each ascending.
    pub fn new(ranks: &[Vec<Range<usize>>]) -> Order {
        let rows = ranks.iter().map(|r| r.iter().map(Range::len).sum()).collect();
        let pieces: Vec<Range<usize>> = ranks.iter().flatten().cloned().collect();
        let mut from = 0;
        let mut moves: Vec<(usize, usize, usize)> = vec![];
        for piece in &pieces {
            let to = pieces.iter().filter(|p| p.start < piece.start).map(Range::len).sum();
            match moves.last_mut() {
                Some((_, last_to, len)) if *last_to + *len == to => *len += piece.len(),
                _ => moves.push((from, to, piece.len())),
            }
            from += piece.len();
        }
        Order { rows, together: merge(pieces), moves }
    }

    /// Rows of all ranks.
    pub fn total(&self) -> usize {
        self.rows.iter().sum()
    }

    /// Whether both orders are the same.
    pub fn is_same(&self) -> bool {
        self.moves.iter().all(|(from, to, _)| from == to)
    }

    /// From the order of ranks to that of the micro-batch, rows of `width` values.
    pub fn sort(&self, by_rank: &[f32], sorted: &mut [f32], width: usize) {
        for &(from, to, len) in &self.moves {
            sorted[to * width..(to + len) * width].copy_from_slice(&by_rank[from * width..(from + len) * width]);
        }
    }

    /// And back.
    pub fn unsort(&self, sorted: &[f32], by_rank: &mut [f32], width: usize) {
        for &(from, to, len) in &self.moves {
            by_rank[from * width..(from + len) * width].copy_from_slice(&sorted[to * width..(to + len) * width]);
        }
    }

    /// For each rank and each of its rows, in order: where the row lies in the order of the micro-batch.
    pub fn places(&self) -> impl Iterator<Item = usize> + '_ {
        self.moves.iter().flat_map(|&(_, to, len)| to..to + len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Partition;
    use super::*;

    #[test]
    fn sorting_is_undone_by_unsorting() {
        for (rows, ranks) in [(0, 3), (2, 5), (23, 2), (31, 3), (40, 5)] {
            for partition in [Partition::Contiguous, Partition::ZigZag] {
                let dealt = partition.deal(rows, ranks);
                let order = Order::new(&dealt);
                let by_rank: Vec<f32> = dealt.iter().flatten().flat_map(Clone::clone).map(|i| i as f32).collect();
                let (mut sorted, mut back) = (vec![0.0; rows], vec![0.0; rows]);
                order.sort(&by_rank, &mut sorted, 1);
                assert_eq!(sorted, (0..rows).map(|i| i as f32).collect::<Vec<_>>());
                order.unsort(&sorted, &mut back, 1);
                assert_eq!(back, by_rank);
                assert_eq!(order.places().map(|p| p as f32).collect::<Vec<_>>(), by_rank);
                assert!(partition != Partition::Contiguous || order.is_same());
            }
        }
    }
}
