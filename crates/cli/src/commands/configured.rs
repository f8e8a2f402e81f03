//! Commands that take `CONFIG.yaml key=value... --json`.

use phalanx_config::{Config, Purpose, parse_overrides};

use crate::outcome::Result;

/// A configuration with the switches that are no keys.
pub struct Configured {
    pub config: Config,
    pub json: bool,
    pub plain: bool,
}

/// Reads file, overrides and switches, checks them for `purpose`, and says what is accepted without effect.
pub fn read(args: &[String], purpose: Purpose) -> Result<Configured> {
    let (mut json, mut plain, mut rest) = (false, false, Vec::new());
    for a in args {
        match a.as_str() {
            "--json" => json = true,
            "--plain" => plain = true,
            other => rest.push(other),
        }
    }
    let file = match rest.first() {
        Some(a) if !a.starts_with("--") && !a.contains('=') => Some(rest.remove(0)),
        _ => None,
    };
    let overrides = parse_overrides(&rest)?;
    let config = match file {
        Some(path) => Config::load(path, &overrides)?,
        None => Config::from_overrides(&overrides)?,
    };
    config.check_for(purpose)?;
    for note in config.notes().iter().filter(|n| n.only.is_none_or(|only| only == purpose)) {
        eprintln!("note: {note}");
    }
    Ok(Configured { config, json, plain })
}
