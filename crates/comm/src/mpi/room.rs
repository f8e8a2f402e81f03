//! Buffers cut into the pieces of ranks.

use std::ops::Range;

use crate::bytes;

/// `data` cut at `ranges`, which are in order and do not overlap.
pub(super) fn cut(mut data: &mut [u8], ranges: impl Iterator<Item = Range<usize>>) -> Vec<&mut [u8]> {
    let mut start = 0;
    ranges
        .map(|range| {
            let (_, rest) = std::mem::take(&mut data).split_at_mut(range.start - start);
            let (piece, rest) = rest.split_at_mut(range.len());
            (data, start) = (rest, range.end);
            piece
        })
        .collect()
}

/// Room for what peers send to be reduced: `n` pieces for each of several parts, aligned for any element.
pub(super) struct Room {
    pub(super) words: Vec<u64>,
    /// Bytes of a piece, for each part.
    lens: Vec<usize>,
    n: usize,
}

impl Room {
    /// Takes the memory of an earlier call.
    pub(super) fn new(mut words: Vec<u64>, n: usize, lens: Vec<usize>) -> Room {
        let needed = lens.iter().map(|len| len.div_ceil(8) * n).sum();
        if words.len() < needed {
            words.resize(needed, 0);
        }
        Room { words, lens, n }
    }

    /// The pieces of each part.
    pub(super) fn parts(&mut self) -> Vec<Vec<&mut [u8]>> {
        let mut rest = &mut self.words[..];
        let mut piece = |len: usize| {
            let (words, after) = std::mem::take(&mut rest).split_at_mut(len.div_ceil(8));
            rest = after;
            &mut bytes::of_mut(words)[..len]
        };
        self.lens.iter().map(|&len| (0..self.n).map(|_| piece(len)).collect()).collect()
    }
}
