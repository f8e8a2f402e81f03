//! `phalanx report RUN`

use std::collections::BTreeMap;

use phalanx_report::Table;
use phalanx_report::stragglers::{RankStep, stragglers};
use phalanx_train::run_files::RANKS_FILE;
use serde_json::json;

use crate::args::Report;
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(a: &Report) -> Result<Outcome> {
    let path = a.run.join(RANKS_FILE);
    let text = std::fs::read_to_string(&path).map_err(|e| {
        format!("{}: {e}; a run on several ranks (`mesh:`) leaves this file in its output_dir", path.display())
    })?;
    // A step that was done again after a stop counts as it was done last.
    let mut by_step: BTreeMap<(u64, usize), RankStep> = BTreeMap::new();
    for (i, line) in text.lines().enumerate() {
        let step = serde_json::from_str(line).ok().and_then(|v| RankStep::from_json(&v));
        match step {
            Some(s) => drop(by_step.insert((s.step, s.rank), s)),
            // A run that was killed may leave half a line.
            None if i + 1 == text.lines().count() => {}
            None => return Err(format!("{}: line {} is not one of a run's", path.display(), i + 1).into()),
        }
    }
    let last = by_step.keys().map(|k| k.0).max().unwrap_or(0);
    // The first step allocates and is like no other.
    let from = last.saturating_sub(a.last).max(u64::from(last > 3));
    let steps: Vec<RankStep> = by_step.into_values().filter(|s| s.step > from).collect();
    let found = stragglers(&steps);
    let mut table =
        Table::new(super::style(), &["rank", "role", ">compute", ">data", ">waits", ">moves", ">tokens", ""]);
    let ranks = steps.iter().map(|s| s.rank).max().map_or(0, |r| r + 1);
    for rank in 0..ranks {
        let own: Vec<&RankStep> = steps.iter().filter(|s| s.rank == rank).collect();
        let Some(first) = own.first() else { continue };
        let mean = |of: &dyn Fn(&RankStep) -> f64| own.iter().map(|s| of(s)).sum::<f64>() / own.len() as f64;
        let group = |i: usize| mean(&|s| s.groups.values().map(|g| g[i]).sum());
        let (compute, data, tokens) = (mean(&|s| s.compute), mean(&|s| s.data), mean(&|s| s.tokens as f64));
        let says: Vec<String> = found.iter().filter(|f| f.rank == rank).map(|f| f.cause.advice()).collect();
        if a.json {
            out::line(
                json!({"rank": rank, "role": first.role, "compute_s": compute, "data_s": data, "wait_s": group(0),
                "move_s": group(1), "tokens": tokens, "stragglers": says}),
            )?;
        }
        let ms = |s: f64| format!("{:.1} ms", 1e3 * s);
        table.row([
            rank.to_string(),
            first.role.clone(),
            ms(compute),
            ms(data),
            ms(group(0)),
            ms(group(1)),
            format!("{tokens:.0}"),
            says.join("; "),
        ]);
    }
    if !a.json {
        out::text(table)?;
        out::line(match found.len() {
            0 => format!("means of steps {} to {last}; no rank keeps the others waiting", from + 1),
            n => format!("means of steps {} to {last}; {n} to look at", from + 1),
        })?;
    }
    Ok(Outcome::Done)
}
