//! `phalanx verify parity DIR...`, `phalanx verify precision TEXT` and `phalanx verify layouts CONFIG`

use phalanx_models::ModelConfig;
use phalanx_parallel::Exactness;
use phalanx_report::Table;
use phalanx_train::{layouts, near_lossless, parity};
use serde_json::json;
use std::path::PathBuf;

use crate::args::{Layouts, Precision, Verify};
use crate::out;
use crate::outcome::{Outcome, Result, chain};

pub fn run(what: Verify) -> Result<Outcome> {
    match what {
        Verify::Parity { dirs, json, threads } => with_golden(dirs, json, threads),
        Verify::Precision(options) => precision(options),
        Verify::Layouts(options) => every_layout(&options),
    }
}

fn every_layout(a: &Layouts) -> Result<Outcome> {
    let models = match &a.config {
        Some(path) if path.is_dir() => vec![(None, ModelConfig::from_folder(path)?)],
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
            let place = path.display().to_string();
            let value = serde_json::from_str(&text).map_err(|e| format!("{place}: {e}"))?;
            vec![(None, ModelConfig::from_json(&place, value)?)]
        }
        None => layouts::tiny_models()?.into_iter().map(|(name, c)| (Some(name), c)).collect(),
    };
    let header =
        ["layout", "ranks", "loss", "norm", "worst gradient", "of", "weights", "tokens", "MB a step", "verdict"];
    let mut table = Table::new(super::style(), &header);
    let (mut passed, mut all, mut faults) = (0, 0, vec![]);
    for (name, config) in models {
        let mut cases = layouts::chosen(&config, a.ranks, &a.only)?;
        if let Some(name) = name {
            cases.iter_mut().for_each(|c| c.name = format!("{name}: {}", c.name));
        }
        let mut printed: Result<()> = Ok(());
        layouts::verify(&config, &cases, &mut |r| {
            if !a.json {
                eprintln!("{} {}", if r.pass { "pass" } else { "FAIL" }, r.layout);
            } else if printed.is_ok() {
                printed = serde_json::to_string(r).map_err(Into::into).and_then(|l| Ok(out::line(l)?));
            }
            all += 1;
            passed += usize::from(r.pass);
            faults.extend(r.faults.iter().map(|f| format!("{}: {f}", r.layout)));
            table.row([
                r.layout.clone(),
                r.world.to_string(),
                format!("{:.1e}", r.loss_rel),
                format!("{:.1e}", r.norm_rel),
                format!("{:.1e}", r.grad_rel_max),
                r.grad_worst.clone(),
                format!("{:.1e}", r.weights_rel_max),
                if r.tokens_equal { "equal" } else { "DIFFER" }.into(),
                format!("{:.3}", r.bytes_a_step as f64 / 1e6),
                if r.pass { "pass" } else { "FAIL" }.into(),
            ]);
        })?;
        printed?;
    }
    if !a.json {
        out::text(table)?;
        out::line(format!("{passed} of {all} layouts give the numbers of one rank"))?;
    }
    faults.iter().for_each(|f| eprintln!("{f}"));
    Ok(if passed == all { Outcome::Done } else { Outcome::Failed })
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
