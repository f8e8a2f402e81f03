//! What a rank does next.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One stage for one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// Stage, from 0 (embedding) to the last (loss).
    pub stage: usize,
    /// Micro-batch, from 0.
    pub micro_batch: usize,
}

impl Part {
    /// Stage `stage` of micro-batch `micro_batch`.
    pub const fn new(stage: usize, micro_batch: usize) -> Part {
        Part { stage, micro_batch }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.stage, self.micro_batch)
    }
}

/// One entry of a rank's list. As text, and so in JSON: `F0.3` (stage 0, micro-batch 3), `I0.3`, `W0.3`, `B0.3`, `F0.5+B7.2`,
/// `send_f0.3>1` (output of stage 0 to rank 1), `recv_f1.3<0` (input of stage 1 from rank 0), `send_b1.3>0` (gradient of the input of
/// stage 1 to rank 0), `recv_b0.3<1` (gradient of the output of stage 0 from rank 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Action {
    /// F: the stage's output from its input.
    Forward(Part),
    /// I: the gradient of the stage's input.
    InputGrad(Part),
    /// W: the gradient of the stage's weights, at any time after I.
    WeightGrad(Part),
    /// B: I and W in one.
    Backward(Part),
    /// F⊕B: a forward and a backward at once, each hiding the other's messages.
    Overlapped {
        /// What goes forward.
        forward: Part,
        /// What goes backward.
        backward: Part,
    },
    /// Give a stage's output to the rank of the next stage.
    SendActivation {
        /// The stage that made it.
        part: Part,
        /// The rank of the next stage.
        to: usize,
    },
    /// Take a stage's input from the rank of the stage before.
    RecvActivation {
        /// The stage that needs it.
        part: Part,
        /// The rank of the stage before.
        from: usize,
    },
    /// Give the gradient of a stage's input to the rank of the stage before.
    SendGrad {
        /// The stage that made it.
        part: Part,
        /// The rank of the stage before.
        to: usize,
    },
    /// Take the gradient of a stage's output from the rank of the next stage.
    RecvGrad {
        /// The stage that needs it.
        part: Part,
        /// The rank of the next stage.
        from: usize,
    },
}

impl Action {
    /// Whether it computes; otherwise it moves a tensor.
    pub const fn is_compute(&self) -> bool {
        matches!(
            self,
            Action::Forward(_)
                | Action::InputGrad(_)
                | Action::WeightGrad(_)
                | Action::Backward(_)
                | Action::Overlapped { .. }
        )
    }

    /// What goes forward here, if anything.
    pub const fn forward(&self) -> Option<Part> {
        match *self {
            Action::Forward(p) | Action::Overlapped { forward: p, .. } => Some(p),
            _ => None,
        }
    }

    /// Whose gradient of the input is made here, if anyone's.
    pub const fn input_grad(&self) -> Option<Part> {
        match *self {
            Action::InputGrad(p) | Action::Backward(p) | Action::Overlapped { backward: p, .. } => Some(p),
            _ => None,
        }
    }

    /// Whose gradient of the weights is made here, if anyone's.
    pub const fn weight_grad(&self) -> Option<Part> {
        match *self {
            Action::WeightGrad(p) | Action::Backward(p) | Action::Overlapped { backward: p, .. } => Some(p),
            _ => None,
        }
    }

    /// Every part that is named: one, or two for an overlapped pair.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let (first, second) = match *self {
            Action::Forward(p) | Action::InputGrad(p) | Action::WeightGrad(p) | Action::Backward(p) => (p, None),
            Action::Overlapped { forward, backward } => (forward, Some(backward)),
            Action::SendActivation { part, .. }
            | Action::RecvActivation { part, .. }
            | Action::SendGrad { part, .. }
            | Action::RecvGrad { part, .. } => (part, None),
        };
        std::iter::once(first).chain(second)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Forward(p) => write!(f, "F{p}"),
            Action::InputGrad(p) => write!(f, "I{p}"),
            Action::WeightGrad(p) => write!(f, "W{p}"),
            Action::Backward(p) => write!(f, "B{p}"),
            Action::Overlapped { forward, backward } => write!(f, "F{forward}+B{backward}"),
            Action::SendActivation { part, to } => write!(f, "send_f{part}>{to}"),
            Action::RecvActivation { part, from } => write!(f, "recv_f{part}<{from}"),
            Action::SendGrad { part, to } => write!(f, "send_b{part}>{to}"),
            Action::RecvGrad { part, from } => write!(f, "recv_b{part}<{from}"),
        }
    }
}

impl From<Action> for String {
    fn from(a: Action) -> String {
        a.to_string()
    }
}

/// A text that is no action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is no action of a schedule; write F0.3, I0.3, W0.3, B0.3, F0.5+B7.2, send_f0.3>1, recv_f1.3<0, send_b1.3>0 or recv_b0.3<1"
)]
pub struct ActionError(pub String);

impl TryFrom<String> for Action {
    type Error = ActionError;
    fn try_from(s: String) -> Result<Action, ActionError> {
        s.parse()
    }
}

impl FromStr for Action {
    type Err = ActionError;
    fn from_str(s: &str) -> Result<Action, ActionError> {
        read(s).ok_or_else(|| ActionError(s.to_owned()))
    }
}

fn read(s: &str) -> Option<Action> {
    if let Some((f, b)) = s.split_once('+') {
        return Some(Action::Overlapped {
            forward: part(f.strip_prefix('F')?)?,
            backward: part(b.strip_prefix('B')?)?,
        });
    }
    let message = |rest: &str, arrow: char| {
        let (p, rank) = rest.split_once(arrow)?;
        Some((part(p)?, number(rank)?))
    };
    if let Some(rest) = s.strip_prefix("send_f") {
        return message(rest, '>').map(|(part, to)| Action::SendActivation { part, to });
    }
    if let Some(rest) = s.strip_prefix("recv_f") {
        return message(rest, '<').map(|(part, from)| Action::RecvActivation { part, from });
    }
    if let Some(rest) = s.strip_prefix("send_b") {
        return message(rest, '>').map(|(part, to)| Action::SendGrad { part, to });
    }
    if let Some(rest) = s.strip_prefix("recv_b") {
        return message(rest, '<').map(|(part, from)| Action::RecvGrad { part, from });
    }
    let (kind, rest) = s.split_at_checked(1)?;
    let p = part(rest)?;
    match kind {
        "F" => Some(Action::Forward(p)),
        "I" => Some(Action::InputGrad(p)),
        "W" => Some(Action::WeightGrad(p)),
        "B" => Some(Action::Backward(p)),
        _ => None,
    }
}

fn part(s: &str) -> Option<Part> {
    let (stage, micro_batch) = s.split_once('.')?;
    Some(Part::new(number(stage)?, number(micro_batch)?))
}

/// Digits only: no sign, no space.
fn number(s: &str) -> Option<usize> {
    if s.bytes().all(|b| b.is_ascii_digit()) { s.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let p = Part::new(12, 305);
        let q = Part::new(0, 3);
        let all = [
            (Action::Forward(p), "F12.305"),
            (Action::InputGrad(q), "I0.3"),
            (Action::WeightGrad(q), "W0.3"),
            (Action::Backward(q), "B0.3"),
            (Action::Overlapped { forward: q, backward: p }, "F0.3+B12.305"),
            (Action::SendActivation { part: q, to: 1 }, "send_f0.3>1"),
            (Action::RecvActivation { part: q, from: 7 }, "recv_f0.3<7"),
            (Action::SendGrad { part: q, to: 1 }, "send_b0.3>1"),
            (Action::RecvGrad { part: q, from: 1 }, "recv_b0.3<1"),
        ];
        for (action, text) in all {
            assert_eq!(action.to_string(), text);
            assert_eq!(text.parse(), Ok(action));
            let json = serde_json::to_string(&action).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<Action>(&json).unwrap(), action);
        }
    }

    #[test]
    fn other_text_is_refused() {
        for text in
            ["", "F", "F0", "F0.", "F.3", "X0.3", "F0.3+F1.2", "send_f0.3", "send_f0.3<1", "F+0.3", "F-1.3", "é0.3"]
        {
            assert!(text.parse::<Action>().unwrap_err().to_string().contains("no action"), "{text}");
        }
    }
}
