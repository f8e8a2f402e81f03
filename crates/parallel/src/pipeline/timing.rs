//! When everything happens: a simulator of events.

use serde::{Deserialize, Serialize};

use super::execution::walk;
use super::{Action, Part, Schedule, ScheduleError};

/// How long actions take, in any one unit.
///
/// F, I and W are times of one *stage*. To compare schedules with different numbers of stages a rank, give each its share:
/// [`Durations::of_rank_share`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Durations {
    /// F.
    pub forward: f64,
    /// I.
    pub input_grad: f64,
    /// W; B takes I + W.
    pub weight_grad: f64,
    /// An overlapped pair F⊕B of average stages; F + B if left out (nothing gained). For other stages it stretches as F + B does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlapped: Option<f64>,
    /// From the end of an action to when another rank has its result. Sending does not keep a rank busy; within a rank it takes no time.
    #[serde(default)]
    pub latency: f64,
    /// How many times as long as above each stage takes; all 1 if empty. For layers that do not divide evenly, or the head on the last stage.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stage_scale: Vec<f64>,
}

impl Durations {
    /// F, I and W of a stage; pairs gain nothing, messages take no time, stages are alike.
    pub fn new(forward: f64, input_grad: f64, weight_grad: f64) -> Durations {
        Durations { forward, input_grad, weight_grad, overlapped: None, latency: 0.0, stage_scale: vec![] }
    }

    /// The same model cut into `num_chunks` stages a rank: `forward` and so on are times of all layers of a rank.
    pub fn of_rank_share(forward: f64, input_grad: f64, weight_grad: f64, num_chunks: usize) -> Durations {
        let n = num_chunks.max(1) as f64;
        Durations::new(forward / n, input_grad / n, weight_grad / n)
    }

    /// With the time of an overlapped pair.
    pub fn overlapped(self, pair: f64) -> Durations {
        Durations { overlapped: Some(pair), ..self }
    }

    /// With the time of a message.
    pub fn latency(self, latency: f64) -> Durations {
        Durations { latency, ..self }
    }

    /// With a factor for each stage.
    pub fn stage_scale(self, stage_scale: Vec<f64>) -> Durations {
        Durations { stage_scale, ..self }
    }

    fn check(&self, num_stages: usize) -> Result<(), ScheduleError> {
        let values = [
            ("forward", self.forward),
            ("input grad", self.input_grad),
            ("weight grad", self.weight_grad),
            ("overlapped", self.overlapped.unwrap_or(0.0)),
            ("latency", self.latency),
        ];
        let scales = self.stage_scale.iter().map(|&s| ("the scale of a stage", s));
        for (name, value) in values.into_iter().chain(scales) {
            if !value.is_finite() || value < 0.0 {
                return Err(ScheduleError::Durations { what: format!("{name} is {value}") });
            }
        }
        if !self.stage_scale.is_empty() && self.stage_scale.len() != num_stages {
            let given = self.stage_scale.len();
            return Err(ScheduleError::Durations { what: format!("{given} scales for {num_stages} stages") });
        }
        Ok(())
    }

    fn scale(&self, p: Part) -> f64 {
        self.stage_scale.get(p.stage).copied().unwrap_or(1.0)
    }

    /// How long an action takes; 0 for messages.
    pub fn of(&self, action: &Action) -> f64 {
        let backward = self.input_grad + self.weight_grad;
        match *action {
            Action::Forward(p) => self.forward * self.scale(p),
            Action::InputGrad(p) => self.input_grad * self.scale(p),
            Action::WeightGrad(p) => self.weight_grad * self.scale(p),
            Action::Backward(p) => backward * self.scale(p),
            Action::Overlapped { forward: f, backward: b } => {
                let apart = self.forward * self.scale(f) + backward * self.scale(b);
                match self.overlapped {
                    Some(pair) if self.stage_scale.is_empty() => pair,
                    Some(pair) if self.forward + backward > 0.0 => apart * (pair / (self.forward + backward)),
                    _ => apart,
                }
            }
            _ => 0.0,
        }
    }
}

/// An action in time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// What.
    pub action: Action,
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// A rank in time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RankTimeline {
    /// Its computing actions, in order.
    pub spans: Vec<Span>,
    /// Time it computes.
    pub busy: f64,
    /// Time of the step in which it does not compute: total − busy. This is *the* bubble.
    pub idle: f64,
    /// The part of `idle` between its first and its last action: 0 means that it never waits once it has begun, as in ZB-V, whose ranks only
    /// begin and end at different times.
    pub idle_within: f64,
    /// The most activations held at once, in stages × micro-batches.
    pub peak_stages: usize,
}

/// A schedule in time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// When the last rank ends.
    pub total: f64,
    /// Each rank.
    pub ranks: Vec<RankTimeline>,
    /// Stages a rank, on average.
    pub chunks_per_rank: f64,
}

impl Timeline {
    /// Share of the ranks' time that they compute: Σ busy / (ranks × total). 1 if nothing takes time.
    pub fn efficiency(&self) -> f64 {
        let busy: f64 = self.ranks.iter().map(|r| r.busy).sum();
        if self.total > 0.0 { busy / (self.total * self.ranks.len() as f64) } else { 1.0 }
    }

    /// The most activations each rank holds, in rank shares (all layers of a rank for one micro-batch).
    pub fn peak_activations(&self) -> Vec<f64> {
        self.ranks.iter().map(|r| r.peak_stages as f64 / self.chunks_per_rank).collect()
    }

    /// The longest that any rank does not compute.
    pub fn most_idle(&self) -> f64 {
        self.ranks.iter().map(|r| r.idle).fold(0.0, f64::max)
    }
}

/// Starts every action as soon as its rank is free and what it needs has arrived. Sends do not block; messages in the schedule, if any, are
/// not looked at, since who depends on whom follows from the stages.
///
/// # Errors
/// Durations that are none, sizes that do not fit, a deadlock.
pub fn simulate(schedule: &Schedule, durations: &Durations) -> Result<Timeline, ScheduleError> {
    durations.check(schedule.num_stages())?;
    schedule.check_shape()?;
    let (stages, m) = (schedule.num_stages(), schedule.num_micro_batches);
    let rank_of = &schedule.placement.rank_of_stage;
    let at = |p: Part| p.stage * m + p.micro_batch;
    // When F and I of each part end, on their own rank.
    let mut forward = vec![0.0; stages * m];
    let mut input_grad = vec![0.0; stages * m];
    let mut ranks = vec![RankTimeline::default(); schedule.num_ranks()];
    let mut free = vec![0.0_f64; schedule.num_ranks()];
    walk(schedule, |rank, _, action| {
        let arrival = |end: f64, from: usize| if rank_of[from] == rank { end } else { end + durations.latency };
        let mut start = free[rank];
        if let Some(p) = action.forward()
            && p.stage > 0
        {
            let from = Part::new(p.stage - 1, p.micro_batch);
            start = start.max(arrival(forward[at(from)], from.stage));
        }
        if let Some(p) = action.input_grad()
            && p.stage + 1 < stages
        {
            let from = Part::new(p.stage + 1, p.micro_batch);
            start = start.max(arrival(input_grad[at(from)], from.stage));
        }
        let length = durations.of(&action);
        let end = start + length;
        if let Some(p) = action.forward() {
            forward[at(p)] = end;
        }
        if let Some(p) = action.input_grad() {
            input_grad[at(p)] = end;
        }
        free[rank] = end;
        ranks[rank].busy += length;
        ranks[rank].spans.push(Span { action, start, end });
    })?;
    let total = free.into_iter().fold(0.0, f64::max);
    for rank in &mut ranks {
        rank.idle = (total - rank.busy).max(0.0);
        let first = rank.spans.first().map_or(0.0, |s| s.start);
        let last = rank.spans.last().map_or(0.0, |s| s.end);
        rank.idle_within = (last - first - rank.busy).max(0.0);
        rank.peak_stages = peak(&rank.spans);
    }
    Ok(Timeline { total, ranks, chunks_per_rank: schedule.chunks_per_rank() })
}

/// The most stages between the start of F and the end of W.
fn peak(spans: &[Span]) -> usize {
    let (mut held, mut most) = (0_usize, 0);
    for span in spans {
        held += usize::from(span.action.forward().is_some());
        most = most.max(held);
        held -= usize::from(span.action.weight_grad().is_some());
    }
    most
}

/// The efficiency that a schedule's bubble allows at best: [`Timeline::efficiency`] with messages that take no time. What an executor
/// reaches, divided by this, is what it loses by itself.
///
/// # Errors
/// As [`simulate`].
pub fn ideal_efficiency(schedule: &Schedule, durations: &Durations) -> Result<f64, ScheduleError> {
    Ok(simulate(schedule, &durations.clone().latency(0.0))?.efficiency())
}
