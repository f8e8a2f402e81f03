//! Schedules by name.

mod deferred;
mod dual_pipe_v;
mod gpipe;
mod interleaved;
mod one_forward_one_backward;
mod zero_bubble_h1;
mod zero_bubble_v;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use dual_pipe_v::dual_pipe_v;
pub use gpipe::gpipe;
pub use interleaved::interleaved;
pub use one_forward_one_backward::one_forward_one_backward;
pub use zero_bubble_h1::zero_bubble_h1;
pub use zero_bubble_v::zero_bubble_v;

use super::schedule::check_size;
use super::{Schedule, ScheduleError};

/// A schedule that can be asked for by name. As text: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zb-v`, `dualpipev`; case, `-` and `_` do
/// not matter when reading, and names of other programs (`Interleaved1F1B`, `ZBVZeroBubble`, `ZB1P`, …) are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum ScheduleKind {
    /// All forwards, then all backwards: see [`gpipe`].
    GPipe,
    /// See [`one_forward_one_backward`].
    OneForwardOneBackward,
    /// See [`interleaved`].
    Interleaved,
    /// See [`zero_bubble_h1`].
    ZeroBubbleH1,
    /// See [`zero_bubble_v`].
    ZeroBubbleV,
    /// See [`dual_pipe_v`].
    DualPipeV,
}

impl ScheduleKind {
    /// All, the plainest first.
    pub const ALL: [ScheduleKind; 6] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZeroBubbleH1,
        ScheduleKind::ZeroBubbleV,
        ScheduleKind::DualPipeV,
    ];

    /// The name, as in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZeroBubbleH1 => "zb-h1",
            ScheduleKind::ZeroBubbleV => "zb-v",
            ScheduleKind::DualPipeV => "dualpipev",
        }
    }

    /// Names of other programs and papers.
    const fn aliases(self) -> &'static [&'static str] {
        match self {
            ScheduleKind::GPipe => &["afab"],
            ScheduleKind::OneForwardOneBackward => &["pipedreamflush"],
            ScheduleKind::Interleaved => &["interleaved1f1b", "vpp"],
            ScheduleKind::ZeroBubbleH1 => &["zb1p", "zerobubbleh1"],
            ScheduleKind::ZeroBubbleV => &["zbvzerobubble", "zerobubblev"],
            ScheduleKind::DualPipeV => &[],
        }
    }

    /// Stages a rank where the schedule leaves no choice.
    pub const fn fixed_chunks(self) -> Option<usize> {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneForwardOneBackward | ScheduleKind::ZeroBubbleH1 => Some(1),
            ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV => Some(2),
            ScheduleKind::Interleaved => None,
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<ScheduleKind> for String {
    fn from(kind: ScheduleKind) -> String {
        kind.name().to_owned()
    }
}

impl TryFrom<String> for ScheduleKind {
    type Error = ScheduleError;
    fn try_from(name: String) -> Result<ScheduleKind, ScheduleError> {
        name.parse()
    }
}

impl FromStr for ScheduleKind {
    type Err = ScheduleError;
    fn from_str(name: &str) -> Result<ScheduleKind, ScheduleError> {
        let fold = |s: &str| s.to_lowercase().replace(['-', '_', ' '], "");
        let wanted = fold(name);
        let spellings =
            |kind: ScheduleKind| std::iter::once(fold(kind.name())).chain(kind.aliases().iter().map(|&a| a.to_owned()));
        if let Some(kind) = ScheduleKind::ALL.into_iter().find(|&k| spellings(k).any(|s| s == wanted)) {
            return Ok(kind);
        }
        let limit = (wanted.chars().count() / 3).max(1);
        let nearest = ScheduleKind::ALL
            .into_iter()
            .flat_map(|kind| spellings(kind).map(move |s| (s, kind)))
            .map(|(s, kind)| (strsim::osa_distance(&wanted, &s), kind))
            .filter(|(distance, _)| *distance <= limit)
            .min_by_key(|(distance, _)| *distance);
        let all = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
        let mend = match nearest {
            Some((_, kind)) => format!("did you mean \"{kind}\"? All: {all}"),
            None => format!("there are {all}"),
        };
        Err(ScheduleError::UnknownName { name: name.into(), mend })
    }
}

/// The schedule of `kind` for `num_ranks` pipeline ranks and `num_micro_batches` micro-batches a step. `num_chunks` is stages a rank: free for
/// `interleaved` (2 if left out), otherwise what the schedule fixes, and best left out.
///
/// ```
/// use phalanx_parallel::pipeline::{ScheduleKind, build};
/// let schedule = build("interleaved".parse()?, 4, 8, Some(3))?;
/// assert_eq!(schedule.num_stages(), 12);
/// let refused = build(ScheduleKind::DualPipeV, 4, 6, None).unwrap_err().to_string();
/// assert!(refused.contains("6 micro-batches") && refused.contains("at least 8"));
/// # Ok::<(), phalanx_parallel::pipeline::ScheduleError>(())
/// ```
///
/// # Errors
/// Numbers that the schedule does not allow, with what it would allow.
pub fn build(
    kind: ScheduleKind,
    num_ranks: usize,
    num_micro_batches: usize,
    num_chunks: Option<usize>,
) -> Result<Schedule, ScheduleError> {
    if let (Some(given), Some(fixed)) = (num_chunks, kind.fixed_chunks())
        && given != fixed
    {
        return Err(ScheduleError::Numbers {
            schedule: kind.name(),
            what: format!("{given} chunks a rank; it has always {fixed}"),
            mend: "leave the number of chunks out, or take interleaved".into(),
        });
    }
    let (p, m) = (num_ranks, num_micro_batches);
    match kind {
        ScheduleKind::GPipe => gpipe(p, m),
        ScheduleKind::OneForwardOneBackward => one_forward_one_backward(p, m),
        ScheduleKind::Interleaved => interleaved(p, m, num_chunks.unwrap_or(2)),
        ScheduleKind::ZeroBubbleH1 => zero_bubble_h1(p, m),
        ScheduleKind::ZeroBubbleV => zero_bubble_v(p, m),
        ScheduleKind::DualPipeV => dual_pipe_v(p, m, true),
    }
}

/// Refuses no ranks, no micro-batches, and more than memory holds.
fn check_numbers(kind: ScheduleKind, p: usize, m: usize, chunks: usize) -> Result<(), ScheduleError> {
    for (n, what) in [(p, "ranks"), (m, "micro-batches"), (chunks, "chunks a rank")] {
        if n == 0 {
            return Err(ScheduleError::Numbers {
                schedule: kind.name(),
                what: format!("0 {what}"),
                mend: "there must be at least 1".into(),
            });
        }
    }
    check_size(p.saturating_mul(chunks), m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_their_spellings() {
        for kind in ScheduleKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        assert_eq!("Interleaved1F1B".parse(), Ok(ScheduleKind::Interleaved));
        assert_eq!("ZB_H1".parse(), Ok(ScheduleKind::ZeroBubbleH1));
        assert_eq!("DualPipeV".parse(), Ok(ScheduleKind::DualPipeV));
        let error = |s: &str| s.parse::<ScheduleKind>().unwrap_err().to_string();
        assert!(error("1f1p").contains("did you mean \"1f1b\"?"));
        assert!(error("dual_pipe").contains("did you mean \"dualpipev\"?"));
        assert!(error("chimera").contains("there are gpipe, 1f1b, interleaved"));
    }

    #[test]
    fn impossible_numbers_name_the_mend() {
        let error = |kind, p, m, v| build(kind, p, m, v).unwrap_err().to_string();
        for kind in ScheduleKind::ALL {
            assert!(error(kind, 0, 8, None).contains("0 ranks"), "{kind}");
            assert!(error(kind, 4, 0, None).contains("0 micro-batches"), "{kind}");
            assert!(error(kind, 1 << 40, 1 << 60, None).contains("too large"), "{kind}");
        }
        let text = error(ScheduleKind::Interleaved, 4, 10, None);
        assert!(text.contains("10 micro-batches") && text.contains("8 or 12"), "{text}");
        let text = error(ScheduleKind::Interleaved, 4, 3, None);
        assert!(text.contains("take 4 micro-batches"), "{text}");
        assert!(error(ScheduleKind::Interleaved, 4, 8, Some(1)).contains("1f1b"));
        assert!(error(ScheduleKind::Interleaved, 4, 8, Some(0)).contains("0 chunks"));
        assert!(error(ScheduleKind::ZeroBubbleV, 4, 8, Some(3)).contains("it has always 2"));
        assert!(error(ScheduleKind::DualPipeV, 4, 7, None).contains("at least 8"));
    }
}
