//! Which parameters are gathered together.

use phalanx_nn::{Describe, Parameter, Walk};

use crate::{DistributedError, Pattern};

/// Parameters that are gathered together.
pub struct Unit {
    /// Scope path of the module; empty for what belongs to the whole pass.
    pub path: String,
    /// Its parameters, in the order of the forward.
    pub parameters: Vec<Parameter>,
}

/// The units that `patterns` name, in the order of the forward, after the one of what is left. A parameter that is used twice belongs to
/// the first place that is not inside a named module if there is one (it is needed there all the time), else to the first.
///
/// # Errors
/// If a pattern cannot be read or matches nothing.
pub fn units(model: &dyn Describe, patterns: &[String]) -> Result<Vec<Unit>, DistributedError> {
    let patterns =
        patterns.iter().map(|p| Ok((p, Pattern::parse(p)?))).collect::<Result<Vec<_>, DistributedError>>()?;
    let (mut matched, mut paths) = (vec![false; patterns.len()], Vec::<String>::new());
    let mut uses: Vec<(String, Parameter)> = vec![];
    phalanx_nn::walk(model, &mut |event| match event {
        Walk::Module(path, _) => {
            for (hit, (_, pattern)) in matched.iter_mut().zip(&patterns) {
                if pattern.matches(path) {
                    *hit = true;
                    paths.push(path.to_owned());
                }
            }
        }
        Walk::Parameter(path, p) => uses.push((path.to_owned(), p.clone())),
    });
    paths.dedup();
    if let Some((text, _)) = patterns.iter().zip(&matched).find(|(_, hit)| !**hit).map(|(p, _)| p) {
        return Err(DistributedError::Plan {
            what: format!("units: pattern \"{text}\" matches no module"),
            mend: "`phalanx plan show` lists the modules".into(),
        });
    }
    let inside = |path: &str, unit: &str| path == unit || path.strip_prefix(unit).is_some_and(|r| r.starts_with('.'));
    let mut units = vec![Unit { path: String::new(), parameters: vec![] }];
    units.extend(paths.into_iter().map(|path| Unit { path, parameters: vec![] }));
    // The innermost unit of each use; a parameter goes to the unit of the whole pass as soon as one of its uses does.
    let unit_of = |path: &str| {
        let deepest = (1..units.len()).filter(|&i| inside(path, &units[i].path)).max_by_key(|&i| units[i].path.len());
        deepest.unwrap_or(0)
    };
    let mut homes: Vec<(Parameter, usize)> = vec![];
    for (path, p) in uses {
        let unit = unit_of(&path);
        match homes.iter_mut().find(|(q, _)| q.is(&p)) {
            Some((_, home)) if *home != unit => *home = 0,
            Some(_) => {}
            None => homes.push((p, unit)),
        }
    }
    for (p, unit) in homes {
        units[unit].parameters.push(p);
    }
    units.retain(|u| u.path.is_empty() || !u.parameters.is_empty());
    Ok(units)
}
