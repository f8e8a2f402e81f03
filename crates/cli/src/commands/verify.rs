//! `phalanx verify parity DIR...` and `phalanx verify precision TEXT`

use phalanx_parallel::Exactness;
use phalanx_report::Table;
use phalanx_train::{near_lossless, parity};
use serde_json::json;
use std::path::PathBuf;

use crate::args::{Precision, Verify};
use crate::out;
use crate::outcome::{Outcome, Result, chain};

pub fn run(what: Verify) -> Result<Outcome> {
    match what {
        Verify::Parity { dirs, json, threads } => with_golden(dirs, json, threads),
        Verify::Precision(options) => precision(options),
    }
}

fn precision(a: Precision) -> Result<Outcome> {
    let text = std::fs::read(&a.text).map_err(|e| format!("{}: {e}", a.text.display()))?;
    let rt = super::runtime(a.threads)?;
    let recipes = if a.recipes.is_empty() {
        Exactness::ALL.into_iter().filter(|&e| e != Exactness::F32).collect()
    } else {
        a.recipes
    };
    let options =
        near_lossless::Options { steps: a.steps, seeds: a.seeds, batch: a.batch, seq: a.seq, lr: a.lr, recipes };
    let found = near_lossless::verify(&rt, &text, &options, &mut |run| eprintln!("training: {run}"))?;
    let header = ["recipe", "seed", "loss", "exact", "error at most", "on average", "seeds differ by", "verdict"];
    let mut table = Table::new(super::style(), &header);
    let percent = |x: f64| format!("{:.3} %", 100.0 * x);
    for f in &found {
        if a.json {
            out::line(serde_json::to_string(f)?)?;
        }
        table.row([
            f.recipe.clone(),
            f.seed.to_string(),
            format!("{:.4}", f.loss),
            format!("{:.4}", f.exact_loss),
            percent(f.error_max),
            percent(f.error_mean),
            percent(f.seed_spread),
            if f.pass { "pass" } else { "FAIL" }.into(),
        ]);
    }
    if !a.json {
        out::text(table)?;
    }
    let mut recipes = found.iter().filter(|f| f.recipe != "control");
    Ok(if recipes.all(|f| f.pass) { Outcome::Done } else { Outcome::Failed })
}

fn with_golden(dirs: Vec<PathBuf>, json: bool, threads: Option<usize>) -> Result<Outcome> {
    let rt = super::runtime(threads)?;
    let mut outcome = Outcome::Done;
    let mut rows = Vec::new();
    for dir in &dirs {
        match parity::verify(&rt, dir) {
            Ok(p) => {
                if !p.pass {
                    outcome = Outcome::Failed;
                }
                if json {
                    out::line(serde_json::to_string(&p)?)?;
                }
                rows.push(p);
            }
            Err(e) => {
                let unsupported = parity::is_unsupported(&e);
                eprintln!("{}: {}", if unsupported { "unsupported" } else { "error" }, chain(&e));
                if json {
                    out::line(json!({"case": parity::case_name(dir), "pass": false, "error": chain(&e)}))?;
                }
                if !unsupported {
                    outcome = Outcome::Failed;
                } else if outcome == Outcome::Done {
                    outcome = Outcome::Unsupported;
                }
            }
        }
    }
    if !json {
        let header =
            ["case", "logits", "loss", "worst gradient", "of", "train losses", "grad norms", "greedy", "verdict"];
        let mut table = Table::new(super::style(), &header);
        for p in rows {
            table.row([
                p.case,
                format!("{:.1e}", p.logits_abs),
                format!("{:.1e}", p.loss_abs),
                format!("{:.1e}", p.grad_rel_max),
                p.grad_worst,
                format!("{:.1e}", p.train_loss_abs_max),
                format!("{:.1e}", p.grad_norm_rel_max),
                if p.greedy_equal { "equal" } else { "differs" }.into(),
                if p.pass { "pass" } else { "FAIL" }.into(),
            ]);
        }
        out::text(table)?;
    }
    Ok(outcome)
}
