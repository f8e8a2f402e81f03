//! Where a run begins, and what it refuses to begin with.

use std::path::Path;

use phalanx_train::resume::{Start, starting_point};

use crate::common::{Bench, metrics, run};

fn begun(name: &str) -> Bench {
    let bench = Bench::new(name, 20);
    run(bench.config("out", "save_steps: 2\n"), Some(3)).unwrap();
    assert!(bench.out("out").join("checkpoint-2").is_dir() && bench.out("out").join("checkpoint-3").is_dir());
    bench
}

fn start(bench: &Bench, keys: &str) -> phalanx_train::Result<Start> {
    let start = starting_point(&bench.config("out", keys))?;
    start.clear()?;
    Ok(start)
}

fn refused(bench: &Bench, keys: &str) -> String {
    start(bench, keys).unwrap_err().to_string()
}

fn ends(start: &Start) -> Option<String> {
    start.checkpoint.as_deref().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned())
}

#[test]
fn the_last_checkpoint_a_named_one_or_none() {
    let bench = begun("start");
    assert_eq!(ends(&start(&bench, "").unwrap()).unwrap(), "checkpoint-3");
    assert_eq!(ends(&start(&bench, "resume_from_checkpoint: true\n").unwrap()).unwrap(), "checkpoint-3");
    let e = refused(&bench, "resume_from_checkpoint: false\n");
    assert!(e.contains("holds another run") && e.contains("overwrite_output_dir"), "{e}");

    // An earlier one: the later ones would be mistaken for those of this run.
    let two = bench.out("out").join("checkpoint-2").display().to_string();
    let e = refused(&bench, &format!("resume_from_checkpoint: {two}\n"));
    assert!(e.contains("checkpoint-3"), "{e}");
    let e = refused(&bench, &format!("resume_from_checkpoint: {}\n", bench.out("out").display()));
    assert!(e.contains("name a checkpoint in it") && e.contains("checkpoint-3"), "{e}");
    // Deciding alone removes nothing: data or weights may yet be found unsound.
    let keys = format!("resume_from_checkpoint: {two}\noverwrite_output_dir: true\n");
    starting_point(&bench.config("out", &keys)).unwrap();
    assert!(bench.out("out").join("checkpoint-3").exists());
    let s = start(&bench, &keys).unwrap();
    assert_eq!(ends(&s).unwrap(), "checkpoint-2");
    assert!(s.notes.iter().any(|n| n.contains("checkpoint-3, which came after")), "{:?}", s.notes);
    assert!(!bench.out("out").join("checkpoint-3").exists());

    // In another folder: the first run stays, the second goes on from it.
    let s = starting_point(&bench.config("branch", &format!("resume_from_checkpoint: {two}\n"))).unwrap();
    assert_eq!(ends(&s).unwrap(), "checkpoint-2");
    run(bench.config("branch", &format!("resume_from_checkpoint: {two}\n")), None).unwrap();
    assert!(bench.out("out").join("checkpoint-2").exists());
    assert_eq!(metrics(&bench.out("branch"))[0][0], 3.0);

    let e = starting_point(&bench.config("none", "resume_from_checkpoint: true\n")).unwrap_err().to_string();
    assert!(e.contains("no checkpoint to go on from"), "{e}");
    assert_eq!(starting_point(&bench.config("none", "")).unwrap(), Start::default());
}

#[test]
fn overwriting_removes_what_a_run_wrote_and_nothing_else() {
    let bench = begun("overwrite");
    let out = bench.out("out");
    run(bench.config("out", "save_steps: 2\nplot_loss: true\nreport_to: tensorboard\n"), None).unwrap();
    std::fs::write(out.join("notes.md"), "mine").unwrap();
    std::fs::create_dir(out.join("papers")).unwrap();
    assert!(
        out.join("training_loss.svg").exists() && out.join("runs").exists() && out.join("model.safetensors").exists()
    );
    let s = start(&bench, "overwrite_output_dir: true\n").unwrap();
    assert_eq!(s.checkpoint, None);
    assert!(s.notes.iter().any(|n| n.contains("left alone") && n.contains("notes.md")), "{:?}", s.notes);
    let mut left: Vec<String> = std::fs::read_dir(&out)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|n| n != ".cache")
        .collect();
    left.sort();
    assert_eq!(left, ["notes.md", "papers"]);
}

#[test]
fn folders_with_other_things_are_not_written_into() {
    let bench = Bench::new("other", 8);
    let out = bench.out("out");
    std::fs::create_dir(&out).unwrap();
    assert!(start(&bench, "").is_ok(), "an empty folder");
    for quiet in ["run.yaml", "train.log", ".gitkeep"] {
        std::fs::write(out.join(quiet), "").unwrap();
    }
    assert!(start(&bench, "").is_ok(), "configuration and log");
    std::fs::write(out.join("metrics.jsonl"), "{\"step\": 1}\n").unwrap();
    let s = start(&bench, "").unwrap();
    assert!(s.notes[0].contains("before its first checkpoint"), "{:?}", s.notes);
    std::fs::write(out.join("thesis.tex"), "years of work").unwrap();
    let e = refused(&bench, "");
    assert!(e.contains("thesis.tex") && e.contains("output_dir"), "{e}");
    assert!(start(&bench, "overwrite_output_dir: true\n").is_ok());
    assert!(out.join("thesis.tex").exists());
    std::fs::write(out.join("model-00001-of-00002.safetensors"), "").unwrap();
    let e = refused(&bench, "");
    assert!(e.contains("another run") && e.contains("model-00001"), "{e}");

    std::fs::write(bench.out("file"), "").unwrap();
    let e = starting_point(&bench.config("file", "")).unwrap_err().to_string();
    assert!(e.contains("is a file"), "{e}");
    let e = starting_point(&bench.config("model", "overwrite_output_dir: true\n")).unwrap_err().to_string();
    assert!(e.contains("model_name_or_path") && e.contains("replace"), "{e}");
    assert!(bench.out("model").join("model.safetensors").exists());
}

#[test]
fn what_the_run_reads_is_never_removed() {
    let bench = begun("reads");
    let base = bench.out("out").join("checkpoint-3").display().to_string();
    let e = refused(&bench, &format!("model_name_or_path: {base}\noverwrite_output_dir: true\n"));
    assert!(e.contains("would remove") && e.contains("model_name_or_path"), "{e}");
    assert!(bench.out("out").join("checkpoint-3/model.safetensors").exists());
}

#[test]
fn other_settings_are_named() {
    let bench = begun("settings");
    for (keys, word) in [
        ("learning_rate: 1e-3\n", "learning_rate was 0.01 and is now 0.001"),
        ("per_device_train_batch_size: 4\n", "per_device_train_batch_size was 2 and is now 4"),
        ("gradient_accumulation_steps: 1\n", "gradient_accumulation_steps"),
        ("bf16: true\n", "bf16"),
        ("weight_decay: 0.1\n", "weight_decay"),
        ("cutoff_len: 32\n", "cutoff_len"),
        ("plan: {precision: bf16}\n", "plan.precision"),
    ] {
        let e = refused(&bench, keys);
        assert!(e.contains(word) && e.contains("checkpoint-3") && e.contains("overwrite_output_dir=true"), "{e}");
        // Other rows are refused in any case, so that way is not offered.
        assert_eq!(e.contains("resume_from_checkpoint=true"), word != "cutoff_len", "{e}");
        // By name it is allowed, and told.
        let s = start(&bench, &format!("{keys}resume_from_checkpoint: true\n")).unwrap();
        assert!(s.notes.iter().any(|n| n.contains(word)), "{:?}", s.notes);
    }
    for (keys, word) in [
        ("seed: 7\n", "seed was 42 and is now 7"),
        ("finetuning_type: freeze\nfreeze_trainable_layers: 1\n", "finetuning_type"),
        ("finetuning_type: lora\nlora_rank: 4\n", "lora_rank was 8 and is now 4"),
        ("plan: {freeze: lm_head}\n", "plan.freeze"),
    ] {
        for resume in ["", "resume_from_checkpoint: true\n"] {
            let e = refused(&bench, &format!("{keys}{resume}"));
            assert!(e.contains(word) && e.contains("another output_dir"), "{e}");
        }
    }
    let free = "num_train_epochs: 4\nlogging_steps: 5\nsave_steps: 7\nthreads: 2\nplot_loss: true\n\
                plan: {recompute: 'model.layers.{*}'}\n";
    let s = start(&bench, free).unwrap();
    assert_eq!(ends(&s).unwrap(), "checkpoint-3");
    assert!(s.notes.iter().any(|n| n.contains("num_train_epochs")), "{:?}", s.notes);
}

#[test]
fn other_data_under_the_same_name_is_found_out() {
    let bench = begun("data");
    crate::common::write_data(&bench.out("data.json"), 21);
    let e = run(bench.config("out", "save_steps: 2\n"), None).unwrap_err().to_string();
    assert!(e.contains("data is not that of the checkpoint"), "{e}");
}

#[test]
fn damaged_checkpoints_say_so() {
    let bench = begun("damaged");
    let dir = bench.out("out").join("checkpoint-3");
    let keep = std::fs::read(dir.join("optimizer.safetensors")).unwrap();
    std::fs::write(dir.join("optimizer.safetensors"), &keep[..keep.len() / 2]).unwrap();
    // Found before anything is loaded, and the way on is named.
    for e in [refused(&bench, ""), run(bench.config("out", "save_steps: 2\n"), None).unwrap_err().to_string()] {
        assert!(e.contains("optimizer.safetensors") && e.contains("damaged"), "{e}");
    }
    let e = refused(&bench, "resume_from_checkpoint: true\n");
    assert!(e.contains("go on from the one before") && e.contains("checkpoint-2"), "{e}");
    std::fs::write(dir.join("phalanx_state.json"), "{\"version\": 1").unwrap();
    let e = refused(&bench, "");
    assert!(e.contains("phalanx_state.json") && e.contains("damaged"), "{e}");
}

/// What a run replaces is still there after a mistake that only loading finds.
#[test]
fn a_mistake_found_late_costs_nothing() {
    let bench = begun("late");
    let model = bench.out("out").join("checkpoint-3").join("model.safetensors");
    let before = std::fs::read(&model).unwrap();
    let keys = "overwrite_output_dir: true\nfinetuning_type: lora\nlora_rank: 5000\n";
    let e = run(bench.config("out", keys), None).unwrap_err().to_string();
    assert!(e.contains("lora_rank"), "{e}");
    assert_eq!(std::fs::read(&model).unwrap(), before);
    assert!(bench.out("out").join("checkpoint-2").is_dir());
}
