//! Commands that take `CONFIG.yaml key=value... --json`.

use phalanx_config::{Config, Purpose, parse_overrides};

use crate::outcome::Result;

/// A configuration with the switches that are no keys.
pub struct Configured {
    pub config: Config,
    pub json: bool,
    pub plain: bool,
}

/// A trained model in `output_dir` that a configuration does not name as what it is about.
pub struct Forgotten {
    /// The key that names something else.
    pub key: &'static str,
    /// What to set.
    pub mend: String,
}

/// Whether a training configuration, used for something else than training, passes over its own result.
pub fn forgotten(config: &Config) -> Option<Forgotten> {
    let dir = config.train.output_dir.as_ref()?;
    let shown = dir.display();
    if dir.join("adapter_config.json").is_file() {
        let named = !config.model.adapter_name_or_path.is_empty();
        let mend = format!("adapter_name_or_path={shown}");
        return (!named).then_some(Forgotten { key: "adapter_name_or_path", mend });
    }
    let whole = |p: &std::path::Path| std::fs::canonicalize(p).ok();
    let named = config.model.model_name_or_path.as_deref().and_then(|m| whole(std::path::Path::new(m)));
    let trained = dir.join("config.json").is_file() && named.is_some() && named != whole(dir);
    trained.then(|| Forgotten { key: "model_name_or_path", mend: format!("model_name_or_path={shown}") })
}

/// Says so, where using the base model may be what is wanted (to compare with it).
pub fn note_forgotten(config: &Config) {
    if let Some(f) = forgotten(config) {
        eprintln!("note: {} is not what was trained with this file; for that, set {}", f.key, f.mend);
    }
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
