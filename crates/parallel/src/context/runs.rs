//! Rows as runs of documents, and which keys each run of queries sees.

use std::ops::Range;

use phalanx_kernels::attention::Seq;

/// Neighbouring rows of one document that a rank holds one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// First row where they lie.
    pub row: usize,
    /// Number of rows.
    pub len: usize,
    /// The document.
    pub document: usize,
    /// Position of the first row in the document.
    pub position: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.position + self.len
    }
}

/// The runs of a rank that holds `rows` (ascending) of documents of these lengths.
pub(super) fn runs(documents: &[usize], rows: &[Range<usize>]) -> Vec<Run> {
    let mut out = vec![];
    let mut row = 0;
    let mut rows = rows.iter().cloned().peekable();
    let mut start = 0;
    for (document, &len) in documents.iter().enumerate() {
        let end = start + len;
        while let Some(range) = rows.peek_mut().filter(|r| r.start < end) {
            let stop = range.end.min(end);
            let len = stop - range.start;
            out.push(Run { row, len, document, position: range.start - start });
            row += len;
            range.start = stop;
            if stop == range.end {
                rows.next();
            }
        }
        start = end;
    }
    out
}

/// Whole documents, one after another.
pub(super) fn whole(documents: &[usize]) -> Vec<Run> {
    runs(documents, std::slice::from_ref(&(0..documents.iter().sum())))
}

/// What `queries` see of `keys`, causally and within the window: calls of the kernel, in each of which a query occurs once at most.
///
/// A run of queries of which some see no key is cut down to those that do.
pub(super) fn calls(queries: &[Run], keys: &[Run], window: Option<usize>) -> Vec<Vec<Seq>> {
    let mut out: Vec<Vec<Seq>> = vec![];
    for q in queries {
        let mut call = 0;
        for k in keys.iter().filter(|k| k.document == q.document) {
            // Queries before the first key see nothing yet, those a window beyond the last nothing any more.
            let first = q.position.max(k.position);
            let end = window.map_or(q.end(), |w| q.end().min(k.end() + (w - 1)));
            if first >= end {
                continue;
            }
            let kv_len = k.end().min(end) - k.position;
            let seq = Seq {
                q_start: q.row + first - q.position,
                q_len: end - first,
                kv_start: k.row,
                kv_len,
                ahead: end - k.position - kv_len,
            };
            if call == out.len() {
                out.push(vec![]);
            }
            out[call].push(seq);
            call += 1;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Partition;
    use super::*;

    #[test]
    fn rows_are_cut_at_documents() {
        let run = |row, len, document, position| Run { row, len, document, position };
        assert_eq!(
            runs(&[3, 0, 1, 6], &[1..5, 8..10]),
            [run(0, 2, 0, 1), run(2, 1, 2, 0), run(3, 1, 3, 0), run(4, 2, 3, 4)]
        );
        assert_eq!(runs(&[3], &[]), []);
        assert_eq!(whole(&[]), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Over all ranks and sources each query meets each key that it sees exactly once.
        #[test]
        fn all_pairs_meet_once(
            documents in proptest::collection::vec(0usize..15, 1..5),
            ranks in 1usize..6,
            zig_zag in any::<bool>(),
            window in proptest::option::of(1usize..20),
        ) {
            let partition = if zig_zag { Partition::ZigZag } else { Partition::Contiguous };
            let total: usize = documents.iter().sum();
            let dealt = partition.deal(total, ranks);
            let global: Vec<Vec<usize>> = dealt.iter().map(|d| d.iter().flat_map(Clone::clone).collect()).collect();
            let mut met = vec![0; total * total];
            for q in 0..ranks {
                for k in 0..ranks {
                    for call in calls(&runs(&documents, &dealt[q]), &runs(&documents, &dealt[k]), window) {
                        for s in call {
                            prop_assert!(window.is_none_or(|w| s.ahead < w) && s.kv_len > 0);
                            for i in 0..s.q_len {
                                let position = s.kv_len + s.ahead - s.q_len + i;
                                let first = window.map_or(0, |w| (position + 1).saturating_sub(w));
                                prop_assert!(first < s.kv_len.min(position + 1));
                                for j in first..s.kv_len.min(position + 1) {
                                    met[global[q][s.q_start + i] * total + global[k][s.kv_start + j]] += 1;
                                }
                            }
                        }
                    }
                }
            }
            let mut start = 0;
            for len in documents {
                for q in start..start + len {
                    for k in 0..total {
                        let sees = k >= start && k <= q && window.is_none_or(|w| k + w > q);
                        prop_assert_eq!(met[q * total + k], i32::from(sees), "query {}, key {}", q, k);
                    }
                }
                start += len;
            }
        }
    }
}
