//! `phalanx plan show` and `phalanx plan draw`

use phalanx_config::Purpose;
use phalanx_train::TrainError;
use phalanx_train::job::model_config;
use phalanx_train::method;
use serde_json::{Map, Value, json};

use super::{configured, draw};
use crate::args::{Configured, Plan};
use crate::out;
use crate::outcome::{Outcome, Result};

pub fn run(what: Plan) -> Result<Outcome> {
    match what {
        Plan::Show(args) => show(&args),
        Plan::Draw(args) => draw::run(&args),
    }
}

fn show(args: &Configured) -> Result<Outcome> {
    let c = configured::read(&args.args, Purpose::Plan)?;
    let model_config = model_config(&c.config)?;
    let model = phalanx_models::Model::new(&model_config)?;
    let sites = phalanx_parallel::sites(&model);
    let plan = method::plan(&c.config, &model_config, &sites)?;
    let resolved = phalanx_parallel::resolve(&sites, &plan).map_err(TrainError::Plan)?;
    if c.json {
        let modules: Map<String, Value> = resolved
            .modules
            .iter()
            .map(|(path, m)| {
                let settings = json!({"recompute": m.recompute, "precision": m.precision.to_string(), "trainable": m.trainable, "adapter": m.adapter});
                (path.clone(), settings)
            })
            .collect();
        out::line(json!({"plan": plan, "modules": modules}))?;
    } else {
        out::text(phalanx_parallel::show(&sites, &resolved))?;
    }
    Ok(Outcome::Done)
}
