//! Which part of a parameter a rank works with, and which part of that it keeps.

use std::ops::Range;

/// A part of a parameter, in the coordinates of the whole one.
///
/// There are two cuts, one inside the other. The *working* part is what layers of this rank see: all of it, or the slice that tensor or
/// expert parallelism gives them, or nothing on a rank of another pipeline stage. Of its rows the rank *keeps* some, with their gradient and
/// optimizer state; the others are gathered when the module runs (fully sharded data parallelism).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The range of each dimension that layers of this rank see.
    pub working: Vec<Range<usize>>,
    /// The rows of the working part that this rank keeps, counted from its first row.
    pub kept: Range<usize>,
    /// Whether the rows are dealt to several ranks (one of which may happen to keep all).
    pub sharded: bool,
}

impl Placement {
    /// All of a parameter of this shape.
    pub fn whole(shape: &[usize]) -> Placement {
        Placement {
            working: shape.iter().map(|&n| 0..n).collect(),
            kept: 0..shape.first().copied().unwrap_or(1),
            sharded: false,
        }
    }

    /// Nothing of it: the parameter belongs to other ranks.
    pub fn nowhere(shape: &[usize]) -> Placement {
        let mut working: Vec<_> = shape.iter().map(|&n| 0..n).collect();
        if let Some(rows) = working.first_mut() {
            *rows = 0..0;
        }
        Placement { working, kept: 0..0, sharded: false }
    }

    /// Narrows dimension `dim` of the working part to `range` (counted from its present start), and keeps all of its rows.
    #[must_use]
    pub fn slice(mut self, dim: usize, range: Range<usize>) -> Placement {
        let start = self.working[dim].start;
        self.working[dim] = start + range.start..start + range.end;
        self.kept = 0..self.working.first().map_or(1, Range::len);
        self
    }

    /// Keeps only `rows` of the working part; other ranks keep the others.
    #[must_use]
    pub fn keep(mut self, rows: Range<usize>) -> Placement {
        self.kept = rows;
        self.sharded = true;
        self
    }

    /// Shape that layers see.
    pub fn working_shape(&self) -> Vec<usize> {
        self.working.iter().map(Range::len).collect()
    }

    /// Shape of what is kept.
    pub fn kept_shape(&self) -> Vec<usize> {
        let mut shape = self.working_shape();
        if let Some(rows) = shape.first_mut() {
            *rows = self.kept.len();
        }
        shape
    }

    /// What is kept, in the coordinates of the whole parameter.
    pub fn kept_box(&self) -> Vec<Range<usize>> {
        let mut ranges = self.working.clone();
        if let Some(rows) = ranges.first_mut() {
            *rows = rows.start + self.kept.start..rows.start + self.kept.end;
        }
        ranges
    }

    /// The runs of consecutive elements that make up the kept part: (offset in the whole parameter, length), in order.
    pub fn kept_runs(&self, shape: &[usize]) -> Vec<(usize, usize)> {
        let ranges = self.kept_box();
        if ranges.iter().any(Range::is_empty) {
            return vec![];
        }
        // Dimensions from the last on that are whole are consecutive with the one before them.
        let whole = shape.iter().zip(&ranges).rev().take_while(|(n, r)| r.len() == **n).count();
        let cut = shape.len().saturating_sub(whole + 1);
        let stride = |d: usize| shape[d + 1..].iter().product::<usize>();
        let Some(inner) = ranges.get(cut) else { return vec![(0, 1)] };
        let length = inner.len() * stride(cut);
        let mut runs = vec![(inner.start * stride(cut), length)];
        for d in (0..cut).rev() {
            let starts = ranges[d].clone().map(|i| i * stride(d));
            runs = starts.flat_map(|s| runs.iter().map(move |&(at, n)| (s + at, n))).collect();
        }
        runs
    }
}

/// Rows of rank `index` when `rows` are dealt to `ranks` as evenly as whole rows allow: ⌈rows / ranks⌉ each, the last ranks fewer or none.
pub fn chunk(rows: usize, ranks: usize, index: usize) -> Range<usize> {
    let each = rows.div_ceil(ranks.max(1));
    (each * index).min(rows)..(each * (index + 1)).min(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_inside_one_another() {
        let p = Placement::whole(&[8, 6]).slice(1, 2..4).keep(3..5);
        assert_eq!(p.working_shape(), [8, 2]);
        assert_eq!(p.kept_shape(), [2, 2]);
        assert_eq!(p.kept_box(), [3..5, 2..4]);
        assert!(p.sharded && !Placement::whole(&[8, 6]).sharded);
        assert_eq!(p.kept_runs(&[8, 6]), [(3 * 6 + 2, 2), (4 * 6 + 2, 2)]);
        assert_eq!(Placement::whole(&[8, 6]).keep(1..3).kept_runs(&[8, 6]), [(6, 12)]);
        let experts = Placement::whole(&[4, 2, 3]).slice(0, 2..4).slice(1, 1..2);
        assert_eq!(experts.kept_runs(&[4, 2, 3]), [(2 * 6 + 3, 3), (3 * 6 + 3, 3)]);
        assert_eq!(Placement::whole(&[5]).kept_runs(&[5]), [(0, 5)]);
        let nowhere = Placement::nowhere(&[5, 2]);
        assert!(nowhere.kept_runs(&[5, 2]).is_empty() && nowhere.kept_shape() == [0, 2]);
    }

    #[test]
    fn chunks_cover_all_rows_once() {
        for (rows, ranks) in [(10, 4), (3, 5), (0, 2), (8, 1), (7, 3)] {
            let all: Vec<usize> = (0..ranks).flat_map(|i| chunk(rows, ranks, i)).collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>(), "{rows} rows on {ranks} ranks");
        }
        assert_eq!(chunk(3, 5, 4), 3..3);
    }
}
