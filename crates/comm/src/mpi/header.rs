//! The descriptor of a call as bytes of a fixed length, which ranks exchange before any data.

use crate::call::{Call, Kind};
use crate::element::{ElementType, ReduceOp};

/// Bytes for the text of a call: what it is, and where it stands.
const TEXT: usize = 480;
const FIXED: usize = 56;

const TYPES: [ElementType; 7] = [
    ElementType::F32,
    ElementType::F64,
    ElementType::Bf16,
    ElementType::U8,
    ElementType::I32,
    ElementType::U32,
    ElementType::U64,
];
const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// FNV-1a: the same on every machine.
pub(super) fn hash(words: impl IntoIterator<Item = u64>) -> u64 {
    let byte = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3);
    words.into_iter().fold(0xCBF2_9CE4_8422_2325, |h, w| w.to_le_bytes().into_iter().fold(h, byte))
}

/// Bytes of a header in a group of `size`.
pub(super) fn len(size: usize) -> usize {
    FIXED + 16 * size + TEXT
}

/// What a peer said.
pub(super) struct Remote {
    /// Its call as far as calls are compared; the counts stand for a hash of them.
    pub(super) call: Call,
    /// Its call in words.
    pub(super) text: String,
    /// The group it was made in.
    pub(super) group: u64,
}

/// The call as peers get it.
pub(super) fn encode(call: &Call, group: u64, size: usize) -> Vec<u8> {
    let position = |i: Option<usize>| i.map_or(0, |i| i as u64 + 1);
    let mut text = call.to_string();
    while text.len() > TEXT {
        text.pop();
    }
    let mut words = vec![
        group,
        call.kind as u64,
        position(call.dtype.and_then(|t| TYPES.iter().position(|x| *x == t))),
        position(call.op.and_then(|o| OPS.iter().position(|x| *x == o))),
        position(call.root),
        hash(std::iter::once(call.counts.len() as u64).chain(call.counts.iter().map(|&c| c as u64))),
        text.len() as u64,
    ];
    for counts in [&call.sends, &call.receives] {
        words.extend((0..size).map(|q| counts.get(q).map_or(0, |&c| c as u64)));
    }
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    bytes.extend(text.as_bytes());
    bytes.resize(len(size), 0);
    bytes
}

/// A header that a peer sent.
pub(super) fn decode(bytes: &[u8], size: usize, own: &Call) -> Remote {
    let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| bytes[8 * i + b]));
    let pick = |i: usize| word(i).checked_sub(1).map(|i| i as usize);
    let counts = |from: usize| (0..size).map(|q| word(from + q) as usize).collect();
    let text = &bytes[FIXED + 16 * size..];
    let call = Call {
        kind: Kind::ALL.get(word(1) as usize).copied().unwrap_or(own.kind),
        dtype: pick(2).and_then(|i| TYPES.get(i).copied()),
        op: pick(3).and_then(|i| OPS.get(i).copied()),
        root: pick(4),
        counts: vec![word(5) as usize],
        sends: counts(7),
        receives: counts(7 + size),
        ..own.clone()
    };
    let text = String::from_utf8_lossy(&text[..text.len().min(word(6) as usize)]).into_owned();
    Remote { call, text, group: word(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Aspect, first_mismatch};
    use std::panic::Location;

    #[test]
    fn there_and_back() {
        let mut call = Call::new(Kind::AllToAll, Location::caller());
        call.dtype = Some(ElementType::Bf16);
        call.sends = vec![1, 2, 3];
        call.receives = vec![1, 5, 6];
        let bytes = encode(&call, 77, 3);
        assert_eq!(bytes.len(), len(3));
        let back = decode(&bytes, 3, &call);
        assert_eq!((back.group, back.call.kind, back.call.dtype), (77, Kind::AllToAll, Some(ElementType::Bf16)));
        assert_eq!((back.call.sends, back.call.receives), (vec![1, 2, 3], vec![1, 5, 6]));
        assert!(back.text.contains(file!()));

        let mut a = Call::new(Kind::AllReduce, Location::caller());
        (a.op, a.counts) = (Some(ReduceOp::Max), vec![4]);
        let mut b = a.clone();
        b.counts = vec![5];
        let calls = [&a, &b].map(|c| decode(&encode(c, 1, 2), 2, c).call);
        assert_eq!(first_mismatch(&calls), Some((0, 1, Aspect::Counts)));
    }
}
