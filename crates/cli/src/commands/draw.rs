//! `phalanx plan draw`

use phalanx_parallel::pipeline::draw::{TextOptions, svg, text};
use phalanx_parallel::pipeline::{
    Durations, LayerSplit, Schedule, ScheduleKind, Timeline, build, simulate, split_layers, validate,
};
use serde_json::json;

use crate::args::Draw;
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(args: &Draw) -> Result<Outcome> {
    let kind: ScheduleKind = args.schedule.parse()?;
    let schedule = build(kind, args.ranks, args.micro_batches, args.chunks)?;
    validate(&schedule)?;
    let time = simulate(&schedule, &durations(args, &schedule)?)?;
    if let Some(path) = &args.svg {
        std::fs::write(path, svg(&schedule, &time)).map_err(|e| format!("--svg {}: {e}", path.display()))?;
    }
    if args.json {
        out::line(record(kind, &schedule, &time))?;
    } else {
        let options = TextOptions { width: args.width, colour: super::style().has_colour() };
        out::text(text(&schedule, &time, &options))?;
        if let Some(path) = &args.svg {
            out::line(format_args!("wrote {}", path.display()))?;
        }
    }
    Ok(Outcome::Done)
}

fn durations(args: &Draw, schedule: &Schedule) -> Result<Durations> {
    let mut durations = Durations::new(args.forward, args.input_grad, args.weight_grad).latency(args.latency);
    durations.overlapped = args.overlapped;
    if let Some(layout) = &args.layout {
        // A layout says how many layers there are.
        let split = LayerSplit::Layout(layout.clone());
        let stages = split_layers(split.num_layers(schedule.num_stages())?, schedule.num_stages(), &split)?;
        durations.stage_scale = stages.iter().map(|s| s.num_layers() as f64).collect();
    }
    Ok(durations)
}

fn record(kind: ScheduleKind, schedule: &Schedule, time: &Timeline) -> serde_json::Value {
    let each = |of: &dyn Fn(usize) -> f64| (0..time.ranks.len()).map(of).collect::<Vec<_>>();
    json!({
        "schedule": kind,
        "num_ranks": schedule.num_ranks(),
        "num_micro_batches": schedule.num_micro_batches,
        "rank_of_stage": schedule.placement.rank_of_stage,
        "total": time.total,
        "efficiency": time.efficiency(),
        "idle": each(&|r| time.ranks[r].idle),
        "idle_within": each(&|r| time.ranks[r].idle_within),
        "peak_activations": time.peak_activations(),
        "ranks": time.ranks.iter().map(|r| &r.spans).collect::<Vec<_>>(),
    })
}
