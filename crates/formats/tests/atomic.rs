//! Files and folders appear whole or not at all.

mod common;

use std::fs;
use std::io;
use std::path::Path;

use common::Scratch;
use phalanx_formats::{FormatError, atomic};

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What the system says when the disk is full.
fn disk_full() -> io::Error {
    io::Error::from(io::ErrorKind::StorageFull)
}

#[test]
fn a_file_is_replaced_whole_or_not_at_all() {
    let tmp = Scratch::new();
    let path = tmp.path().join("state.json");
    atomic::write_bytes(&path, b"old").unwrap();
    let e = atomic::write_file(&path, |w| {
        w.write_all(b"half of the ne")?;
        Err::<(), _>(io::Error::other("the caller gave up"))
    });
    assert!(e.unwrap_err().to_string().contains("the caller gave up"));
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(tmp.path()), ["state.json"]);
    let n = atomic::write_file(&path, |w| w.write_all(b"new").map(|()| 7)).unwrap();
    assert_eq!((n, fs::read(&path).unwrap()), (7, b"new".to_vec()));
    assert_eq!(names(tmp.path()), ["state.json"]);
}

#[test]
fn a_full_disk_leaves_the_old_and_says_so() {
    let tmp = Scratch::new();
    let file = tmp.path().join("f");
    atomic::write_bytes(&file, b"old").unwrap();
    let e = atomic::write_file(&file, |w| w.write_all(b"new").and_then(|()| Err::<(), _>(disk_full()))).unwrap_err();
    assert!(matches!(e, FormatError::DiskFull { free: Some(_), .. }), "{e}");
    assert!(e.to_string().contains("the disk is full"), "{e}");
    assert_eq!(fs::read(&file).unwrap(), b"old");

    let dir = tmp.path().join("d");
    atomic::write_folder(&dir, |t| atomic::write_bytes(t.join("x"), b"old")).unwrap();
    let e = atomic::replace_folder(&dir, |t| {
        atomic::write_bytes(t.join("x"), b"new")?;
        Err::<(), _>(FormatError::io(t.join("y"), "write", disk_full()))
    });
    assert!(matches!(e, Err(FormatError::DiskFull { .. })));
    assert_eq!(fs::read(dir.join("x")).unwrap(), b"old");
    assert_eq!(names(tmp.path()), ["d", "f"]);

    let e = atomic::ensure_space(tmp.path().join("not/yet/there"), u64::MAX).unwrap_err();
    assert!(e.to_string().contains(&format!("{} bytes are needed", u64::MAX)), "{e}");
    atomic::ensure_space(tmp.path(), 1).unwrap();
}

#[test]
fn a_folder_is_refused_or_replaced() {
    let tmp = Scratch::new();
    let dir = tmp.path().join("parent/run");
    let put = |name: &'static str| move |t: &Path| atomic::write_bytes(t.join("sub.txt"), name.as_bytes());
    atomic::write_folder(&dir, put("one")).unwrap();
    let e = atomic::write_folder(&dir, |_| -> Result<(), FormatError> { panic!("must not run") }).unwrap_err();
    assert!(matches!(e, FormatError::OutputExists { .. }), "{e}");
    fs::write(dir.join("left-over"), "x").unwrap();
    atomic::replace_folder(&dir, put("two")).unwrap();
    assert_eq!((names(&dir), fs::read(dir.join("sub.txt")).unwrap()), (vec!["sub.txt".to_string()], b"two".to_vec()));
    assert_eq!(names(&tmp.path().join("parent")), ["run"]);

    let empty = tmp.path().join("empty");
    fs::create_dir(&empty).unwrap();
    atomic::write_folder(&empty, put("three")).unwrap();
    let e = atomic::replace_folder(empty.join("sub.txt"), put("x")).unwrap_err();
    assert!(matches!(e, FormatError::BadOutputPath { .. }), "{e}");
    let e = atomic::write_folder(empty.join("sub.txt"), put("x")).unwrap_err();
    assert!(matches!(e, FormatError::BadOutputPath { .. }), "{e}");
    assert!(matches!(atomic::replace_folder("/", put("x")), Err(FormatError::BadOutputPath { .. })));
}

#[test]
fn a_panic_inside_leaves_nothing() {
    let tmp = Scratch::new();
    let dir = tmp.path().join("d");
    let caught = std::panic::catch_unwind(|| {
        let _ = atomic::write_folder(&dir, |t| -> Result<(), FormatError> {
            fs::write(t.join("x"), "x").unwrap();
            panic!("on purpose")
        });
    });
    assert!(caught.is_err());
    assert!(names(tmp.path()).is_empty());
}

#[test]
fn stale_left_overs_go_and_live_ones_stay() {
    let tmp = Scratch::new();
    // What a killed process leaves: even with our own process id, as happens in containers.
    let dead = tmp.path().join(format!(".tmp-checkpoint-10-{}", std::process::id()));
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("weights"), "half").unwrap();
    fs::write(tmp.path().join(".tmp-state.json-99-3"), "half").unwrap();
    // Not ours.
    fs::write(tmp.path().join(".tmp-notes"), "mine").unwrap();
    fs::write(tmp.path().join("tmp-x-1"), "mine").unwrap();

    atomic::write_folder(tmp.path().join("checkpoint-10"), |live| {
        assert_ne!(live, dead, "a taken name is not shared");
        let removed = atomic::clean_stale(tmp.path())?;
        assert_eq!(removed.len(), 2, "{removed:?}");
        assert!(live.is_dir());
        Ok::<_, FormatError>(())
    })
    .unwrap();
    assert_eq!(names(tmp.path()), [".tmp-notes", "checkpoint-10", "tmp-x-1"]);
}

#[test]
fn two_writers_of_one_target_do_not_mix() {
    let tmp = Scratch::new();
    let path = tmp.path().join("f");
    std::thread::scope(|s| {
        for i in 0..4u8 {
            let path = &path;
            s.spawn(move || {
                for _ in 0..5 {
                    atomic::write_file(path, |w| (0..2000).try_for_each(|_| w.write_all(&[i; 64]))).unwrap();
                }
            });
        }
    });
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 128_000);
    assert!(bytes.iter().all(|b| *b == bytes[0]));
    assert_eq!(names(tmp.path()), ["f"]);
}

/// Lies in the folder that a child process works in until it is killed.
const MARKER: &str = "phalanx-formats-test-child";

/// Not a test of its own: the child of `killed_at_any_moment`. In a folder without the marker it does nothing.
#[test]
fn child_that_writes_until_killed() {
    if !Path::new(MARKER).exists() {
        return;
    }
    let dir = Path::new(".");
    for round in 0u8.. {
        let put = |t: &Path| (0..3).try_for_each(|i| atomic::write_bytes(t.join(format!("{i}")), &[round; 30_000]));
        atomic::replace_folder(dir.join("folder"), put).unwrap();
        atomic::write_bytes(dir.join("file"), &[round; 100_000]).unwrap();
        if round == 255 {
            break;
        }
    }
}

#[test]
fn killed_at_any_moment() {
    let tmp = Scratch::new();
    let (file, folder) = (tmp.path().join("file"), tmp.path().join("folder"));
    let whole = |path: &Path, len: usize| {
        let bytes = fs::read(path).unwrap();
        assert!(bytes.len() == len && bytes.iter().all(|b| *b == bytes[0]), "{}: a mixture", path.display());
        bytes[0]
    };
    fs::write(tmp.path().join(MARKER), "").unwrap();
    for round in 0..12u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_killed"])
            .current_dir(tmp.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while !file.exists() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(round * 3));
        child.kill().unwrap();
        child.wait().unwrap();
        whole(&file, 100_000);
        let parts: Vec<u8> = (0..3).map(|i| whole(&folder.join(i.to_string()), 30_000)).collect();
        assert!(parts.iter().all(|p| *p == parts[0]), "files of two saves: {parts:?}");
        atomic::clean_stale(tmp.path()).unwrap();
        assert_eq!(names(tmp.path()), ["file", "folder", MARKER]);
    }
}
