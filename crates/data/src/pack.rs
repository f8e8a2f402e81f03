//! Packing: several documents in one row, so that a row is full and nothing is padded.
//!
//! Best-fit decreasing: the longest document first, each into the fullest row that still has room. It needs at most
//! 11/9 of the fewest possible rows, and one more (D. S. Johnson, 1973), in practice hardly more than the fewest. No
//! document is ever split, and equal input gives equal rows: ties go to the earlier document and the earlier row.

use std::collections::BTreeSet;

/// Groups documents of the given lengths (in tokens) into rows of at most `capacity` tokens.
///
/// Rows hold indices into `lengths`, ascending; the rows are in the order of their first document. A document longer
/// than `capacity` gets a row of its own.
pub fn pack(lengths: &[usize], capacity: usize) -> Vec<Vec<u32>> {
    let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
    order.sort_by_key(|i| std::cmp::Reverse(lengths[*i as usize]));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    // Rows by the room that is left in them.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for document in order {
        let length = lengths[document as usize];
        let (room, row) = match open.range((length, 0)..).next().copied() {
            Some(best) => {
                open.remove(&best);
                best
            }
            None => {
                rows.push(Vec::new());
                (capacity.max(length), rows.len() - 1)
            }
        };
        rows[row].push(document);
        if room > length {
            open.insert((room - length, row));
        }
    }
    for row in &mut rows {
        row.sort_unstable();
    }
    rows.sort_unstable_by_key(|row| row[0]);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_worked_example() {
        assert_eq!(pack(&[5, 7, 3, 2, 4, 10], 10), [vec![0, 4], vec![1, 2], vec![3], vec![5]]);
        assert_eq!(pack(&[], 10), Vec::<Vec<u32>>::new());
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_repeated_and_rows_fit(lengths in prop::collection::vec(1usize..64, 0..200)) {
            let rows = pack(&lengths, 64);
            let mut all: Vec<u32> = rows.iter().flatten().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u32).collect::<Vec<_>>());
            let total: usize = lengths.iter().sum();
            for row in &rows {
                prop_assert!(row.iter().map(|i| lengths[*i as usize]).sum::<usize>() <= 64);
            }
            // No two rows fit into one, so more than half of the room is used but for one row.
            prop_assert!(rows.len() <= 1 + 2 * total / 64);
        }
    }
}
