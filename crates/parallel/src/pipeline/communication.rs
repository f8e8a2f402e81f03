//! Messages between ranks: put into a schedule, and checked.
//!
//! # Where they go
//! A send stands right after the action that makes its tensor. The place of a receive depends on what sends do:
//!
//! * [`Sends::Block`]: a send ends only when its receive is reached (a rendezvous, as of MPI with large messages). Both ends of a message
//!   stand at one point of a single order of all events, computing and messages, that a step with equal durations goes through. Each rank's
//!   list is that order cut down to the rank, so the first event not yet done can always be done: no deadlock, whatever actions really take.
//! * [`Sends::Buffer`]: a send puts its tensor down and goes on. Receives stand as late as they can, right before the action that needs them,
//!   so that a rank never waits for what it does not need yet. Only the receive waits, for a message that some action before it in the order
//!   makes: no deadlock either. *Every* send must be able to go on without its receive, that is, channels must not be bounded
//!   (what lies in them is at most what the ranks' activations hold).
//!
//! In both, what one rank sends to another is received in the order in which it was sent. So one queue for each ordered pair of ranks is
//! enough, and no message needs a tag.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::execution::walk;
use super::{Action, Durations, Part, Schedule, ScheduleError, simulate};

/// Whether a send waits for its receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sends {
    /// A send ends when the other rank has come to its receive.
    Block,
    /// A send leaves its tensor in a buffer and goes on.
    Buffer,
}

/// What a checked schedule asks of the channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channels {
    /// Messages in all.
    pub num_messages: usize,
    /// Messages of each pair (from, to) of ranks that talks: a queue each is enough.
    pub pairs: BTreeMap<(usize, usize), usize>,
}

/// A tensor on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    from: usize,
    to: usize,
    send: Action,
    recv: Action,
}

/// The messages that an action gives rise to.
fn messages(schedule: &Schedule, rank: usize, action: &Action) -> impl Iterator<Item = Message> {
    let rank_of = &schedule.placement.rank_of_stage;
    let forward = action.forward().filter(|p| p.stage + 1 < rank_of.len()).map(|part| {
        let to = rank_of[part.stage + 1];
        let next = Part::new(part.stage + 1, part.micro_batch);
        let send = Action::SendActivation { part, to };
        Message { from: rank, to, send, recv: Action::RecvActivation { part: next, from: rank } }
    });
    let backward = action.input_grad().filter(|p| p.stage > 0).map(|part| {
        let to = rank_of[part.stage - 1];
        let before = Part::new(part.stage - 1, part.micro_batch);
        let send = Action::SendGrad { part, to };
        Message { from: rank, to, send, recv: Action::RecvGrad { part: before, from: rank } }
    });
    // Neighbours on one rank hand over without a message.
    forward.into_iter().chain(backward).filter(move |m| m.to != rank)
}

/// What an action has to receive before, as receives.
fn needed(schedule: &Schedule, rank: usize, action: &Action) -> impl Iterator<Item = Action> {
    let rank_of = &schedule.placement.rank_of_stage;
    let forward = action.forward().filter(|p| p.stage > 0);
    let forward = forward.map(|part| Action::RecvActivation { part, from: rank_of[part.stage - 1] });
    let backward = action.input_grad().filter(|p| p.stage + 1 < rank_of.len());
    let backward = backward.map(|part| Action::RecvGrad { part, from: rank_of[part.stage + 1] });
    let other = move |a: &Action| !matches!(a, Action::RecvActivation { from, .. } | Action::RecvGrad { from, .. } if *from == rank);
    forward.into_iter().chain(backward).filter(other)
}

/// The schedule with its messages; what messages it had are taken out first.
///
/// ```
/// use phalanx_parallel::pipeline::{Sends, build, check_communication, with_communication};
/// let schedule = with_communication(&build("1f1b".parse()?, 2, 2, None)?, Sends::Block)?;
/// let text: Vec<_> = schedule.ranks[1].iter().map(ToString::to_string).collect();
/// assert_eq!(text[..4], ["recv_f1.0<0", "F1.0", "recv_f1.1<0", "B1.0"]);
/// assert_eq!(check_communication(&schedule, Sends::Block)?.num_messages, 4);
/// # Ok::<(), phalanx_parallel::pipeline::ScheduleError>(())
/// ```
///
/// # Errors
/// A schedule that is not sound.
pub fn with_communication(schedule: &Schedule, sends: Sends) -> Result<Schedule, ScheduleError> {
    let bare = schedule.without_communication();
    super::validate(&bare)?;
    let ranks = match sends {
        Sends::Block => blocking(&bare)?,
        Sends::Buffer => buffered(&bare)?,
    };
    Ok(Schedule { ranks, ..bare })
}

/// One order of all events, from a step in which everything takes as long, cut down to ranks.
fn blocking(schedule: &Schedule) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let time = simulate(schedule, &Durations::new(1.0, 1.0, 1.0))?;
    enum Event {
        Message(Message),
        Compute(usize, Action),
    }
    let mut events = vec![];
    for (rank, line) in time.ranks.iter().enumerate() {
        for span in &line.spans {
            // Nominal times are whole numbers. At one time messages come first: someone may be about to need them.
            events.push(((span.start as u64, 1, rank), Event::Compute(rank, span.action)));
            let ended = messages(schedule, rank, &span.action).map(|m| ((span.end as u64, 0, rank), Event::Message(m)));
            events.extend(ended);
        }
    }
    events.sort_by_key(|(key, _)| *key);
    let mut ranks = vec![vec![]; schedule.num_ranks()];
    for (_, event) in events {
        match event {
            Event::Compute(rank, action) => ranks[rank].push(action),
            Event::Message(m) => {
                ranks[m.from].push(m.send);
                ranks[m.to].push(m.recv);
            }
        }
    }
    Ok(ranks)
}

/// Sends at once; receives when needed, together with those sent before them by the same rank.
fn buffered(schedule: &Schedule) -> Result<Vec<Vec<Action>>, ScheduleError> {
    let mut ranks = vec![vec![]; schedule.num_ranks()];
    let mut channels: BTreeMap<(usize, usize), VecDeque<Action>> = BTreeMap::new();
    walk(schedule, |rank, _, action| {
        for wanted in needed(schedule, rank, &action) {
            let (Action::RecvActivation { from, .. } | Action::RecvGrad { from, .. }) = wanted else { continue };
            let Some(queue) = channels.get_mut(&(from, rank)) else { continue };
            if let Some(at) = queue.iter().position(|m| *m == wanted) {
                ranks[rank].extend(queue.drain(..=at));
            }
        }
        ranks[rank].push(action);
        for m in messages(schedule, rank, &action) {
            ranks[rank].push(m.send);
            channels.entry((rank, m.to)).or_default().push_back(m.recv);
        }
    })?;
    Ok(ranks)
}

/// Runs the lists with their messages and checks that every send meets exactly one receive, that both ranks of a pair have their messages in
/// one order, that every action has received what it needs and sends only what it has made, and that the run ends.
///
/// # Errors
/// The first message that goes wrong, or a deadlock with what each rank waits for.
pub fn check_communication(schedule: &Schedule, sends: Sends) -> Result<Channels, ScheduleError> {
    schedule.check_shape()?;
    let mut run = Run::new(schedule);
    loop {
        let mut moved = false;
        for rank in 0..schedule.num_ranks() {
            while run.step(rank, sends)? {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    run.end()
}

/// How far each rank has come.
struct Run<'a> {
    schedule: &'a Schedule,
    next: Vec<usize>,
    /// What each rank has received and not used.
    inbox: Vec<Vec<Action>>,
    /// What each rank has made and not sent.
    outbox: Vec<Vec<Message>>,
    buffers: BTreeMap<(usize, usize), VecDeque<Action>>,
    channels: Channels,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule) -> Run<'a> {
        let n = schedule.num_ranks();
        Run {
            schedule,
            next: vec![0; n],
            inbox: vec![vec![]; n],
            outbox: vec![vec![]; n],
            buffers: BTreeMap::new(),
            channels: Channels { num_messages: 0, pairs: BTreeMap::new() },
        }
    }

    fn head(&self, rank: usize) -> Option<Action> {
        self.schedule.ranks.get(rank)?.get(self.next[rank]).copied()
    }

    /// Does the rank's next entry if that can be done now.
    fn step(&mut self, rank: usize, sends: Sends) -> Result<bool, ScheduleError> {
        let Some(action) = self.head(rank) else { return Ok(false) };
        let wrong = |what: String| Err(ScheduleError::Message { rank, action, what });
        match action {
            Action::SendActivation { to, .. } | Action::SendGrad { to, .. } => {
                let Some(at) = self.outbox[rank].iter().position(|m| m.send == action) else {
                    return wrong("it sends what was not made, or not to that rank, or sends it twice".into());
                };
                let message = self.outbox[rank][at];
                if sends == Sends::Block {
                    match self.head(to) {
                        Some(other) if other == message.recv => {
                            self.next[to] += 1;
                            self.inbox[to].push(other);
                        }
                        Some(other) if receives_from(&other) == Some(rank) => {
                            return wrong(format!("rank {to} receives {other} at this point"));
                        }
                        _ => return Ok(false),
                    }
                } else {
                    self.buffers.entry((rank, to)).or_default().push_back(message.recv);
                }
                self.outbox[rank].remove(at);
                self.channels.num_messages += 1;
                *self.channels.pairs.entry((rank, to)).or_default() += 1;
            }
            Action::RecvActivation { from, .. } | Action::RecvGrad { from, .. } => {
                // With sends that block, the sender does it.
                let Some(first) = self.buffers.get_mut(&(from, rank)).and_then(VecDeque::pop_front) else {
                    return Ok(false);
                };
                if first != action {
                    return wrong(format!("the message that comes from rank {from} at this point is that of {first}"));
                }
                self.inbox[rank].push(action);
            }
            compute => {
                for wanted in needed(self.schedule, rank, &compute) {
                    match self.inbox[rank].iter().position(|a| *a == wanted) {
                        Some(at) => {
                            self.inbox[rank].swap_remove(at);
                        }
                        None => return wrong(format!("it needs {wanted}, which stands nowhere before it")),
                    }
                }
                self.outbox[rank].extend(messages(self.schedule, rank, &compute));
            }
        }
        self.next[rank] += 1;
        Ok(true)
    }

    fn end(self) -> Result<Channels, ScheduleError> {
        let mut waiting = vec![];
        for rank in 0..self.schedule.num_ranks() {
            if let Some(action) = self.head(rank) {
                let needs = match action {
                    Action::SendActivation { to, .. } | Action::SendGrad { to, .. } => format!("rank {to} to receive"),
                    _ => "its message".into(),
                };
                waiting.push((rank, action, needs));
            } else if let Some(lost) = self.outbox[rank].first() {
                let what = format!("made for rank {} and never sent", lost.to);
                return Err(ScheduleError::Message { rank, action: lost.send, what });
            } else if let Some(action) = self.inbox[rank].first() {
                let what = "received and never used".into();
                return Err(ScheduleError::Message { rank, action: *action, what });
            }
        }
        if !waiting.is_empty() {
            return Err(ScheduleError::Deadlock { waiting });
        }
        if let Some(((_, to), first)) = self.buffers.iter().find_map(|(pair, q)| Some((pair, q.front()?))) {
            let what = "sent and never received".into();
            return Err(ScheduleError::Message { rank: *to, action: *first, what });
        }
        super::validate(self.schedule)?;
        Ok(self.channels)
    }
}

fn receives_from(action: &Action) -> Option<usize> {
    match action {
        Action::RecvActivation { from, .. } | Action::RecvGrad { from, .. } => Some(*from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ScheduleKind, build};
    use super::*;

    fn schedule(kind: ScheduleKind, sends: Sends) -> Schedule {
        with_communication(&build(kind, 3, 6, None).unwrap(), sends).unwrap()
    }

    fn fault(schedule: &Schedule, sends: Sends) -> String {
        check_communication(schedule, sends).unwrap_err().to_string()
    }

    #[test]
    fn both_ways_pass_the_check() {
        for kind in ScheduleKind::ALL {
            for sends in [Sends::Block, Sends::Buffer] {
                let s = schedule(kind, sends);
                let channels = check_communication(&s, sends).unwrap();
                // Each boundary between stages that lies between ranks is crossed twice by each micro-batch.
                let crossed = s.placement.rank_of_stage.windows(2).filter(|w| w[0] != w[1]).count();
                assert_eq!(channels.num_messages, 2 * 6 * crossed, "{kind}");
                assert_eq!(channels.pairs.values().sum::<usize>(), channels.num_messages);
                // What blocks nobody when sends block does so neither when they do not.
                check_communication(&s, Sends::Buffer).unwrap();
                assert_eq!(s.without_communication(), build(kind, 3, 6, None).unwrap());
                assert_eq!(with_communication(&s, sends).unwrap(), s);
            }
        }
    }

    #[test]
    fn late_receives_with_sends_that_block_are_found_out() {
        // The classic: both ranks send first.
        let s = schedule(ScheduleKind::OneForwardOneBackward, Sends::Buffer);
        let text = fault(&s, Sends::Block);
        assert!(text.contains("deadlock") && text.contains("to receive"), "{text}");
    }

    #[test]
    fn faults_are_named() {
        let good = schedule(ScheduleKind::OneForwardOneBackward, Sends::Buffer);
        let at = |text: &str| good.ranks[1].iter().position(|a| a.to_string() == text).unwrap();
        let edit = |change: &dyn Fn(&mut Vec<Action>)| {
            let mut s = good.clone();
            change(&mut s.ranks[1]);
            fault(&s, Sends::Buffer)
        };
        let recv = at("recv_f1.1<0");
        let text = edit(&|l| {
            l.remove(recv);
        });
        assert!(text.contains("F1.1 on rank 1: it needs recv_f1.1<0"), "{text}");
        let later = at("recv_f1.2<0");
        let text = edit(&|l| l.swap(recv, later));
        assert!(text.contains("recv_f1.2<0 on rank 1") && text.contains("that of recv_f1.1<0"), "{text}");
        let send = at("send_f1.0>2");
        assert!(edit(&|l| l.insert(send, l[send])).contains("sends it twice"));
        assert!(edit(&|l| l.swap(send, send - 1)).contains("what was not made"));
        assert!(
            edit(&|l| {
                l.pop();
            })
            .contains("never sent")
        );
        let text = edit(&|l| l.insert(recv, l[recv]));
        assert!(text.contains("that of recv_f1.2<0") || text.contains("deadlock"), "{text}");
    }
}
