//! Source files stay short enough to be read in one go.

use std::path::{Path, PathBuf};

use crate::{Faults, Result};

/// A file longer than this wants to be two.
const WARN: usize = 500;
/// A file longer than this is refused.
const LIMIT: usize = 800;

/// Counts the lines of every `.rs` file, prints a warning for the long ones, and refuses the very long ones.
pub fn check(root: &Path) -> Result<Faults> {
    let mut faults = vec![];
    let mut files = vec![];
    for folder in ["crates", "testkit", "xtask", "benches", "examples"] {
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    for path in files {
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let lines = text.lines().count();
        let name = path.strip_prefix(root).unwrap_or(&path).display();
        if lines > LIMIT {
            faults.push(format!("{name} has {lines} lines, {LIMIT} is the limit; make it two files"));
        } else if lines > WARN {
            println!("files: warning: {name} has {lines} lines; above {WARN}, it wants to be two");
        }
    }
    Ok(faults)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    // Not every workspace has all of these folders.
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
