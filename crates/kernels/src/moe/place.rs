//! Where the rows of each expert lie: a counting sort of (token, choice) pairs.

use crate::Result;
use crate::error::{bad_shape, check_len};

/// The place of a pair that was dropped.
pub const DROPPED: u32 = u32::MAX;

/// Which pairs go when an expert is asked for more than it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// The last tokens.
    Position,
    /// Those of the smallest weight (of equal ones, the last tokens).
    Probability,
}

/// A limit to the rows of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Capacity<'a> {
    /// Rows an expert takes.
    pub rows: usize,
    /// Which pairs go.
    pub drop: Drop,
    /// Weight of each pair [T·k].
    pub weights: &'a [f32],
}

/// Sorts pairs by expert. `chosen` [T·k]: the expert of each pair. Writes `offsets` [E+1] (where each expert's rows start, and the end),
/// `pairs` (the pair of each row, of which the first R = `offsets[E]` are filled), `places` [T·k] (the row of each pair, or
/// [`DROPPED`]). Gives R.
///
/// # Errors
/// If a length does not fit or an expert is not below E.
pub fn place(
    chosen: &[u32],
    capacity: Option<Capacity<'_>>,
    offsets: &mut [usize],
    pairs: &mut [u32],
    places: &mut [u32],
) -> Result<usize> {
    let Some(experts) = offsets.len().checked_sub(1) else {
        return bad_shape("place", "offsets must have one value more than there are experts");
    };
    check_len("place", "pairs", pairs.len(), chosen.len())?;
    check_len("place", "places", places.len(), chosen.len())?;
    if let Some(c) = &capacity {
        check_len("place", "weights", c.weights.len(), chosen.len())?;
    }
    if let Some(bad) = chosen.iter().find(|&&c| c as usize >= experts) {
        return bad_shape("place", format!("expert {bad} of {experts}"));
    }
    if chosen.len() >= DROPPED as usize {
        return bad_shape("place", format!("{} rows, fewer than 2³² are possible", chosen.len()));
    }
    offsets.fill(0);
    chosen.iter().for_each(|&c| offsets[c as usize + 1] += 1);
    (0..experts).for_each(|e| offsets[e + 1] += offsets[e]);
    // Filling moves each start to the next one's; afterwards they are moved back.
    for (pair, &c) in chosen.iter().enumerate() {
        pairs[offsets[c as usize]] = pair as u32;
        offsets[c as usize] += 1;
    }
    offsets.copy_within(0..experts, 1);
    offsets[0] = 0;
    if let Some(c) = capacity {
        limit(c, offsets, pairs);
    }
    let rows = offsets[experts];
    places.fill(DROPPED);
    pairs[..rows].iter().enumerate().for_each(|(row, &pair)| places[pair as usize] = row as u32);
    Ok(rows)
}

fn limit(c: Capacity<'_>, offsets: &mut [usize], pairs: &mut [u32]) {
    let mut to = 0;
    for e in 0..offsets.len() - 1 {
        // The start was moved by what was dropped before; what lies there is still where it was.
        let (from, end) = (offsets[e], offsets[e + 1]);
        let group = &mut pairs[from..end];
        if group.len() > c.rows && c.drop == Drop::Probability {
            let weight = |p: &u32| c.weights[*p as usize];
            group.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(a.cmp(b)));
            group[..c.rows].sort_unstable();
        }
        let kept = group.len().min(c.rows);
        pairs.copy_within(from..from + kept, to);
        offsets[e] = to;
        to += kept;
    }
    if let Some(end) = offsets.last_mut() {
        *end = to;
    }
}
