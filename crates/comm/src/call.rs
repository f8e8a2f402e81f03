//! What a rank says about a call before any data moves, so that a call that does not fit its peers' is found.

use std::fmt;
use std::panic::Location;

use crate::element::{ElementType, ReduceOp};

/// Which collective, or which half of a point-to-point message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Every rank gets the reduction of all.
    AllReduce,
    /// Every rank gets all shards.
    AllGather,
    /// Every rank gets its shard of the reduction of all.
    ReduceScatter,
    /// Every rank sends each rank its own piece.
    AllToAll,
    /// Every rank gets what the root has.
    Broadcast,
    /// Nobody goes on before all have come.
    Barrier,
    /// One rank gives to one other.
    Send,
    /// One rank takes from one other.
    Receive,
}

impl Kind {
    /// All kinds, in the order of reports.
    pub const ALL: [Kind; 8] = [
        Kind::AllReduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Broadcast,
        Kind::Barrier,
        Kind::Send,
        Kind::Receive,
    ];

    /// Its name, as the method is called.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll => "all_to_all",
            Kind::Broadcast => "broadcast",
            Kind::Barrier => "barrier",
            Kind::Send => "send",
            Kind::Receive => "recv",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The descriptor of a call.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which collective.
    pub kind: Kind,
    /// The element type; `None` for none (barrier) or several (coalesced tensors).
    pub dtype: Option<ElementType>,
    /// The reduction, if it is one.
    pub op: Option<ReduceOp>,
    /// Broadcast: the root. Send and receive: the peer. As ranks of the group.
    pub root: Option<usize>,
    /// Element counts that must be the same on every rank.
    pub counts: Vec<usize>,
    /// all_to_all: elements for each rank; rank q must expect from this rank what is said here for q.
    pub sends: Vec<usize>,
    /// all_to_all: elements from each rank.
    pub receives: Vec<usize>,
    /// How many calls of its group came before it.
    pub sequence: u64,
    /// Where it stands in the caller's source.
    pub site: &'static Location<'static>,
    /// Whether compute threads wait for it, so that looking out for peers at full speed pays.
    pub eager: bool,
}

impl Call {
    pub(crate) fn new(kind: Kind, site: &'static Location<'static>) -> Call {
        Call {
            kind,
            dtype: None,
            op: None,
            root: None,
            counts: vec![],
            sends: vec![],
            receives: vec![],
            sequence: 0,
            site,
            eager: true,
        }
    }

    /// The first thing in which two ranks' calls of the same collective differ.
    pub fn differs(&self, other: &Call) -> Option<Aspect> {
        if self.kind != other.kind {
            Some(Aspect::Kind)
        } else if self.dtype != other.dtype {
            Some(Aspect::ElementType)
        } else if self.op != other.op {
            Some(Aspect::Reduction)
        } else if self.root != other.root {
            Some(Aspect::Root)
        } else if self.counts != other.counts {
            Some(Aspect::Counts)
        } else {
            None
        }
    }
}

/// The first pair of ranks whose calls do not fit, with what does not.
///
/// Every rank that looks at the same calls finds the same pair.
pub fn first_mismatch<C: std::borrow::Borrow<Call>>(calls: &[C]) -> Option<(usize, usize, Aspect)> {
    let call = |r: usize| calls[r].borrow();
    for r in 1..calls.len() {
        if let Some(aspect) = call(0).differs(call(r)) {
            return Some((0, r, aspect));
        }
    }
    if call(0).kind == Kind::AllToAll {
        for from in 0..calls.len() {
            for to in 0..calls.len() {
                if call(from).sends.get(to) != call(to).receives.get(from) {
                    return Some((from, to, Aspect::Counts));
                }
            }
        }
    }
    None
}

/// In what two calls differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aspect {
    /// Different collectives: the ranks have taken different paths.
    Kind,
    /// Different element types.
    ElementType,
    /// Different reductions.
    Reduction,
    /// Different roots.
    Root,
    /// Different numbers of elements.
    Counts,
}

impl fmt::Display for Aspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Aspect::Kind => "different collectives",
            Aspect::ElementType => "different element types",
            Aspect::Reduction => "different reductions",
            Aspect::Root => "different roots",
            Aspect::Counts => "different numbers of elements",
        })
    }
}

/// Numbers, the middle of a long list left out.
struct Short<'a>(&'a [usize]);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "{one}"),
            all if all.len() <= 12 => write!(f, "{all:?}"),
            all => {
                f.write_str("[")?;
                all[..8].iter().try_for_each(|n| write!(f, "{n}, "))?;
                write!(f, "… {} in all, total {}]", all.len(), all.iter().sum::<usize>())
            }
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if let Some(op) = self.op {
            write!(f, " {op}")?;
        }
        match self.kind {
            Kind::Barrier => {}
            Kind::AllToAll => write!(f, " sending {} and receiving {}", Short(&self.sends), Short(&self.receives))?,
            _ => write!(f, " of {}", Short(&self.counts))?,
        }
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype}")?;
        }
        match (self.kind, self.root) {
            (Kind::Send, Some(peer)) => write!(f, " to {peer}")?,
            (Kind::Receive, Some(peer)) => write!(f, " from {peer}")?,
            (_, Some(root)) => write!(f, " from root {root}")?,
            _ => {}
        }
        write!(f, " (call {}) at {}", self.sequence, self.site)
    }
}
