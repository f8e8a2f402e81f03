//! Files and folders that appear whole or not at all.
//!
//! A reader, or a run that is killed at any moment, sees either the old content or the new one. The steps are the usual
//! ones: write under a temporary name in the same folder, flush to disk (`fsync`), rename, flush the folder. Temporary
//! names are `.tmp-<name>-<pid>`, and their owner holds a file lock (`flock`) on them for as long as it lives; so
//! [`clean_stale`] knows a left-over from work in progress without trusting process ids, which containers reuse.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{FormatError, Result};

/// How temporary names begin.
pub const TEMP_PREFIX: &str = ".tmp-";

/// Writes the file `path` atomically with what `write` puts out.
///
/// An error of `write` that carries a [`FormatError`] inside (`io::Error::from(format_error)`) is given back as that.
///
/// # Errors
/// What `write` or the disk says; `path` is then as it was. The folder of `path` must exist.
pub fn write_file<T>(path: impl AsRef<Path>, write: impl FnOnce(&mut dyn Write) -> io::Result<T>) -> Result<T> {
    let path = path.as_ref();
    let mut temp = Temp::new_file(path)?;
    let written = (|| {
        let mut buffered = BufWriter::with_capacity(1 << 20, &temp.handle);
        let value = write(&mut buffered)?;
        buffered.flush()?;
        drop(buffered);
        temp.handle.sync_all()?;
        Ok(value)
    })();
    match written {
        Ok(value) => {
            temp.rename_to(path)?;
            Ok(value)
        }
        Err(e) => {
            // The space of the unfinished file counts as free again in the message.
            drop(temp);
            Err(unwrap_io(path, "write the file", e))
        }
    }
}

/// Writes `bytes` to the file `path` atomically.
///
/// # Errors
/// As [`write_file`].
pub fn write_bytes(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    write_file(path, |w| w.write_all(bytes))
}

/// Creates the folder `path` atomically with what `fill` writes into the temporary folder it is given.
///
/// Parents are created. An existing empty folder is taken over.
///
/// # Errors
/// [`FormatError::OutputExists`] (before `fill` runs) if `path` holds anything; what `fill` or the disk says. Nothing is
/// left behind then.
pub fn write_folder<T, E: From<FormatError>>(
    path: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let path = path.as_ref();
    if !is_free(path)? {
        return Err(FormatError::OutputExists { path: path.to_path_buf() }.into());
    }
    write_folder_with(path, fill)
}

/// Like [`write_folder`], but an existing folder is replaced: in one step, after the new one is complete and on disk.
///
/// # Errors
/// What `fill` or the disk says; the old folder is then as it was.
pub fn replace_folder<T, E: From<FormatError>>(
    path: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    write_folder_with(path.as_ref(), fill)
}

fn write_folder_with<T, E: From<FormatError>>(path: &Path, fill: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
    if path.exists() && !path.is_dir() {
        let (what, mend) = ("is a file, where a folder is to be written", "choose another path, or remove the file");
        return Err(FormatError::BadOutputPath { path: path.to_path_buf(), what, mend }.into());
    }
    let parent = parent_of(path);
    fs::create_dir_all(&parent).map_err(|e| FormatError::io(&parent, "create the folder", e))?;
    let mut temp = Temp::new_folder(path)?;
    let value = fill(&temp.path)?;
    sync_tree(&temp.path)?;
    temp.rename_to(path)?;
    Ok(value)
}

/// What this process is writing at the moment, for [`abandon`].
static IN_PROGRESS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn in_progress() -> MutexGuard<'static, Vec<PathBuf>> {
    // A list of paths is whole at every moment, whatever thread died.
    IN_PROGRESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes everything that this process has begun to write and not finished: for a process that a signal ends. Nothing
/// more can be begun or finished afterwards (the writing threads wait until the process is gone).
pub fn abandon() {
    let list = in_progress();
    for path in list.iter() {
        // A thread may still add a file to the folder.
        for _ in 0..3 {
            let gone = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            if gone.is_ok() {
                break;
            }
        }
    }
    std::mem::forget(list);
}

/// Removes temporary files and folders in `dir` whose writers have died, and returns what was removed.
///
/// Anything a living process still writes is left alone, also in this process.
///
/// # Errors
/// `dir` cannot be listed, or a left-over cannot be removed.
pub fn clean_stale(dir: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let dir = dir.as_ref();
    let mut removed = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| FormatError::io(dir, "list the folder", e))? {
        let entry = entry.map_err(|e| FormatError::io(dir, "list the folder", e))?;
        let path = entry.path();
        if !is_temp_name(&entry.file_name().to_string_lossy()) {
            continue;
        }
        // Neither links nor devices are ours.
        let Ok(kind) = entry.file_type() else { continue };
        if !kind.is_file() && !kind.is_dir() {
            continue;
        }
        // Gone meanwhile, or locked by its writer: not stale.
        let Ok(handle) = File::open(&path) else { continue };
        if handle.try_lock().is_err() {
            continue;
        }
        let gone = if kind.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        gone.map_err(|e| FormatError::io(&path, "remove the left-over", e))?;
        removed.push(path);
    }
    Ok(removed)
}

/// Fails if fewer than `needed` bytes are free where `path` is, or will be.
///
/// # Errors
/// [`FormatError::DiskFull`] with both numbers.
pub fn ensure_space(path: impl AsRef<Path>, needed: u64) -> Result<()> {
    let path = path.as_ref();
    match free_space(path) {
        Some(free) if free < needed => {
            Err(FormatError::DiskFull { path: final_name(path), needed: Some(needed), free: Some(free) })
        }
        _ => Ok(()),
    }
}

/// Bytes that this user may still write on the disk of `path` (or of its nearest parent that exists).
pub fn free_space(path: impl AsRef<Path>) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|p| p.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Whether `path` is absent or an empty folder.
///
/// # Errors
/// The folder cannot be listed.
pub fn is_free(path: &Path) -> Result<bool> {
    match fs::read_dir(path) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        // A file in the way is told by the caller.
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => Ok(true),
        Err(e) => Err(FormatError::io(path, "list the folder", e)),
    }
}

/// `.tmp-<something>-<digits>`, as [`Temp::path_for`] makes them.
fn is_temp_name(name: &str) -> bool {
    name.strip_prefix(TEMP_PREFIX)
        .and_then(|rest| rest.rsplit_once('-'))
        .is_some_and(|(stem, n)| !stem.is_empty() && !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// `path` as the user knows it: temporary names in it replaced by those they stand for.
pub(crate) fn final_name(path: &Path) -> PathBuf {
    let known = |part: &std::ffi::OsStr| {
        let name = part.to_str().filter(|n| is_temp_name(n))?;
        // `.tmp-<name>-<pid>` or `.tmp-<name>-<pid>-<attempt>`.
        let pid = format!("-{}", std::process::id());
        let end = name.rfind(&pid).filter(|&at| at >= TEMP_PREFIX.len())?;
        Some(PathBuf::from(&name[TEMP_PREFIX.len()..end]))
    };
    path.iter().map(|part| known(part).unwrap_or_else(|| PathBuf::from(part))).collect()
}

fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// A [`FormatError`] that travelled inside an I/O error comes out again.
fn unwrap_io(path: &Path, action: &'static str, e: io::Error) -> FormatError {
    e.downcast::<FormatError>().unwrap_or_else(|e| FormatError::io(path, action, e))
}

/// A locked temporary file or folder, removed when dropped before [`Temp::rename_to`].
struct Temp {
    path: PathBuf,
    handle: File,
    is_dir: bool,
    live: bool,
}

impl Temp {
    fn new_file(target: &Path) -> Result<Self> {
        Self::create(target, false, |p| OpenOptions::new().write(true).create_new(true).open(p))
    }

    fn new_folder(target: &Path) -> Result<Self> {
        Self::create(target, true, |p| {
            fs::create_dir(p)?;
            File::open(p)
        })
    }

    /// The `attempt`-th temporary name for `target`.
    fn path_for(target: &Path, attempt: u32) -> Result<PathBuf> {
        let Some(name) = target.file_name() else {
            let (what, mend) = ("has no file name of its own", "name the file or folder to be written");
            return Err(FormatError::BadOutputPath { path: target.to_path_buf(), what, mend });
        };
        let mut temp = std::ffi::OsString::from(TEMP_PREFIX);
        temp.push(name);
        temp.push(format!("-{}", std::process::id()));
        if attempt > 0 {
            temp.push(format!("-{attempt}"));
        }
        Ok(parent_of(target).join(temp))
    }

    /// Takes the first name that is free: two threads may write the same target, and a dead process with the same id
    /// may have left its files.
    fn create(target: &Path, is_dir: bool, make: impl Fn(&Path) -> io::Result<File>) -> Result<Self> {
        for attempt in 0..1000 {
            let path = Self::path_for(target, attempt)?;
            let handle = match make(&path) {
                Ok(handle) => handle,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(FormatError::io(&path, "create a temporary file or folder", e)),
            };
            // Between making and locking, `clean_stale` elsewhere may have taken it: then its name is gone, or
            // belongs to another inode.
            let locked = match handle.try_lock() {
                Ok(()) => true,
                Err(fs::TryLockError::WouldBlock) => false,
                // A file system without locks must not keep anybody from writing.
                Err(fs::TryLockError::Error(_)) => true,
            };
            let ours =
                locked && matches!((handle.metadata(), fs::metadata(&path)), (Ok(a), Ok(b)) if a.ino() == b.ino());
            if ours {
                in_progress().push(path.clone());
                return Ok(Self { path, handle, is_dir, live: true });
            }
        }
        let (what, mend) = ("a thousand temporary names beside it are taken", "remove the .tmp-* entries there");
        Err(FormatError::BadOutputPath { path: target.to_path_buf(), what, mend })
    }

    fn rename_to(&mut self, target: &Path) -> Result<()> {
        let mut list = in_progress();
        let io = |e| FormatError::io(target, "put the finished file or folder in place", e);
        let replaced_folder = self.is_dir && !is_free(target)?;
        if replaced_folder {
            // Afterwards the old folder lies under the temporary name, and `drop` removes it.
            exchange(&self.path, target).map_err(io)?;
        } else {
            fs::rename(&self.path, target).map_err(io)?;
            self.live = false;
            list.retain(|p| *p != self.path);
        }
        drop(list);
        let parent = parent_of(target);
        File::open(&parent).and_then(|d| d.sync_all()).map_err(|e| FormatError::io(&parent, "flush the folder", e))
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if self.live {
            // A failure to clean up must not hide the error that led here; `clean_stale` finds what is left.
            let _ = if self.is_dir { fs::remove_dir_all(&self.path) } else { fs::remove_file(&self.path) };
            in_progress().retain(|p| *p != self.path);
        }
    }
}

/// Swaps two folders: in one step where the file system can, otherwise with a moment in which `target` is absent.
fn exchange(new: &Path, target: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        use rustix::io::Errno;
        match renameat_with(CWD, new, CWD, target, RenameFlags::EXCHANGE) {
            Ok(()) => return Ok(()),
            // Not known to this kernel or file system.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let mut aside = new.as_os_str().to_os_string();
    aside.push("-0");
    let aside = PathBuf::from(aside);
    fs::rename(target, &aside)?;
    if let Err(e) = fs::rename(new, target) {
        fs::rename(&aside, target)?;
        return Err(e);
    }
    fs::rename(&aside, new)
}

/// Flushes every file and folder under `dir` to the disk.
fn sync_tree(dir: &Path) -> Result<()> {
    let io = |p: &Path, e| FormatError::io(p, "flush to disk", e);
    for entry in fs::read_dir(dir).map_err(|e| io(dir, e))? {
        let entry = entry.map_err(|e| io(dir, e))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| io(&path, e))?;
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|f| f.sync_all()).map_err(|e| io(&path, e))?;
        }
    }
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| io(dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_read_final_names() -> Result<()> {
        for attempt in [0, 3] {
            let temp = Temp::path_for(Path::new("/runs/my-model-7"), attempt)?;
            assert_eq!(final_name(&temp.join("model.safetensors")), Path::new("/runs/my-model-7/model.safetensors"));
        }
        assert_eq!(final_name(Path::new("a/.tmp-x/b")), Path::new("a/.tmp-x/b"));
        Ok(())
    }
}
