//! `phalanx verify parity DIR...`

use phalanx_report::Table;
use phalanx_train::parity;
use serde_json::json;

use crate::args::Verify;
use crate::out;
use crate::outcome::{Outcome, Result, chain};

pub fn run(what: Verify) -> Result<Outcome> {
    let Verify::Parity { dirs, json, threads } = what;
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
